"""Models of transformers compute with attn_graph what they compute with their eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import attn_graph as ag
from attn_graph.errors import GraphError

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

import transformers as hf
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

from attn_graph.integrations import layer_masks, whole_model
from attn_graph.integrations import transformers as integration
from attn_graph.nn.calls import attend_as
from tests.conftest import PROFILE
from tests.support.models import FAMILIES, LAYERS, VOCABULARY, WINDOW, Model
from tests.support.planning import one_way
from tests.support.tracing import traces
from tests.support.transformer_calls import (
    QUICK,
    Inputs,
    cached,
    cached_at_fixed_size,
    check_model,
    draw_inputs,
    families,
    logits_of,
    model_of,
    packed,
    packed_by_lengths,
    padded_left,
    padded_right,
    padding_of,
    results_of,
    stack,
    whole,
)


@pytest.fixture(autouse=True)
def no_dense_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask of these models is data; none becomes a tensor [B,1,M,N]."""
    for name in ("dense_mask", "boolean_mask"):
        monkeypatch.setattr(layer_masks, name, lambda _: pytest.fail("a dense mask"))


@pytest.mark.parametrize("name", families("tokens", "text", "speech", "images", "pairs"))
def test_logits_and_gradients_are_those_of_eager(name: str) -> None:
    check_model(name, whole, (24, 24))


@pytest.mark.parametrize("name", families("tokens", "text", "speech", "pairs"))
def test_padding_at_the_end_changes_nothing(name: str) -> None:
    check_model(name, padded_right)


@pytest.mark.parametrize("name", families("tokens", "text", "speech", "pairs"))
def test_padding_at_the_start_changes_nothing(name: str) -> None:
    check_model(name, padded_left)


@pytest.mark.parametrize("name", [p for p in families("tokens") if FAMILIES[p.values[0]].packs])
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    check_model(name, packed)


@pytest.mark.parametrize("name", families("tokens", "text"))
def test_cumulative_lengths_separate_packed_sequences(name: str) -> None:
    check_model(name, packed_by_lengths)


