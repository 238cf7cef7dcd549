"""The Gluon kernels: what they refuse, what is launched, and what they compile to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import astuple, evolve
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.errors import PlanMismatchError
from attn_graph.ir.passes import simplify
from attn_graph.lowering.problem import sole
from attn_graph.lowering.triton import gluon
from attn_graph.lowering.triton.gluon_plan import HEADS, plan_launches
from attn_graph.lowering.triton.launches import Descriptor
from attn_graph.lowering.triton.offline import compile_launches
from attn_graph.lowering.triton.plan import Flash
from docs.generate.overlap import TileLoop, read_loops
from docs.generate.sass import Loop
from tests.support.sources import ROOT, load_file

CPU = ag.Target.of("cpu")
H200 = evolve(ag.Target.of("h200"), libraries=(("triton", "3.7.1"),))
REPORT: Any = load_file(ROOT / "docs" / "generate" / "gluon.py")  # Any: a module
compiling = pytest.mark.skipif(
    CPU.interprets, reason="with TRITON_INTERPRET=1 Triton compiles nothing"
)


def graph(
    *shape: int,
    strides: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **o: Any,
) -> ag.Graph:
    """An attention whose q, k and v are alike."""
    x = ag.TensorSpec(shape or (1, 2, 256, 64), dtype, strides)
    return ag.attention(x, x, x, **o)


def against(graph: ag.Graph, target: ag.Target = H200) -> dict[str, str]:
    """The reasons against a graph, by key."""
    reasons = gluon.BACKEND.reasons(simplify(graph), target, ag.Options())
    return {reason.key: str(reason) for reason in reasons}


def planned(graph: ag.Graph, variant: str | None = None) -> Flash:
    """The launches of a graph."""
    problem = sole(simplify(graph))
    assert problem is not None
    return plan_launches(problem, H200, variant)


LONG = (1, 2, 256, 64)
REFUSED: dict[str, tuple[ag.Graph, str]] = {
    "dtype": (graph(dtype=torch.float32), "computes in f16 and bf16, and the graph is in f32"),
    "dropout": (graph(dropout=0.5), "has no dropout, and the graph drops 0.5"),
    "head_widest": (
        graph(1, 2, 64, 320),
        "takes head sizes up to 256, and q has D = 320, v has E = 320",
    ),
    "last_stride.q": (
        graph(*LONG, strides=(2 * 256 * 64, 256 * 64, 1, 256)),
        "copies rows whose elements lie side by side, and q is",
    ),
    "strides.k": (
        graph(*LONG, strides=(2 * 256 * 68, 256 * 68, 68, 1)),
        "copies rows that begin at multiples of 16 bytes, and k is",
    ),
    "broadcast.v": (
        graph(*LONG, strides=(0, 0, 64, 1)),
        "copies tensors whose elements have each their own place, and v is",
    ),
    "sizes": (graph(1, 2, 0, 64), "needs sizes of at least 1"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_it_can_not_do_it_refuses_with_the_number(key: str) -> None:
    described, text = REFUSED[key]
    assert against(described)[key].startswith(text)


def gradient(graph: ag.Graph, wants: str = "qkv") -> ag.Graph:
    """The gradient of a graph."""
    return ag.vjp(graph, [*wants])[1]


REFUSED_GRADIENTS: dict[str, tuple[ag.Graph, str]] = {
    "gradient_rows": (
        gradient(graph(mask=ag.KeyLengths(), kv_lengths=ag.TensorSpec((1,), torch.int32))),
        "computes gradients where each query sees a key, and here one may see none",
    ),
    "gradient_wants": (
        gradient(graph(), "qk"),
        "computes the gradients of k and v together, and the graph wants one of them",
    ),
    "gradient_head": (
        gradient(graph(1, 2, 64, 160)),
        "computes gradients of head sizes up to 128, and D = 160, E = 160",
    ),
}


@pytest.mark.parametrize("key", REFUSED_GRADIENTS)
def test_gradients_that_it_can_not_compute_it_refuses(key: str) -> None:
    described, text = REFUSED_GRADIENTS[key]
    assert against(described) == {key: text}


@pytest.mark.parametrize("wants", ["qkv", "q", "kv"])
def test_gradients_are_of_its_own_kernels(wants: str) -> None:
    described = gradient(graph(mask=ag.Causal()), wants)
    assert not against(described)
    own = {"q": "gluon_query_gradient", "kv": "gluon_key_gradient"}
    launched = [launch.kernel for launch in planned(described).launches]
    assert launched == ["delta", *(kernel for each, kernel in own.items() if each in wants)]


def test_gradients_of_groups_are_sums_over_their_heads() -> None:
    q, k = (ag.TensorSpec((2, n, 256, 64), torch.float16) for n in (8, 2))
    flash = planned(gradient(ag.attention(q, k, k)))
    assert [launch.kernel for launch in flash.launches[2:]] == [
        "gluon_key_gradient", "sum_parts", "sum_parts",
    ]  # fmt: skip
    sums = {name: x.shape for name, x in flash.buffers.items() if name.startswith("parts")}
    assert sums == {"parts.dk": (2, 8, 256, 64), "parts.dv": (2, 8, 256, 64)}
    plan = ag.compile(gradient(ag.attention(q, k, k)), target=H200, backends=("gluon",))
    assert plan.executable.workspace == flash.scratch.bytes > 2 * 4 * 2 * 8 * 256 * 64


def test_modifiers_take_the_plain_kernel_where_registers_are_short() -> None:
    (wide, narrow) = (
        [launch.kernel for launch in planned(gradient(graph(1, 2, 256, D, soft_cap=3.0))).launches]
        for D in (128, 64)
    )
    assert wide[:3] == ["delta", "gluon_query_gradient", "key_gradient"]  # then its parts' sums
    assert narrow == ["delta", "gluon_query_gradient", "gluon_key_gradient"]


TARGETS: dict[str, tuple[ag.Target, str]] = {
    "architecture": (
        evolve(H200, sm=100),
        "has instructions of compute capability sm_90 alone, and the target has sm_100",
    ),
    "device": (CPU, "runs on GPUs of compute capability 9.0, and the target is cpu"),
    "library.triton": (evolve(H200, libraries=()), "needs triton, which is not installed"),
    "version.triton": (
        evolve(H200, libraries=(("triton", "3.10.1"),)),
        "is written for triton 3.6 to 3.9, and 3.10.1 is installed",
    ),
    "interpreter": (
        evolve(H200, interprets=True),
        "can't be interpreted, and TRITON_INTERPRET=1 was set before Python started",
    ),
}


@pytest.mark.parametrize("key", TARGETS)
def test_targets_that_it_does_not_run_on_are_told_why(key: str) -> None:
    target, text = TARGETS[key]
    assert against(graph(), target)[key].startswith(text)


CHECKED: dict[str, ag.Graph] = {
    "causal": graph(mask=ag.Causal(), stats=True),
    "window and soft cap": graph(4, 8, 70, 96, mask=ag.Window(9), soft_cap=3.0),
    "documents": graph(
        segments=(ag.TensorSpec((1, 256), torch.int32), ag.TensorSpec((1, 256), torch.int32))
    ),
    "lengths and sinks": graph(
        mask=ag.KeyLengths(),
        kv_lengths=ag.TensorSpec((1,), torch.int32),
        sinks=ag.TensorSpec((2,), torch.float32),
    ),
    "bias": graph(bias=ag.TensorSpec((1, 2, 1, 256), torch.float32)),
    "whole tiles": graph(1, 2, 256, 64),
    "gradient": gradient(graph(1, 2, 256, 64)),
    "gradient of a causal mask": gradient(graph(1, 8, 100, 96, mask=ag.Causal())),
    "gradient of ragged queries": gradient(graph(1, 8, 70, 64)),
    "dk and dv of a window": gradient(graph(mask=ag.Window(9)), "kv"),
    "gradient of a wide soft cap": gradient(graph(1, 2, 256, 128, soft_cap=3.0)),
}


@pytest.mark.parametrize("way", [None, "4 heads", "2 heads, turns"])
@pytest.mark.parametrize("name", CHECKED)
def test_a_device_is_given_small_graphs_of_the_same_variant(name: str, way: str | None) -> None:
    simple, options = simplify(CHECKED[name]), ag.Options(variant=way)
    test = gluon.BACKEND.device_test(simple, H200, options)
    assert test is not None
    assert test.way == way
    assert len(test.graphs) == 4
    for small in test.graphs:
        assert ag.parse(str(small)) == small
        assert not gluon.BACKEND.reasons(small, H200, options)
        again = gluon.BACKEND.device_test(small, H200, options)
        assert again is not None
        assert again.variant == test.variant
        sizes = [n for i in small.inputs for n in i.spec.shape]
        assert max(sizes) <= 9 * 128
        forwards = [x.fixed for x in planned(small, way).launches if "EACH" in x.fixed]
        assert way is None or all(fixed["EACH"] > 1 for fixed in forwards)
        assert all(fixed["TURNS"] == (way == "2 heads, turns") for fixed in forwards)


def test_variants_differ_by_what_is_compiled_and_by_no_number_that_is_passed() -> None:
    def variant(**options: Any) -> str:
        test = gluon.BACKEND.device_test(simplify(graph(**options)), H200, ag.Options())
        assert test is not None
        return test.variant

    near, far, prefix = ag.Window(9), ag.Window(90), ag.Causal() | ag.Prefix(20)
    assert variant(mask=near) == variant(mask=far)
    others: list[dict[str, Any]] = [
        {},
        {"mask": near},
        {"mask": prefix},
        {"dtype": torch.float16},
        {"soft_cap": 2.0},
    ]
    assert len({variant(**each) for each in others}) == len(others)


def variants_of(graph: ag.Graph, target: ag.Target = H200) -> list[str]:
    """The names of other ways to lower a graph."""
    return [*gluon.BACKEND.variants(simplify(graph), target, ag.Options())]


def test_programs_take_several_heads_where_they_fill_the_gpu_all_the_same() -> None:
    long, short = graph(2, 32, 4096, 128, mask=ag.Causal()), graph(32, 16, 512, 128)
    heads = ["2 heads", "4 heads", "8 heads"]
    assert variants_of(long) == [*heads, "turns", *(f"{name}, turns" for name in heads)]
    assert variants_of(short) == variants_of(long)
    few = graph(1, 8, 4096, 128, mask=ag.Causal())
    assert variants_of(few) == variants_of(graph(64, 1, 4096, 128)) == ["turns"]
    assert variants_of(long, evolve(H200, multiprocessors=None)) == ["turns"]
    assert not variants_of(gradient(long))


@given(
    st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 3000),
    st.sampled_from([*HEADS]),
)  # fmt: skip
def test_several_heads_are_fewer_programs(B: int, H: int, M: int, variant: str) -> None:
    one, several = (planned(graph(B, H, M, 64), x).launches[-1] for x in (None, variant))
    each = several.fixed["EACH"]
    assert H % each == 0 == HEADS[variant] % each
    assert several.grid * each == one.grid == B * H * -(-M // 128)


def test_explain_tells_how_programs_fill_the_gpu() -> None:
    simple = simplify(graph(2, 32, 4096, 128, mask=ag.Causal()))
    notes = [
        gluon.BACKEND.lower(simple, H200, ag.Options(variant=x)).notes
        for x in (None, "4 heads, turns")
    ]
    groups = "two groups of 4 warps"
    assert [note.split(" with")[0] for (note,) in notes] == [
        f"gluon_forward: 2048 programs, 15.5 waves, {groups}",
        f"gluon_forward: 512 programs of 4 heads in turn, 3.88 waves, {groups} that take turns",
    ]


def test_elsewhere_it_comes_behind_what_has_run() -> None:
    explanation = ag.explain(graph(), target=H200, wants=())
    others = explanation.also
    assert others.index("triton") < others.index("gluon")
    asked = ag.explain(graph(), target=H200, wants=(), backends=("gluon",))
    assert asked.backend == "gluon"
    assert "two groups of 4 warps with tiles of 64 x 128 each" in str(asked)


def test_descriptors_are_of_the_operands_as_they_lie() -> None:
    q = ag.TensorSpec((2, 8, 100, 96), torch.float16, (100 * 8 * 96, 96, 8 * 96, 1))
    k = ag.TensorSpec((2, 2, 300, 96), torch.float16)
    v = ag.TensorSpec((2, 2, 300, 40), torch.float16)
    (launch,) = planned(ag.attention(q, k, v)).launches
    assert launch.descriptors == {
        "q_desc": Descriptor("q", q.shape, q.strides, (1, 1, 64, 128)),
        "k_desc": Descriptor("k", k.shape, k.strides, (1, 1, 128, 128)),
        "v_desc": Descriptor("v", v.shape, v.strides, (1, 1, 128, 64)),
    }
    assert launch.fixed["GROUP"] == 4
    assert launch.fixed["MASKED"]  # 300 keys end within a tile
    assert launch.grid == 2 * 8


def test_only_whole_tiles_without_a_mask_go_unmasked() -> None:
    (whole,), (causal,) = (planned(graph(mask=m)).launches for m in (None, ag.Causal()))
    assert not whole.fixed["MASKED"]
    assert causal.fixed["MASKED"]


def test_lists_are_made_in_memory_that_is_declared() -> None:
    ids = ag.TensorSpec((1, 256), torch.int64)
    described = graph(segments=(ids, ids))
    plan = ag.compile(described, target=H200, backends=("gluon",), store=False)
    flash = planned(described)
    assert [launch.kernel for launch in flash.launches][-1] == "gluon_forward"
    assert flash.launches[-1].fixed["LISTED"]
    assert plan.executable.workspace == flash.scratch.bytes > 0


def test_an_address_off_16_bytes_raises() -> None:
    x = torch.zeros(1 + 64 * 64, dtype=torch.float16)[1:].view(1, 1, 64, 64)
    described = Descriptor("k", (1, 1, 64, 64), x.stride(), (1, 1, 64, 64))
    with pytest.raises(PlanMismatchError, match="k: expected an address that is a multiple of 16"):
        described.of(x)


ORDER = """
        /*0000*/  USETMAXREG.DEALLOC.CTAPOOL 0xf0 ;
