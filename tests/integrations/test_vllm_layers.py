"""vLLM's layers, without vLLM: caches in its layouts, steps, masks, registration."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from itertools import permutations
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.integrations import vllm
from attn_graph.integrations.vllm.layers import FLOAT8, Kind, ServedLayer, split_cache
from attn_graph.integrations.vllm.steps import UNREAD, Capacity, ServingStep, find_cells, make_step
from attn_graph.lowering.cpu.packed import PackedRun
from attn_graph.nn.appending import write_rows
from attn_graph.testing.rule import Expectation
from attn_graph.testing.strategies import seeds
from tests.lowering.test_python_calls import count_calls
from tests.support.sources import ROOT

ORDERS = [x for x in permutations(range(5)) if x[4] == 4]  # of layers, blocks, heads, rows
ONE = torch.ones(())
ONES = ONE, ONE
I32 = torch.int32
FEW = settings(max_examples=max(10, settings().max_examples // 2))  # each builds a plan


def lay_cache(order: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A cache [layers,n,G,P,2D] with this memory order of its axes, of random bytes."""
    x = torch.randn([sizes[axis] for axis in order]).to(dtype)
    return x.permute([order.index(axis) for axis in range(5)])


@given(st.sampled_from(ORDERS), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_new_rows_go_to_their_slots_in_every_layout_and_to_no_others(
    order: Sequence[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    layers, n, G, P, D = 2, 4, *(data.draw(st.integers(1, 3)) for _ in "GPD")
    cache = lay_cache(order, (layers, n, G, P, 2 * D), dtype)
    before = cache.clone()
    slots = data.draw(st.permutations(range(P, n * P)))[: data.draw(st.integers(1, P))]
    slots = [-1 if data.draw(st.integers(0, 3)) == 0 else slot for slot in slots]
    pools = split_cache(cache[1], "auto")
    cells = find_cells(torch.tensor(slots), P)
    new = torch.randn(2, len(slots), G, D).to(dtype)
    for pool, x in zip(pools, new, strict=True):
        write_rows(pool, cells, x, ONE)
    for t, slot in enumerate(slots):
        if slot >= 0:
            for pool, x in zip(split_cache(before[1], "auto"), new, strict=True):
                pool[slot // P, slot % P] = x[t]
    assert torch.equal(cache[1, 1:], before[1, 1:])  # page 0 is of nobody
    assert torch.equal(cache[0], before[0])


def test_where_rows_of_a_head_are_neighbours_its_keys_lie_in_one_piece() -> None:
    """As a CPU copies them at once, and not row by row."""
    for half in split_cache(torch.empty(5, 2, 16, 64), "auto"):
        assert half.shape == (5, 16, 2, 32)
        assert half.stride() == (2 * 2 * 16 * 32, 32, 2 * 16 * 32, 1)


@pytest.mark.parametrize("name", FLOAT8)
@given(seeds)
def test_rows_in_8_bits_are_rounded_to_the_nearest_number(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    dtype, scale = FLOAT8[name], torch.tensor(0.5)
    cache, x = torch.zeros(2, 1, 4, 16, dtype=torch.uint8), 500 * torch.randn(4, 1, 8)
    write_rows(split_cache(cache, name)[0], find_cells(torch.arange(4, 8), 4), x, scale)
    top = torch.finfo(dtype).max
    due = (x / scale).clamp(-top, top).to(dtype)
    assert torch.equal(split_cache(cache, name)[0][1].float(), due.float())


class Operators(TorchDispatchMode):
    """The names of PyTorch's operators that run meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def metadata(**more: Any) -> Any:
    """vLLM's CommonAttentionMetadata of two requests and 3 tokens, with stale entries behind."""
    given = {
        "num_reqs": 2,
        "num_actual_tokens": 3,
        "query_start_loc": torch.tensor([0, 2, 3, 9, 9], dtype=I32),
        "seq_lens": torch.tensor([2, 18, 7, 7], dtype=I32),
        "block_table_tensor": torch.tensor([[4, 9, 9], [2, 1, 9], [7, 7, 7]], dtype=I32),
        "slot_mapping": torch.tensor([64, 65, 17, 99, 99]),
        "causal": True,
        **dict.fromkeys(UNREAD),
    }
    return SimpleNamespace(**{**given, **more})


def test_a_step_is_made_without_reading_tensors() -> None:
    given = metadata()
    with Operators() as operators:
        step = make_step(given, 16)
    assert not any("local_scalar" in name for name in operators.names)
    assert (step.tokens, step.starts.tolist(), step.lengths.tolist()) == (3, [0, 2, 3], [2, 18])
    assert step.table is not None
    assert step.cells is not None
    assert step.table.tolist() == [[4, 9, 9], [2, 1, 9]]
    assert [x.tolist() for x in step.cells] == [[4, 4, 1], [0, 1, 1]]
    assert step.causal


def test_an_encoders_step_has_no_cache_and_sees_later_keys() -> None:
    step = make_step(metadata(mm_req_doc_ranges={0: []}), None)  # a model of images, without any
    assert (step.table, step.cells, step.causal) == (None, None, False)


@pytest.mark.parametrize("name", [*UNREAD, "causal"])
def test_a_step_with_what_layers_do_not_read_is_refused(name: str) -> None:
    with pytest.raises(ag.GraphError, match=f"{name}: .*; choose another backend"):
        make_step(metadata(**{name: {1: [(0, 2)]} if "ranges" in name else torch.zeros(2)}), 16)


def keeps(kind: Kind, causal: bool, rows: int, keys: int) -> Tensor:
    """Which keys each query sees [rows,keys], as vLLM means it: the last query is at the last
    key, and a window counts the query's own key."""
    far = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    keep = far >= 0 if causal else torch.ones_like(far, dtype=torch.bool)
    return keep if kind.window is None else keep & (far.abs() < kind.window)


def attend(kind: Kind, causal: bool, sinks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, for q [M,H,D], k and v [N,G,D], in the wider of float32 and their dtype."""
    k, v = (x.repeat_interleave(kind.H // kind.G, 1) for x in (k, v))
    s = torch.einsum("mhd,nhd->hmn", q, k) * kind.scale
    if kind.soft_cap is not None:
        s = (s / kind.soft_cap).tanh() * kind.soft_cap
    far = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    if kind.slopes is not None:
        s = s - torch.tensor(kind.slopes, dtype=s.dtype)[:, None, None] * far.abs()
    s = s.masked_fill(~keeps(kind, causal, len(q), len(k)), -torch.inf)
    if kind.sinks:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hmn,nhd->mhd", s.softmax(-1)[..., : len(k)], v)


@frozen
class Batch:
    """Sequences of a step: of each the tokens in the cache before, and the new ones."""

    before: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        return [sum(pair) for pair in zip(self.before, self.new, strict=True)]

    def step(self, page: int, width: int, causal: bool = True) -> ServingStep:
        """The step. Page 0 is of nobody; the table holds nonsense past a sequence's pages."""
        B, tokens = len(self.new), sum(self.new)
        table = torch.full((B, width), 10**6, dtype=I32)
        free = iter((torch.randperm(B * width) + 1).tolist())
        slots = list[int]()
        for b, (old, n) in enumerate(zip(self.before, self.lengths, strict=True)):
            for place in range(-(-n // page)):
                table[b, place] = next(free)
            slots += [int(table[b, i // page]) * page + i % page for i in range(old, n)]
        starts = torch.tensor([0, *self.new], dtype=I32).cumsum(0, dtype=I32)
        cells = find_cells(torch.tensor(slots), page)
        return ServingStep(
            tokens, starts, torch.tensor(self.lengths, dtype=I32), table, cells, causal
        )


@frozen
class Run:
    """A layer, a step, and the tensors of a call, with what its sequences had before."""

    layer: ServedLayer
    step: ServingStep
    cache: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def append(self) -> None:
        self.layer.append(self.step, self.k, self.v, self.cache, ONES)

    def attend(self, out: Tensor) -> Tensor:
        self.layer.attend(self.step, self.q, self.k, self.v, self.cache, out, ONES)
        return out


def run_of(kind: Kind, batch: Batch, page: int, width: int, causal: bool = True) -> Run:
    """Three rows more than tokens, as vLLM pads them, in q, k, v cut from one projection."""
    H, G, D, B = kind.H, kind.G, kind.D, len(batch.new)
    step = batch.step(page, width, causal)
    cache = torch.full((1 + B * width, G, page, 2 * D), 0.0)
    T = step.tokens + 3
    q, k, v = torch.randn(T, (H + 2 * G) * D).unflatten(1, (H + 2 * G, D)).split([H, G, G], 1)
    pools, whole = split_cache(cache, "auto"), list[list[Tensor]]()
    for pool, x in zip(pools, (k, v), strict=True):
        rows = list[Tensor]()
        for b, (old, new) in enumerate(zip(batch.before, batch.new, strict=True)):
            first, i = int(step.starts[b]), torch.arange(old)
            assert step.table is not None
            earlier = torch.randn(old, G, D)
            pool[step.table[b, i // page].long(), i % page] = earlier
            rows.append(torch.cat([earlier, x[first : first + new]]))
        whole.append(rows)
    sinks = torch.randn(H) if kind.sinks else None
    return Run(ServedLayer(kind, Capacity(64, 16), sinks), step, cache, q, k, v, *whole)


KINDS = st.builds(
    lambda G, r, D, window, soft_cap, slopes, sinks: Kind(
        G * r, G, D, D**-0.5, window, soft_cap,
        tuple(2.0**-n for n in range(G * r)) if slopes else None, sinks,
    ),
    st.integers(1, 2), st.integers(1, 3), st.sampled_from([8, 12]),
    st.sampled_from([None, 1, 5, 19]), st.sampled_from([None, 3.0]), st.booleans(), st.booleans(),
)  # fmt: skip
BATCHES = st.lists(
    st.tuples(st.integers(0, 30), st.one_of(st.just(1), st.integers(1, 9))), min_size=1, max_size=5
).map(lambda pairs: Batch(*map(tuple, zip(*pairs, strict=True))))


@given(KINDS, BATCHES, st.sampled_from([4, 16]), st.booleans(), seeds)
@FEW
def test_a_step_attends_to_the_cache_as_vllm_means_it(
    kind: Kind, batch: Batch, page: int, causal: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    run = run_of(kind, batch, page, width=12, causal=causal)
    run.append()
    out = run.attend(torch.full_like(run.q, 7.0))
    sinks, first = run.layer.sinks, 0
    sinks = torch.zeros(kind.H) if sinks is None else sinks
    for keys, values, new in zip(run.keys, run.values, batch.new, strict=True):
        rows = slice(first, first := first + new)
        narrow = run.q[rows], keys, values
        due, low = (
            attend(kind, causal, sinks, *map(to, narrow)) for to in (Tensor.double, Tensor.float)
        )
        Expectation("o", due, low, values.abs()).check(out[rows])
    assert (out[run.step.tokens :] == 7.0).all()  # rows that pad


@given(KINDS, st.lists(st.integers(1, 20), min_size=1, max_size=4), seeds)
@FEW
def test_an_encoder_attends_to_a_steps_own_keys(kind: Kind, new: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    kind = Kind(kind.H, kind.G, kind.D, kind.scale, kind.window, encodes=True)
    q, k, v = (torch.randn(sum(new) + 2, heads, kind.D) for heads in (kind.H, kind.G, kind.G))
    starts = torch.tensor([0, *new], dtype=I32).cumsum(0, dtype=I32)
    step = ServingStep(sum(new), starts, torch.tensor(new, dtype=I32), None, None, False)
    out = torch.empty_like(q)
    ServedLayer(kind, Capacity(128, 8)).attend(step, q, k, v, None, out, ONES)
    first = 0
    for n in new:
        rows = slice(first, first := first + n)
        due = attend(kind, False, torch.zeros(kind.H), *(x[rows].double() for x in (q, k, v)))
        torch.testing.assert_close(out[rows].double(), due, rtol=1e-5, atol=1e-5)


def decoding(B: int, token: int) -> Batch:
    """A step of decoding: every sequence has one more token each time."""
    return Batch(tuple((37 * b) % 90 + token for b in range(B)), (1,) * B)


LLAMA = Kind(4, 2, 32, 32**-0.5)
KINDS_OF_MODELS = {
    "Llama": LLAMA,
    "Mistral": Kind(4, 2, 32, 32**-0.5, window=48),
    "Gemma 2": Kind(4, 2, 32, 32**-0.5, window=48, soft_cap=5.0),
    "gpt-oss": Kind(4, 2, 32, 32**-0.5, window=48, sinks=True),
    "Bloom": Kind(4, 4, 32, 32**-0.5, slopes=(0.5, 0.25, 0.125, 0.0625)),
}


@pytest.mark.parametrize(("B", "most"), [(8, 120), (64, 200)])
@pytest.mark.parametrize("model", KINDS_OF_MODELS)
def test_a_layer_that_decodes_costs_few_python_calls(model: str, B: int, most: int) -> None:
    """A write and a call, after the first layer of the step."""
    run = run_of(KINDS_OF_MODELS[model], decoding(B, 1), 32, 4)
    out = torch.empty_like(run.q)
    layer = run.layer
    layer.room = Capacity(256, 64)

    def once() -> None:
        run.append()
        run.attend(out)

    with torch.inference_mode():
        once()
        once()
        assert count_calls(once) <= most


def test_a_steps_first_layer_costs_few_python_calls_in_inference_mode() -> None:
    """vLLM runs in it. Tables are read there without a mode of functions, which would run Python
    at every operation."""
    run = run_of(LLAMA, decoding(8, 1), 32, 4)
    with torch.inference_mode():
        run.attend(torch.empty_like(run.q))
        plan, *_ = run.layer.plans.values()
        assert count_calls(lambda: run.layer.prepare(run.step, plan)) <= 400


@pytest.mark.parametrize("model", KINDS_OF_MODELS)
def test_later_layers_of_a_step_make_no_indices(model: str) -> None:
    """Its first layer finds the places of pages. Few of many pages are used: they are gathered."""
    run = run_of(KINDS_OF_MODELS[model], decoding(8, 1), 32, 40)
    out = torch.empty_like(run.q)
    with torch.inference_mode():
        run.attend(out)
        with profile() as made:
            run.attend(out)
    names = {event.key for event in made.key_averages()}
    assert "aten::index_select" in names
    assert "aten::arange" not in names


@pytest.mark.parametrize("model", KINDS_OF_MODELS)
def test_new_lengths_build_and_lower_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ag.clear_cache()
    lower, lowered = PackedRun.make_part, list[object]()

    def make_part(run: PackedRun, *of: Any) -> Any:
        lowered.append(of)
        return lower(run, *of)

    monkeypatch.setattr(PackedRun, "make_part", make_part)
    layer, builds = ServedLayer(KINDS_OF_MODELS[model], Capacity(64, 16)), list[int]()
    for token in range(6):
        lowered.clear()
        run = run_of(layer.kind, decoding(8, token), 32, 4)
        layer.sinks = run.layer.sinks
        layer.append(run.step, run.k, run.v, run.cache, ONES)
        layer.attend(run.step, run.q, run.k, run.v, run.cache, torch.empty_like(run.q), ONES)
        builds.append(ag.cache_info().builds)
        if token:
            assert not lowered
    assert builds == [1] * 6


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("model", KINDS_OF_MODELS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 3, 2, 4)])
def test_a_gpus_backend_takes_every_kind_of_layer(
    model: str, target: str, order: Sequence[int]
) -> None:
    """One plan for prompts and answers, in vLLM's layouts, the blocks of other layers between."""
    kind = KINDS_OF_MODELS[model]
    sizes = 2, 64, kind.G, 16, 2 * kind.D
    cache = lay_cache(order, sizes, torch.bfloat16)[1]
    q = torch.empty(256, kind.H, kind.D, dtype=torch.bfloat16)
    pages = torch.zeros(8, 16, dtype=I32)
    graph = kind.graph(True, Capacity(256, 8), q, *split_cache(cache, "auto"), pages)
    assert ag.explain(graph, target=target, gradients=()).backend == "triton"


# Registration


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """vLLM's registry with our places alone, as what was registered."""
    places = Enum("places", ["CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA", "OTHER"])
    made = dict[str, str]()
    name = "vllm.v1.attention.backends.registry"
    for n in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:n])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))

    def register(place: Enum, path: str) -> None:
        made[place.name] = path

    fake: Any = SimpleNamespace(AttentionBackendEnum=places, register_backend=register)
    monkeypatch.setitem(sys.modules, name, fake)
    return made


def test_vllm_is_left_as_it_is_without_the_switch(
    registry: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (None, "", "0"):
        monkeypatch.delenv(vllm.SWITCH, raising=False)
        if value is not None:
            monkeypatch.setenv(vllm.SWITCH, value)
        vllm.register()
        assert [*registry] == ["CUSTOM"]


def test_the_switch_puts_ours_in_the_places_of_cpus(
    registry: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm.SWITCH, "1")
    for _ in range(2):  # vLLM may call it twice
        vllm.register()
        assert {*registry} == {"CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA"}
    for path in registry.values():
        module, _, name = path.rpartition(".")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"\nclass {name}(" in text


def test_a_wrong_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.SWITCH, "yes")
    with pytest.raises(ValueError, match="ATTN_GRAPH_VLLM must be 0 or 1, and is 'yes'"):
        vllm.is_on()


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (path,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = path.partition(":")
    assert getattr(import_module(module), name) is vllm.register
