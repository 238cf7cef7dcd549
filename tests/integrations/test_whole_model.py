"""A model's memory, from its config alone, is what its own code asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.cli.fit import fit, read_tokens
from attn_graph.errors import GraphError

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

import transformers as hf
from torch.utils._pytree import tree_leaves

from attn_graph.integrations import whole_model
from attn_graph.integrations.model_figures import ModelExplanation, Phase
from attn_graph.integrations.transformers import explain_model
from attn_graph.integrations.whole_model import Rehearsal, largest_fit
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from tests.support.command_line import run
from tests.support.equipped import equip
from tests.support.sources import ROOT

CONFIGS = ROOT / "examples" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
CASES: dict[str, dict[str, Any]] = {  # Any: options of `explain_model`
    "bert-base": {"phase": "train", "batch": 8},
    "deepseek-v3": {"phase": "decode", "batch": 8, "context": 4096},
    "gemma-2-9b": {"phase": "prefill", "batch": 4, "search": False},
    "gemma-3-1b": {"phase": "decode", "batch": 4, "search": False},
    "gpt-oss-20b": {"phase": "decode", "batch": 8, "search": False},
    "llama-3-70b": {"phase": "decode", "batch": 8, "gpus": 8, "search": False},
    "llama-3-8b": {"phase": "decode", "batch": 8, "context": 131072},
    "mistral-7b": {"phase": "prefill", "batch": 4},
    "mixtral-8x7b": {"phase": "decode", "batch": 8, "search": False},
    "qwen-3-8b": {
        "phase": "train", "gpus": 4, "divide": "context", "link": "nvlink", "search": False
    },
    "t5-base": {"phase": "decode", "batch": 8, "context": 512, "search": False},
}  # fmt: skip


def path_of(name: str) -> Path:
    return CONFIGS / f"{name}.json"


@pytest.mark.parametrize("name", NAMES)
def test_a_published_model_is_explained(name: str, golden: Callable[[object], None]) -> None:
    golden(explain_model(path_of(name), target=equip("h200"), **CASES[name]))


PUBLISHED = {  # parameters: of the papers and model cards, in millions
    "bert-base": 110, "deepseek-v3": 671_000, "gemma-2-9b": 9_240, "gemma-3-1b": 1_000,
    "gpt-oss-20b": 20_900, "llama-3-70b": 70_600, "llama-3-8b": 8_030, "mistral-7b": 7_240,
    "mixtral-8x7b": 46_700, "qwen-3-8b": 8_190, "t5-base": 223,
}  # fmt: skip


def storages(tensors: list[Any]) -> int:  # Any: tensors among others
    found = [x.untyped_storage() for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)]
    return sum({x._cdata: x.nbytes() for x in found}.values())


def step_with(model: Any, batch: int, context: int) -> Any:  # Any: of transformers
    """The cache after a prompt and a token, on the meta device, by attention of PyTorch's own."""
    ids = torch.zeros(batch, context, dtype=torch.long, device="meta")
    again: dict[str, Any]  # Any: what models take
    if model.config.is_encoder_decoder:
        first = model(input_ids=ids[:, 1:], decoder_input_ids=ids[:, 1:])
        again = {"decoder_input_ids": ids[:, :1]}
        again["encoder_outputs"] = (first.encoder_last_hidden_state,)
    else:
        first = model(input_ids=ids[:, 1:])
        again = {"input_ids": ids[:, :1]}
    return model(**again, past_key_values=first.past_key_values).past_key_values


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_weights_and_cache_are_the_models_own(name: str) -> None:
    """Made here without this library, with eager attention; the context is beyond some windows."""
    config = hf.AutoConfig.for_model(**json.loads(path_of(name).read_text()))
    assert config.architectures
    kind = getattr(hf, config.architectures[0])
    with torch.device("meta"):
        model = kind._from_config(config, attn_implementation="eager", dtype=config.dtype).eval()
    parameters = sum(x.numel() for x in model.parameters())
    assert parameters == pytest.approx(PUBLISHED[name] * 1e6, rel=0.005)  # as far as cards round
    phase: Phase = "prefill" if name == "bert-base" else "decode"
    context = None if phase == "prefill" else 700
    found = explain_model(
        path_of(name), target="h200", phase=phase, batch=3, context=context, search=False
    )
    assert found.weights == model.get_memory_footprint()
    assert sum(kind.cache for kind in found.kinds) == found.cache
    if phase == "decode":
        with torch.no_grad(), Rehearsal((), ()):
            cache = step_with(model, 3, 700)
        parts = [getattr(cache, f"{x}_attention_cache", None) for x in ("self", "cross")]
        caches = [x for x in parts if x is not None] or [cache]
        layers = [layer for each in caches for layer in each.layers]
        assert found.cache == storages([[*vars(layer).values()] for layer in layers])


