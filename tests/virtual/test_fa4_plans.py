"""Our plans of FlashAttention 4 executed: functions, lists and arguments as the backend makes them.

Another size, window or prefix runs the kernels of before: there are few kinds, each of many sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
import triton
from attrs import evolve, frozen
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.lowering.fa4 import backend as fa4_backend
from attn_graph.lowering.fa4.backend import PACKAGE
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.gpu import VirtualGpu, virtual_gpu
from attn_graph.testing.gpu.dsl import find_package
from attn_graph.testing.strategies import seeds
from tests.lowering.test_gpu_sequences import Sizes, packed_case, paged_case
from tests.support import ragged
from tests.support.freed_pages import free_hidden
from tests.support.virtual_cases import (
    CAUSAL,
    attention,
    execute,
    lay_aligned,
    lengths,
    machine,
)

pytestmark = [
    pytest.mark.skipif(find_package() is None, reason="flash-attn-4 is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the package, when it is imported
]
BF16, TOP = torch.bfloat16, ag.Causal("top_left")
EXAMPLES = {90: 15, 100: 6}  # of each kind
QUICK = (90, "chunks of prompts")  # a share for the default tests


@final
@frozen
class Numbers:
    """Sizes of a graph, and of its mask."""

    M: int
    N: int
    width: int

    @property
    def joined(self) -> ag.Mask:
        """A mask that only a function says."""
        return TOP & (ag.Window(self.width, 0, "top_left") | ag.Prefix(self.width // 2))


def known(sm: int) -> ag.Target:
    """A GPU of this compute capability, beside the package."""
    return evolve(machine(sm), libraries=((PACKAGE, "4.0.0b36"),))


def draw(n: Numbers, **options: Any) -> ag.Graph:  # Any: of many types
    """An attention of these sizes."""
    return attention(n.M, n.N, **{"dtype": BF16, **options})


KINDS: dict[str, Callable[[Numbers], ag.Graph]] = {
    "full, head dim 96": lambda n: draw(n, D=96),
    "causal, groups, float16": lambda n: draw(n, G=1, mask=CAUSAL, dtype=torch.float16),
    "window, rows off 16 bytes": lambda n: draw(
        n, lay={"gap": 3}, mask=CAUSAL & ag.Window(n.width, 0, "bottom_right")
    ),
    "function": lambda n: draw(n, mask=n.joined),
    "dead rows": lambda n: draw(n, G=1, mask=TOP & ~ag.Prefix(n.width)),
    "segments": lambda n: draw(
        n, mask=ag.SameSegment() & TOP, segments=(lengths(1, n.M), lengths(1, n.N))
    ),
    "boolean mask": lambda n: draw(n, keep=ag.TensorSpec((1, 1, n.M, n.N), torch.bool)),
    "soft cap and ALiBi, groups": lambda n: draw(
        n, G=1, mask=TOP, soft_cap=5.0, alibi=True, align="top_left"
    ),
    "sinks, function": lambda n: draw(n, mask=n.joined, sinks=ag.TensorSpec((2,), torch.float32)),
    "heads within positions": lambda n: draw(n, lay={"swap": True}, mask=n.joined),
}
sizes = st.one_of(st.integers(1, 130), st.integers(1, 300))
numbers = st.builds(Numbers, M=sizes, N=sizes, width=st.integers(1, 200))
longer = st.integers(64, 300)  # of one place, a mask is its lengths, and no tile is listed
several = st.builds(Numbers, M=longer, N=longer, width=st.integers(2, 60))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sm", EXAMPLES)
def test_plans_of_every_size_give_what_the_formula_says(sm: int, kind: str) -> None:
    @given(n=numbers, seed=seeds)
    @settings(max_examples=EXAMPLES[sm], phases=(Phase.generate,))
    def check(n: Numbers, seed: int) -> None:
        outcome = execute(device, KINDS[kind](n), seed, backend="fa4")
        assert outcome.programs, outcome.refusal

    with virtual_gpu(known(sm)) as device:
        check()


# Lists of tiles made by each call

LISTED: dict[str, Callable[[Numbers], ag.Graph]] = {
    "segments": KINDS["segments"],
    "boolean mask": KINDS["boolean mask"],
    "boolean masks of heads, groups": lambda n: draw(
        n, G=1, keep=ag.TensorSpec((1, 2, n.M, n.N), torch.bool), mask=n.joined
    ),
    "lengths, function, groups": lambda n: draw(
        n, G=1, mask=n.joined, q_lengths=lengths(1), kv_lengths=lengths(1), soft_cap=5.0
    ),
}


def listing(sm: int) -> ag.Target:
    """The same GPU with Triton, of no known speed: lists are made wherever data decide."""
    gpu = known(sm)
    return evolve(gpu, libraries=(*gpu.libraries, ("triton", triton.__version__)), peaks=())


@pytest.mark.slow
@pytest.mark.parametrize("kind", LISTED)
@pytest.mark.parametrize("sm", EXAMPLES)
def test_tiles_listed_by_each_call_give_what_the_formula_says(sm: int, kind: str) -> None:
    @given(n=several, seed=seeds)
    @settings(max_examples=EXAMPLES[sm] // 5, phases=(Phase.generate,))
    def check(n: Numbers, seed: int) -> None:
        listed = device.kernels["list_tiles"]
        outcome = execute(device, LISTED[kind](n), seed, backend="fa4")
        assert outcome.programs, outcome.refusal
        assert device.kernels["list_tiles"] > listed

    with virtual_gpu(listing(sm)) as device:
        check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["segments", "soft cap and ALiBi, groups"])
def test_narrow_tiles_give_what_the_formula_says(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the forward on sm_100: its lists are of tiles twice as wide."""
    usual = fa4_backend.describe_run

    def describe_narrow(*given: Any) -> Any:
        run = usual(*given)
        return evolve(run, call=evolve(run.call, narrow=run.call.may_be_narrow))

    monkeypatch.setattr(fa4_backend, "describe_run", describe_narrow)
    with virtual_gpu(listing(100)) as device:
        assert execute(device, KINDS[kind](Numbers(231, 299, 40)), 3, backend="fa4").programs