def test_cumulative_lengths_are_refused_where_keys_are_not_the_queries() -> None:
    model, ids = model_of("Llama", "attn_graph"), draw_inputs("Llama", (24,))[0]["input_ids"]
    ends, memory = torch.tensor([0, 12, 24]), DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=memory)
    with pytest.raises(GraphError, match=r"cu_seq_lens_q.*25 keys and 1 queries.*use_cache=False"):
        model(input_ids=ids[:, :1], past_key_values=memory, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("name", families("tokens", "speech", "pairs"))
def test_a_cache_changes_nothing(name: str) -> None:
    check_model(name, cached, (24, 24))


@pytest.mark.parametrize("name", families("tokens"))
def test_a_cache_of_fixed_size_changes_nothing(name: str) -> None:
    with torch.no_grad():  # it is written in place
        check_model(name, cached_at_fixed_size, (24, 24))


READS = {  # that read elements of a tensor on the host
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.nonzero, Tensor.__bool__, Tensor.__int__,
    Tensor.__index__, Tensor.__float__, torch.nonzero, torch.equal,
}  # fmt: skip


class Calls(TorchFunctionMode):
    """The functions of PyTorch's that were called while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[object] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: whatever PyTorch's functions take and give
        types: Sequence[type],
        args: Sequence[Any] = (),  # Any: the same
        kwargs: Mapping[str, Any] | None = None,  # Any: the same
    ) -> Any:  # Any: the same
        self.functions.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", QUICK)
def test_a_decode_step_reads_nothing_from_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache of fixed size, and padding. On a GPU, for which `is_readable_now` answers here;
    what the CPU's kernels read of their own tensors does not count."""

    def attend(*args: Any) -> Any:  # Any: those of `attend_as`
        with torch._C.DisableTorchFunction():
            return attend_as(*args)

    monkeypatch.setattr(integration, "attend_as", attend)
    monkeypatch.setattr(layer_masks, "is_readable_now", lambda tensor, M: M > 1)
    model, batch = model_of(name, "attn_graph"), stack(draw_inputs(name), left=True)
    ids, keep = batch["input_ids"], padding_of(batch)["attention_mask"]
    memory = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(input_ids=ids[:, :20], attention_mask=keep[:, :20], past_key_values=memory)
        for n in (20, 21):
            step = {"input_ids": ids[:, n : n + 1], "attention_mask": keep[:, : n + 1]}
            with Calls() as calls:
                model(**step, past_key_values=memory)
            assert Tensor.__getitem__ in calls.functions  # it sees what is called
            assert not calls.functions & READS


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param(*family.values, ("dynamic", "static")[n % 2], marks=family.marks)
        for n, family in enumerate(families("tokens", "speech", "pairs"))
    ],
)
def test_generation_gives_the_tokens_that_eager_gives(name: str, cache: str) -> None:
    batch = stack(draw_inputs(name), left=FAMILIES[name].reads == "tokens")
    batch.pop("decoder_input_ids", None)
    batch |= padding_of(batch)
    how = {"max_new_tokens": 64, "do_sample": False, "cache_implementation": cache}
    tokens = [model_of(name, each).generate(**batch, **how) for each in ("eager", "attn_graph")]
    assert tokens[0].shape[1] >= 64
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("name", "how"),
    [("Mistral", {"num_beams": 3}), ("Llama", {"prompt_lookup_num_tokens": 3})],
    ids=["beams", "prompt lookup"],
)
def test_beams_and_looked_up_tokens_are_those_of_eager(name: str, how: dict[str, int]) -> None:
    """Caches are put in another order, and cut after tokens that are not taken."""
    ids = draw_inputs(name, (12,))[0]["input_ids"].repeat(1, 2)
    more: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, **how}
    tokens = [model_of(name, x).generate(input_ids=ids, **more) for x in ("eager", "attn_graph")]
    assert tokens[0].shape[1] > ids.shape[1]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *(("Llama", cache) for cache in ("dynamic", "static", "quantized")),
        *((name, cache) for name in ("Mistral", "Gemma 2") for cache in ("dynamic", "static")),
        ("gpt-oss", "dynamic"),
    ],
)
@pytest.mark.parametrize("padding", [0, 5], ids=["even", "left padded"])
def test_tokens_after_the_first_build_no_plan(
    name: str, cache: str, padding: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However many, as windows fill and keys pass a multiple of 64: sizes of a growing cache have
    names, and nothing is warned of. But for one: when all padding has left a window, a step needs
    no flags any more."""
    ag.clear_cache()
    model, builds = model_of(name, "attn_graph"), list[int]()
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(5))
    mask, tokens = torch.ones_like(ids), 64 if name == "Llama" else 16
    mask[0, :padding] = 0
    packed = {"backend": "fp8"} if cache == "quantized" else None

    def count(ids: Tensor, *_: object) -> Tensor:
        builds.append(ag.cache_info().builds)
        return torch.zeros(len(ids), dtype=torch.bool)

    model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens,
        cache_implementation=cache, cache_config=packed, do_sample=False,
        stopping_criteria=[count],
    )  # fmt: skip
    assert builds[-1] - builds[1] == (padding > 0 and name != "Llama")
    assert not [r for r in caplog.records if "plans were built" in r.getMessage()]


@pytest.mark.parametrize("name", families("tokens", "text", "speech", "images", "pairs"))
def test_checkpointed_layers_have_the_same_gradients(name: str) -> None:
    """With dropout, which is to drop the same when a layer is computed again."""
    batch = stack(draw_inputs(name))
    results = []
    for checkpointing in (False, True):
        model = model_of(name, "attn_graph").train()
        for module in model.modules():  # of attention, by the names that models have for it
            for rate in ("attention_dropout", "dropout"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.25)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        results.append(results_of(model, logits_of(model, **batch, **padding_of(batch))))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(x, results[1][n]) for n, x in results[0].items())


def test_dropout_follows_the_default_generator() -> None:
    model = model_of("Llama", "attn_graph").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    inputs = draw_inputs("Llama", (24,))[0]

    def call(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return logits_of(model, **inputs)

    assert torch.equal(call(1), call(1))
    assert not torch.equal(call(1), call(2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_axes_is_taken_as_it_is(dtype: torch.dtype) -> None:
    keep = torch.ones(24, 24).tril(2).bool()[None, None]
    mask = keep if dtype == torch.bool else torch.zeros(1, 1, 24, 24).masked_fill(~keep, -1e9)
    inputs = draw_inputs("Llama", (24,))[0]
    added = torch.zeros(1, 1, 24, 24).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = logits_of(model_of("Llama", "eager"), **inputs, attention_mask=added)
    logits = logits_of(model_of("Llama", "attn_graph"), **inputs, attention_mask=mask)
    torch.testing.assert_close(logits, expected)


def test_weights_that_are_never_made_are_refused() -> None:
    with pytest.raises(GraphError, match=r'output_attentions.*set_attn_implementation\("eager"\)'):
        logits_of(
            model_of("Llama", "attn_graph"), **draw_inputs("Llama")[0], output_attentions=True
        )


def test_continuous_batching_outside_its_block_is_refused_by_transformers() -> None:
    """Whose list of implementations is fixed: the day it is not, the block can go."""
    with pytest.raises(ValueError, match="attn_graph is not supported for continuous batching"):
        model_of("Llama", "attn_graph").generate_batch(inputs=[[3, 4, 5]])


def test_layers_are_explained_by_name() -> None:
    inputs = draw_inputs("Gemma 2", (24,))[0]
    model = model_of("Gemma 2", "attn_graph")
    explanations = integration.explain_layers(model, "h200", **inputs)
    assert [*explanations] == [f"model.layers.{n}.self_attn" for n in (0, 1)]
    sliding, full = explanations.values()
    assert "mask=Band(low=-7, high=0)" in str(sliding.graph)
    assert "SoftCap(cap=50.0)" in str(full.graph)
    assert full.target == ag.Target.of("h200")


def test_a_model_without_layers_of_ours_is_not_explained() -> None:
    """Neither one with another attention nor one whose class has no attention interface."""
    inputs = draw_inputs("Llama", (24,))[0]
    config = hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    for model in (model_of("Llama", "eager"), hf.BloomForCausalLM(config)):
        name = type(model).__name__
        with pytest.raises(GraphError, match=f"no layer of {name} calls attn_graph.*'eager'"):
            integration.explain_layers(model, "h200", **inputs)


def test_layers_are_explained_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the GPU that the machine may have besides."""
    targets: list[ag.Target] = []
    monkeypatch.setattr(whole_model, "explain", lambda graph, target: targets.append(target))
    integration.explain_layers(model_of("Llama", "attn_graph"), None, **draw_inputs("Llama")[0])
    assert targets == [ag.Target.of("cpu")] * LAYERS


def test_a_new_length_needs_no_more_than_a_plan() -> None:
    """One plan for all layers of a kind, and none for lengths that were there."""
    model, ids = model_of("Gemma 2", "attn_graph"), draw_inputs("Gemma 2", (24,))[0]["input_ids"]
    ag.clear_cache()
    with torch.no_grad():
        for length in (24, 23, 24, 23):
            model(input_ids=ids[:, :length])
    assert ag.cache_info().builds == 4  # a window and none, twice


def check_compiled(name: str, backend: str, steps: int = 2) -> None:
    """A compiled model gives the same bits, gradients too, and is compiled once. Its padding is a
    mask of booleans, and lengths otherwise, so one way has to run both."""
    batch = stack(draw_inputs(name))
    batch |= padding_of(batch)
    model = model_of(name, "attn_graph")
    if name == "gpt-oss":
        model.set_experts_implementation("batched_mm")  # the other branches on numbers
    with one_way("kernel"):
        expected = results_of(model, logits_of(model, **batch))
        torch.compiler.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for _ in range(steps):
            results = results_of(model, compiled(**batch).logits)
            assert all(torch.equal(results[n], x) for n, x in expected.items())
        assert counter.frame_count == 1


@traces
def test_a_model_is_compiled_whole() -> None:
    check_compiled("Llama", "eager", steps=20)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several add the gradients of gpt-oss's experts up in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@traces
@pytest.mark.usefixtures("one_thread")
def test_a_model_of_each_family_is_compiled_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit where no weights are kept: compiled code computes them again."""
    monkeypatch.setattr("attn_graph.lowering.cpu.math.record_weights", lambda *_: None)
    ag.clear_cache()
    try:
        check_compiled(name, "aot_eager")
    finally:
        ag.clear_cache()


def whole_by_inductor(model: Model, inputs: list[Inputs]) -> Tensor:
    """All in one batch; what is not eager is compiled."""
    if model.config._attn_implementation == "eager":
        return whole(model, inputs)
    torch.compiler.reset()
    return whole(torch.compile(model, fullgraph=True), inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@traces
def test_inductor_compiles_a_model() -> None:
    """It fuses what is around attention, so it is near, and not the same."""
    check_model("Llama", whole_by_inductor, (24, 24))


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False])  # without, masks are told of packing
@traces
def test_lengths_become_symbols(use_cache: bool) -> None:
    model, counter = model_of("Gemma 3", "attn_graph"), CompileCounterWithBackend("eager")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    ids = stack(draw_inputs("Gemma 3", (30, 30)))["input_ids"]
    for length in (24, 23, 9, 30):
        part = {"input_ids": ids[:, :length], "use_cache": use_cache}
        assert torch.equal(compiled(**part).logits, model(**part).logits)
    assert counter.frame_count == 2  # with a number, then with a symbol


CACHES: dict[str, Callable[[Model], Any]] = {  # Any: of transformers
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=40),
}


def decode(call: Callable[..., Any], prompt: Tensor, memory: Any, steps: int) -> Tensor:
    """The tokens that greedy steps after a prompt give, itself included."""
    tokens = prompt
    for _ in range(steps):
        part = tokens[:, memory.get_seq_length() :]
        logits = call(input_ids=part, past_key_values=memory).logits
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
    return tokens


STEPS = [  # each family with each cache and a prompt below and above the window
    (name, cache, length)
    for name in ("Llama", "Mistral", "Llama 4")
    for cache in CACHES
    for length in (WINDOW - 3, WINDOW + 3)
    if PROFILE == "deep" or ((length < WINDOW) == (cache == "static")) == (name != "Llama")
]
QUICK_STEPS = [("Mistral", "static", WINDOW - 3)]


@pytest.mark.parametrize(
    ("name", "cache", "length"),
    [pytest.param(*step, marks=() if step in QUICK_STEPS else pytest.mark.slow) for step in STEPS],
)
@traces
def test_compiled_steps_give_the_tokens_that_eager_gives(
    name: str, cache: str, length: int
) -> None:
    """A prompt and steps after it, while a window or a chunk fills and beyond: compiled for the
    prompt, for a step, for steps of any length, and once or twice more when the window is full and
    a dynamic cache is a slice."""
    prompt = stack(draw_inputs(name, (length, length)))["input_ids"]
    eager, model = model_of(name, "eager"), model_of(name, "attn_graph")
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        due = decode(eager, prompt, CACHES[cache](eager), 9)
        assert torch.equal(decode(compiled, prompt, CACHES[cache](model), 9), due)
    slices = cache == "dynamic" and name != "Llama" and length < WINDOW
    assert counter.frame_count <= 4 + slices


def test_steps_that_fill_a_window_share_a_plan() -> None:
    model = model_of("Mistral", "attn_graph")
    memory = CACHES["static"](model)
    prompt = draw_inputs("Mistral", (2,))[0]["input_ids"]
    ag.clear_cache()
    with torch.no_grad():
        decode(model, prompt, memory, WINDOW - 2)
    assert ag.cache_info().builds == 2  # of the prompt, and of the steps