def test_a_window_keeps_only_its_keys_after_a_step() -> None:
    found = explain_model(
        path_of("gemma-3-1b"), target="h200", phase="decode", context=4096, search=False
    )
    near, far = found.kinds
    assert (len(near.layers), len(far.layers)) == (22, 4)
    each = 2 * 512 * 256 * 2 + 8  # keys and values, keys, size, bytes; and a count of tokens
    assert near.cache == 22 * each
    assert far.cache == 4 * 2 * 4096 * 256 * 2
    (note,) = [x for x in found.notes if "cuDNN" not in x]  # its workspace may be unknown
    spare = 22 * 2 * (4095 - 511) * 256 * 2  # the rest of the prompt's keys and values
    assert note.startswith("this is the first step after the prompt")
    assert note.endswith(f"later steps need up to {format_bytes(spare)} less")


def test_slices_of_a_prompt_are_told() -> None:
    found = explain_model(path_of("mistral-7b"), target="h200", context=8192, search=False)
    (note,) = [x for x in found.notes if "slices" in x]
    assert note.startswith(
        "the cache needs 511.9 MiB, and holds the memory of the whole prompt, 1 GiB"
    )


@pytest.mark.slow
def test_the_largest_sizes_fit_and_larger_ones_do_not() -> None:
    def at(batch: int, context: int) -> bool | None:
        return explain_model(
            path_of("gemma-3-1b"), target="l4", phase="decode", batch=batch, context=context,
            search=False,
        ).fits  # fmt: skip

    found = explain_model(
        path_of("gemma-3-1b"), target="l4", phase="decode", batch=40, context=32768
    )
    assert found.most_batch is not None
    assert at(found.most_batch, 32768)
    assert not at(found.most_batch + 1, 32768)
    assert found.most_context is not None
    assert at(40, found.most_context)
    assert not at(40, found.most_context + 1)