# Packed sequences, and pages with NaN in rows that are nobody's keys

SEQUENCES = Sizes((70, 1, 0), (71, 9, 40), ((3, 35), (0, 2), (0, 0)), (2, 1), 64)
PACKED_ON = {
    90: ("full", "causal", "window", "soft cap, alibi", "gaps", "listed"),
    100: ("full", "causal", "window", "soft cap, alibi", "gaps"),
}
PAGED_ON = {90: ("chunks of prompts", "a row a page"), 100: ("chunks of prompts",)}


def aligned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, those of numbers where kernels take them."""
    return {n: lay_aligned(x) if x.is_floating_point() else x for n, x in tensors.items()}


def plan_on(device: VirtualGpu, graph: ag.Graph) -> ag.Plan:
    """Our plan; its gradient is another backend's where the package has none."""
    ag.default_workspace().release()
    plan = ag.compile(graph, target=device.target, backends=("fa4", "math"))
    assert plan.backend == "fa4", plan.explain()
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "name"), [(sm, n) for sm, each in PACKED_ON.items() for n in each])
def test_packed_sequences_give_what_the_formula_says(sm: int, name: str) -> None:
    case = packed_case(name, SEQUENCES, stats=True)
    case = evolve(case, tensors=aligned(case.tensors))
    with virtual_gpu(known(sm)) as device:
        plan = plan_on(device, case.graph)
        ragged.check_case(case, plan)
        ragged.check_gradients(case, plan, 7)
        assert device.programs


@pytest.mark.parametrize(
    ("sm", "name"),
    [
        pytest.param(sm, name, marks=() if (sm, name) == QUICK else pytest.mark.slow)
        for sm, each in PAGED_ON.items()
        for name in each
    ],
)
def test_pages_of_keys_are_read_as_the_formula_says(sm: int, name: str) -> None:
    """The band of the second hides keys, whose pages are freed: its pools are declared finite."""
    case = paged_case(name, SEQUENCES, finite=name != QUICK[1])
    case = evolve(case, tensors=aligned(case.tensors))
    freed = case.tensors | {"pages": free_hidden(case.graph, case.tensors)["pages"]}
    with virtual_gpu(known(sm)) as device:
        plan = plan_on(device, case.graph)
        ragged.check_results(case, run_plan(plan, [freed[i.name] for i in case.graph.inputs]))
        assert device.programs


# Few queries: programs share the keys of a head

SHARED: dict[str, Callable[[], ag.Graph]] = {
    "one query, groups": lambda: attention(1, 1300, H=4, G=1, dtype=BF16),
    "causal, sinks": lambda: attention(
        3, 1000, H=4, G=1, dtype=BF16, mask=CAUSAL, sinks=ag.TensorSpec((4,), torch.float32)
    ),
    "lengths": lambda: attention(2, 1000, G=1, dtype=BF16, mask=CAUSAL, kv_lengths=lengths(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
def test_keys_shared_among_programs_give_what_the_formula_says(kind: str) -> None:
    with virtual_gpu(known(100)) as device:
        outcome = execute(device, SHARED[kind](), 3, backend="fa4")
        assert outcome.programs, outcome.refusal
        assert any("combine" in name for name in device.kernels)