.L_x_1:
        /*0010*/  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0020*/  HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR20].tnspB, R88, gsb0 ;
        /*0030*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/  MUFU.EX2 R1, R2 ;
.L_x_2:
        /*0050*/  @!P1 MUFU.EX2 R3, R4 ;
        /*0060*/  WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/  MUFU.EX2 R5, R6 ;
        /*0080*/  @P0 BRA `(.L_x_1) ;
        /*0090*/  USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0x100 ;
.L_x_3:
        /*00a0*/  SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], RZ ;
        /*00b0*/  @!P1 BRA `(.L_x_3) ;
        /*00c0*/  BRA `(.L_x_2) ;
"""


def test_what_stands_between_the_two_waits_runs_beside_a_product() -> None:
    flop = 2 * 64 * 16 * (128 + 64)
    counts = Loop(issued=8, special=3, fetched=2 * 16 * (64 + 128 + 64))
    assert read_loops(ORDER) == [TileLoop(counts, registers=240, flop=flop, beside=2)]


def test_a_page_tells_what_is_not_clean() -> None:
    machine = REPORT.MachineCode("forward", 168, 0, 8, True, 0, 4, (), "", "")
    loop = TileLoop(Loop(issued=8, special=3, spills=4), registers=168, flop=1, beside=2)
    assert list(REPORT.complaints(machine, [loop])) == [
        "matrix products are serialized",
        "1 loops where softmax can run beside a product",
        "1 exponentials do not run beside a product",
        "4 instructions of a loop spill registers",
        "168 registers, 240 are to be set",
    ]


def page_rows() -> list[str]:
    """The table's lines."""
    text = REPORT.PAGE.read_text(encoding="utf-8")
    return [x for x in text.splitlines() if x.startswith("| ") and x[2].isdigit()]


def test_the_page_has_every_row_of_every_version() -> None:
    found = {tuple(row.split(" | ")[:4]) for row in page_rows()}
    cases = {(str(c.size), c.pass_, c.variant) for c in REPORT.all_cases()}
    assert found == {(f"| {v}", *c) for v in VERSIONS for c in cases}
    cells = [row.split(" | ") for row in page_rows()]
    spilled = {(x[0], x[7]) for x in cells if "heads" not in x[2]}
    assert {("| 3.6.0", "0"), ("| 3.7.1", "0")} == {x for x in spilled if x[0] != "| 3.9.0"}
    assert max(int(x[7]) for x in cells if "heads" in x[2]) <= 4 * 26  # registers, as it says


VERSIONS = ("3.6.0", "3.7.1", "3.9.0")  # of Triton
SUBSET = [
    REPORT.Case(64, "forward", "causal"),
    REPORT.Case(128, "forward", "full"),
    REPORT.Case(128, "forward", "segments"),
    REPORT.Case(128, "forward, 2 heads", "causal"),
    REPORT.Case(64, "forward, turns", "window"),
    REPORT.Case(64, "query_gradient", "soft cap"),
    REPORT.Case(128, "query_gradient", "causal"),
    REPORT.Case(64, "key_gradient", "full"),
    REPORT.Case(128, "key_gradient", "prefix"),
]


@compiling
@pytest.mark.slow
@pytest.mark.parametrize("case", SUBSET, ids=lambda c: "-".join(map(str, astuple(c))))
def test_softmax_runs_beside_the_products(case: Any) -> None:
    rows, complaints = case.measure()
    assert not complaints
    if REPORT.version("triton") in VERSIONS:
        assert set(rows) <= set(page_rows()), "run `make gluon-report`, and read the diff"


@compiling
@pytest.mark.slow
def test_wide_heads_fit() -> None:
    flash = planned(
        graph(1, 2, 256, 256, mask=ag.Causal(), sinks=ag.TensorSpec((2,), torch.float32))
    )
    (machine,) = compile_launches(flash)
    assert machine.spilled == 0
    assert not machine.serialized
    assert machine.shared <= 232448