@given(st.integers(1, 100), st.integers(0, 1000), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_search_finds_the_largest_that_fits(slope: int, base: int, start: int, room: int) -> None:
    most = 10**6
    found = largest_fit(lambda x: base + slope * x, room, start, most)
    assert found == max(0, min(most, (room - base) // slope))


@given(st.integers(1, 2**20), st.integers(1, 2**20))
def test_a_search_takes_few_answers_where_bytes_grow_by_squares(start: int, room: int) -> None:
    def count(x: int) -> int:
        tried.append(x)
        return x * x

    tried: list[int] = []
    found = largest_fit(count, room, start, 2**20)
    assert found**2 <= room < (found + 1) ** 2
    assert len(tried) <= whole_model.MOST_ANSWERS


def test_several_gpus_share_heads_and_weights() -> None:
    one, four = (
        explain_model(
            path_of("llama-3-8b"), target="h200", phase="decode", context=512, gpus=n, search=False
        )
        for n in (1, 4)
    )
    assert 4 * four.cache == one.cache
    whole = 2 * 2 * 128256 * 4096  # embedding and logits; the embedding is divided
    assert one.weights - whole > 3.9 * (four.weights - whole * 5 / 8)
    assert [x.shape[1] for x in four.kinds[0].explanation.graph.types[:3]] == [8, 2, 2]


def test_several_gpus_share_a_context() -> None:
    one, four = (
        explain_model(
            path_of("llama-3-8b"), target="h200", context=4096, gpus=n, divide="context",
            link="nvlink", search=False,
        )
        for n in (1, 4)
    )  # fmt: skip
    assert 4 * four.cache == one.cache
    assert four.weights == one.weights
    assert four.kinds[0].outlook is not None
    assert four.seconds is not None


def divided(link: str | float | None, gpus: int = 4, **options: Any) -> ModelExplanation:
    """A model of one layer, by context."""
    fields = json.loads(path_of("llama-3-8b").read_text()) | {"num_hidden_layers": 1}
    return explain_model(
        fields, target="h200", context=16384, gpus=gpus, divide="context", link=link, search=False,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_a_divided_context_has_the_prices_of_the_whole(phase: Phase) -> None:
    """Not the lower bound of its outlook: four GPUs take a quarter of what one takes, at least."""
    one, four = divided(None, 1, phase=phase), divided(1e18, phase=phase)
    slow, unlinked = divided("pcie4", phase=phase), divided(None, phase=phase)
    assert one.seconds is not None
    assert four.seconds == pytest.approx(one.seconds / 4, rel=0.02)
    assert slow.seconds is not None
    assert slow.seconds >= one.seconds / 4
    assert unlinked.seconds == pytest.approx(four.seconds)
    assert "attention takes at least" in str(unlinked)
    assert any("without messages" in x for x in unlinked.notes)
    assert "at least" not in " ".join(x for x in str(four).splitlines() if "takes" in x)


def test_a_prompt_sends_nothing_backward() -> None:
    keys = 2 * 8 * 4096 * 128 * 2  # k and v of a part, in bytes
    prompt, step = (divided(None, phase=x).kinds[0] for x in ("prefill", "train"))
    assert prompt.outlook == step.outlook
    assert 0 < prompt.sent <= 3 * keys < step.sent


def test_a_layer_of_a_divided_context_shows_the_operands_of_one_gpu() -> None:
    (kind,) = divided("nvlink").kinds
    first, whole, *_ = kind.lines()
    assert "q bf16[1, 32, 4096, 128], k bf16[1, 8, 4096, 128]" in first
    assert first.endswith("Causal(), one of 4 parts")
    assert whole.startswith("  whole: ")


@pytest.mark.parametrize(
    ("gpus", "link", "due"),
    [
        (1, "nvlink", ["link 'nvlink' has no effect: one GPU sends no messages"]),
        (2, 50e9, ["link 50000000000.0 has no effect: the messages of divide 'heads'"]),
        (2, None, []),
    ],
)
def test_a_link_without_effect_is_told(gpus: int, link: str | float | None, due: list[str]) -> None:
    fields = json.loads(path_of("llama-3-8b").read_text()) | {"num_hidden_layers": 1}
    found = explain_model(fields, target="h200", context=64, gpus=gpus, link=link, search=False)
    assert [x.partition(",")[0] for x in found.notes if "no effect" in x] == due


@pytest.mark.parametrize(
    ("context", "due"),
    [
        (64, "512, the config's most"),
        (512, "512, the config's most"),
        (1024, "1024, the most that was asked for"),
    ],
)
def test_the_end_of_a_search_is_told(context: int, due: str) -> None:
    fields = json.loads(path_of("llama-3-8b").read_text())
    fields |= {"num_hidden_layers": 1, "max_position_embeddings": 512}
    found = explain_model(fields, target="h200", context=context)
    assert f"largest context {due}\n" in str(found)


def test_training_counts_gradients_and_the_optimizer() -> None:
    found = explain_model(path_of("t5-base"), target="h200", phase="train", context=8, search=False)
    assert found.optimizer == 2 * found.weights  # two moments
    assert found.tensors > found.weights + found.saved  # gradients beside what is saved
    assert found.saved > sum(kind.saved for kind in found.kinds) > 0


WRONG = (
    ({"phase": "serve"}, "phase 'serve' is none of decode, prefill, train"),
    ({"divide": "batch"}, "divide 'batch' is none of heads, context"),
    ({"batch": 0}, "batch 0 is not an integer from 1"),
    ({"gpus": 16}, "gpus 16 does not divide the 8 key/value heads"),
    ({"gpus": 2, "divide": "context", "phase": "decode"}, "write divide='heads'"),
    ({"context": 1, "phase": "decode"}, "context 1 has no keys"),
    ({"context": 0}, "context 0 is not an integer from 1"),
    ({"link": "rope"}, "link 'rope' of h200"),
    ({"reserve": "200GiB"}, "reserve '200GiB' leaves no memory: h200 has 140.4 GiB"),
    ({"reserve": 150_754_820_096}, "leaves no memory"),
)


@pytest.mark.parametrize(("options", "text"), WRONG)
def test_wrong_options_are_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        explain_model(path_of("llama-3-8b"), target="h200", **options)


def test_a_model_that_can_not_be_explained_says_why() -> None:
    with pytest.raises(GraphError, match="no phase 'decode'"):
        explain_model(path_of("bert-base"), target="h200", phase="decode")
    with pytest.raises(GraphError, match=r"context 1024; its config's max_position_embeddings"):
        explain_model(path_of("bert-base"), target="h200", context=1024)
    with pytest.raises(GraphError, match="T5ForConditionalGeneration has no plan"):
        explain_model(path_of("t5-base"), target="h200", gpus=2)
    with pytest.raises(GraphError, match="reads pixel_values"):
        explain_model(hf.ViTConfig(architectures=["ViTModel"]), target="h200")
    with pytest.raises(GraphError, match="can't be read"):
        explain_model({"model_type": "unheard of"}, target="h200")


WRONG_FILES = (
    ("llama-3-8.json", "llama-3-8.json does not exist; did you mean .*llama-3-8b.json?"),
    ("zebra.json", "zebra.json does not exist$"),
    ("meta-llama/Llama-3-8B", "nothing is downloaded: save the model's config.json"),
    ("gpt2", "nothing is downloaded: save the model's config.json"),
    ("", "can't be read: .*; pass the path of a model's config.json"),
    ("../../README.md", "README.md is not JSON .*; pass the path of a model's config.json"),
)


@pytest.mark.parametrize(("name", "text"), WRONG_FILES)
def test_a_wrong_file_has_its_way_out(name: str, text: str) -> None:
    with pytest.raises(GraphError, match=text):
        explain_model(CONFIGS / name, target="h200")
    result = run("fit", str(CONFIGS / name), "--target", "h200")
    assert result.exit_code == 2


def test_quantised_weights_are_told() -> None:
    fields = json.loads(path_of("gpt-oss-20b").read_text())
    fields |= {
        "num_hidden_layers": 2,
        "layer_types": None,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    found = explain_model(fields, target="h200", context=64, search=False)
    assert any(x.startswith("quantization_config is not read") for x in found.notes)


def test_a_target_without_known_memory_gives_no_verdict() -> None:
    found = explain_model(path_of("bert-base"), target=Target.of("cpu"))
    assert (found.fits, found.most_batch) == (None, None)
    assert "fits: unknown, needs 480.4 MiB; the memory of cpu is not known" in str(found)
    line = ("fit", str(path_of("bert-base")), "--no-search")
    assert run(*line, "--target", "cpu").exit_code == 3
    assert run(*line, "--target", "cpu", "--target", "h200").exit_code == 3
    assert run(*line, "--target", "cpu", "--target", "l4", "--batch", "5000").exit_code == 1


def test_a_rehearsal_counts_tensors_while_they_live() -> None:
    weight = torch.empty(5, device="meta")
    with Rehearsal([weight], ()) as counted:
        x = torch.empty(10, device="meta") + weight.sum()
        y = x.view(2, 5).t()
        assert counted.now == 40
        del x
        assert counted.now == 40  # y is a view of it
        del y
        assert counted.now == 0
        assert (weight == 0).all()
        assert not (weight == 0).any()
        with pytest.raises(GraphError, match="reads a number off a tensor"):
            weight.sum().item()
    assert counted.most >= 80


def test_attention_on_the_meta_device_is_traced_without_autocast() -> None:
    q = torch.empty(1, 2, 4, 8, device="meta", dtype=torch.bfloat16)
    with Rehearsal((), ()):
        o = ag.nn.functional.attention(q, q, q)
        assert isinstance(o, torch.Tensor)
        assert o.shape == q.shape


def test_the_command_says_what_the_library_says() -> None:
    line = ("fit", str(path_of("gemma-3-1b")), "--target", "h200", "--phase", "decode")
    more = ("--batch", "4", "--context", "4096", "--no-search")
    found = explain_model(
        path_of("gemma-3-1b"), target="h200", phase="decode", batch=4, context=4096, search=False
    )
    plain = run(*line, *more, "--json")
    assert (plain.exit_code, json.loads(plain.output)) == (
        0,
        [json.loads(json.dumps(found.to_dict()))],
    )
    assert run(*line, *more).output.splitlines() == str(found).splitlines()


def test_the_command_answers_for_each_target() -> None:
    line = ("fit", str(path_of("bert-base")), "--context", "64", "--no-search")
    both = ("--target", "h200", "--target", "a100")
    each = [
        explain_model(path_of("bert-base"), target=x, context=64, search=False) for x in both[1::2]
    ]
    text = run(*line, *both).output
    assert text.splitlines() == "\n\n".join(map(str, each)).splitlines()
    assert len(json.loads(run(*line, *both, "--json").output)) == 2


@given(st.integers(1, 2**14), st.sampled_from(["", "k", "K"]))
def test_tokens_are_read_with_their_unit(count: int, unit: str) -> None:
    command = click.Context(fit)
    option = fit.params[0]
    assert read_tokens(command, option, f"{count}{unit}") == count * (1024 if unit else 1)
    assert read_tokens(command, option, f"{count}M") == count * 2**20
    for wrong in (f"{count}g", f"-{count}", f"{count}.5k", "k"):
        with pytest.raises(click.BadParameter, match="write 131072, or 128k"):
            read_tokens(command, option, wrong)


def test_the_command_exits_with_1_if_a_model_does_not_fit() -> None:
    result = run(
        "fit",
        str(path_of("llama-3-8b")),
        "--target",
        "l4",
        "--context",
        "8192",
        "--batch",
        "8",
        "--no-search",
    )
    assert result.exit_code == 1
    assert "does not fit" in result.output
