"""Triton's kernels compiled for GPUs that are not there: little spills, the fast path is fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import version
from itertools import chain, product
from typing import Any, NoReturn, final

import pytest
import torch
from attrs import astuple, evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels.tilings import (
    ARCHS,
    FEW_SPILLED,
    IMPRECISE_ROWS,
    LEAST_SHARED,
    TABLE,
    WIDTHS,
    Tiling,
    padded_head_size,
    shared_memory,
    split_tiling,
    table_arch,
)
from attn_graph.lowering.codegen import machine_code
from attn_graph.lowering.codegen.launches import HOMES
from attn_graph.lowering.codegen.machine_code import MachineCode, compile_launch
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of, sole
from attn_graph.lowering.triton.launch_list import PASS_OF
from attn_graph.lowering.triton.plan import Flash, mock_tensors
from attn_graph.lowering.triton.programs import choose_tiling
from docs.generate import kernels_serving as serving
from docs.generate.kernel_rows import PASSES, SPLIT, TARGETS, target_of
from docs.generate.predict import PROCESSORS
from docs.generate.sass import read_body, read_instructions
from tests.support.kernels import compiled, lying_of
from tests.support.sources import ROOT, load_file

CPU, F32 = ag.Target.of("cpu"), torch.float32


def report() -> Any:  # Any: a module
    """docs/generate/kernels.py, which is not a package's."""
    return load_file(ROOT / "docs" / "generate" / "kernels.py")


REPORT = report()
NAMES = {2: "bf16", 4: "f32"}
# Triton compiles this kernel to either of two codes, by run; all others are the same each time.
TWO_CODES = (90, 2, 128, "key_gradient", "grouped heads")
BEGIN = (
    "| 90 | bf16 | 128 | key_gradient | grouped heads | 64 x 64, 4 warps, 2 stages "
    "| 255 | 99328 | 8 | 0 | 2 | 8 | "
)
EITHER = (
    f"{BEGIN}12.7 / 20.9 | 48 wgmma, 8 cp.async, 10 tma | 573 | 536 |",
    f"{BEGIN}12.8 / 20.9 | 48 wgmma, 8 cp.async, 10 tma | 572 | 535 |",
)
# Triton 3.9's code of a few kernels takes more registers.
TRITON = tuple(map(int, version("triton").split(".")[:2]))
LATER = TRITON >= (3, 9)
MISSED = 7  # goals of the page that are not reached
CACHES = ("one piece", "pages of 16")
IS_OF_THIS = f"with triton {version('triton')}," in REPORT.PAGE.read_text(encoding="utf-8")


def is_its_turn(case: Any) -> bool:
    """A pass of each variant, all of those that compute most; `make deep` takes all passes."""
    turn = PASSES[REPORT.VARIANTS.index(case.variant) % len(PASSES)]
    return case.variant in REPORT.SHORT or case.pass_ == turn or settings().max_examples > 100


SUBSET = [
    case
    for case in REPORT.all_cases()
    if (case.sm == 90 and case.variant == "causal" and IS_OF_THIS)  # each tile of one architecture
    or (case.sm == 90 and case.size == 128 and case.bytes == 2 and is_its_turn(case))
    or (case.sm == 90 and case.size == 64 and case.variant == "soft cap" and case.bytes == 2)
    or (case.size == 128 and case.bytes == 2 and case.variant == "causal")
]

ALL_SERVED = [case for cases in serving.serving_cases() for case in cases]
SERVED = [case for case in ALL_SERVED if case.size == 128 and case.bytes == 2 and case.sm == 90]


@cache
def table() -> frozenset[str]:
    """The lines of the committed page."""
    return frozenset(REPORT.PAGE.read_text(encoding="utf-8").splitlines())


def rows_of(part: int) -> list[list[str]]:
    """Cells of the rows of kernels: in the first part of the page, or in that of packed tensors."""
    text = REPORT.PAGE.read_text(encoding="utf-8").split(serving.HEADING)[part]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[1] in NAMES.values()]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("case", SUBSET, ids=lambda c: "-".join(map(str, astuple(c))))
def test_kernels_are_clean_and_as_the_table_says(case: Any) -> None:
    """The table is of one version of Triton; under others kernels are to be clean all the same."""
    check_row(case)


def check_row(case: Any) -> None:
    """Assert that a kernel is clean, and what the page says of it."""
    row = case.measure()
    assert not row.complaints
    if IS_OF_THIS and not (astuple(case) == TWO_CODES and row.text in EITHER):
        assert row.text in table(), "run `make kernel-report`, and read the diff"


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED, ids=lambda c: "-".join(map(str, astuple(c))))
def test_kernels_that_serve_are_clean_and_as_the_page_says(case: Any) -> None:
    check_row(case)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(("size", "queries"), [(128, 8), (128, 16), (256, 8), (256, 16)])
def test_few_rows_of_float32_spill_little_and_fit_everywhere(size: int, queries: int) -> None:
    """32 and 64 rows, four heads to one of keys."""
    case = serving.ServingCase(90, 4, size, SPLIT, False, 16, queries)
    (machine,) = case.compile()[1]
    assert machine.spilled <= (216 if LATER else 200)
    assert machine.shared <= LEAST_SHARED


def test_products_of_float32_are_too_short_for_tensor_cores_that_round_them() -> None:
    products = {"forward": "block_m", "query_gradient": "block_m", "key_gradient": "block_n"}
    for pass_, rows in products.items():
        tiles = chain(*(by.values() for by in TABLE[100, 4, pass_].values()))
        assert all(getattr(tile, rows) < IMPRECISE_ROWS for tile in tiles)
    assert all(split_tiling(100, 4, w, 64).block_m < IMPRECISE_ROWS for w in WIDTHS)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHS)
def test_products_of_float32_are_ieee_under_dropout(sm: int) -> None:
    x = ag.TensorSpec((1, 2, 256, 64), torch.float32)
    graph = ag.attention(x, x, x, dropout=0.25)
    texts = [
        machine.ptx
        for problem in map(sole, ag.vjp(graph))
        for machine in REPORT.compile_launches(REPORT.Flash.plan(problem, target_of(sm)))
    ]
    assert texts
    assert not any("tf32" in text for text in texts)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("size", WIDTHS)
def test_tiles_with_a_bias_of_float32_fit_the_least_shared_memory(size: int) -> None:
    x = ag.TensorSpec((1, 2, 256, size), torch.float16)
    bias = ag.TensorSpec((1, 2, 256, 256), torch.float32)
    graph = ag.attention(x, x, x, bias=bias)
    for problem in map(sole, ag.vjp(graph)):
        flash = REPORT.Flash.plan(problem, target_of(120))
        check_shared(flash, LEAST_SHARED)


def test_the_table_has_every_row() -> None:
    for part, cases in enumerate((REPORT.all_cases(), ALL_SERVED)):
        found = {(int(r[0]), r[1], int(r[2]), r[3], r[4]) for r in rows_of(part)}
        assert found == {(c.sm, NAMES[c.bytes], c.size, c.pass_, c.variant) for c in cases}
    assert {(sm, size) for sm, size, _ in TABLE} == {(sm, size) for sm in ARCHS for size in (2, 4)}
    usual = (row for (_, _, pass_), row in TABLE.items() if not pass_.startswith("push"))
    assert all(sorted(row) == list(WIDTHS) for row in usual)


def test_a_step_of_decoding_is_predicted_to_take_little_more_than_reading_its_keys() -> None:
    """H200, bf16, 32 heads to 8, 32768 keys, D = 128; on all GPUs at 0.55 of the bandwidth, since
    parts need to fill only 0.85 of one, and in float32, whose products have no matrix units, at
    0.45 of it."""
    rows = {(int(r[0]), r[1], int(r[2]), r[4]): r for r in rows_of(1) if r[3] == SPLIT}
    assert all(float(rows[90, "bf16", 128, cache][-1]) <= 0.05 for cache in CACHES)
    for (sm, dtype, _, _), row in rows.items():
        bandwidth = ag.Target.of(TARGETS[sm]).bandwidth
        assert bandwidth is not None
        assert float(row[-2]) * 1e9 >= (0.55 if dtype == "bf16" else 0.45) * bandwidth


@pytest.mark.parametrize(
    "case", serving.serving_cases()[1], ids=lambda c: "-".join(map(str, astuple(c)))
)
def test_decoding_reads_each_key_once(case: Any) -> None:
    """All heads that share keys are rows of one tile, and parts of the keys do not overlap: as many
    programs as there are heads of keys and parts."""
    launch, _ = case.flash().launches
    assert launch.grid == serving.G * launch.fixed["SPLITS"]
    assert launch.fixed["BLOCK_M"] >= serving.H // serving.G


def test_goals_of_registers_hold_or_are_said_not_to() -> None:
    """Where more registers are taken, or some are spilled, the page says so."""
    text = REPORT.PAGE.read_text(encoding="utf-8").split("| goal |")[1]
    rows = [x.strip("| ").split(" | ") for x in text.splitlines() if x.startswith("| ")]
    assert len(rows) == len(serving.all_goals())
    held = [row[6] == "0" and int(row[5]) <= int(row[4]) for row in rows]
    assert [row[7] == "yes" for row in rows] == held
    assert sum(row[7] == "no" for row in rows) <= MISSED


def rows_beside() -> dict[tuple[int, int, str], list[str]]:
    """The page's lines of ours beside others, by compute capability, head size and variant."""
    text = REPORT.PAGE.read_text(encoding="utf-8").partition(REPORT.BESIDE)[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    return {(int(row[0]), int(row[1]), row[2]): row[3:] for row in rows}


def test_ours_stand_beside_others_and_none_is_much_slower() -> None:
    rows = rows_beside()
    assert {*rows} == {(case.sm, case.size, case.variant) for case, _ in REPORT.other_cases()}
    for forward, flex, _, tutorial, backward, flex_backward, _ in rows.values():
        assert int(forward) >= int(flex)
        assert int(backward) >= int(flex_backward)
        assert tutorial == "-" or int(forward) >= 0.98 * int(tutorial)
    assert sum(row[3] != "-" for row in rows.values()) == 4


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Flex", "tutorial"])
def test_kernels_of_others_are_as_the_page_says(name: str) -> None:
    """Under the versions that it is of; under others they compile all the same."""
    case = REPORT.Case(90, 2, 128, "forward", "causal")
    rate = REPORT.whole_rate([case.beside(name)])
    text = REPORT.PAGE.read_text(encoding="utf-8")
    torch_there = text.split("templates of torch ")[1].split()[0]
    if IS_OF_THIS and torch_there == version("torch").partition("+")[0]:
        assert rows_beside()[90, 128, "causal"][{"Flex": 1, "tutorial": 3}[name]] == rate
    assert int(rate) > 300


def test_every_compute_capability_has_tiles_that_fit_its_shared_memory() -> None:
    assert {sm: table_arch(sm) for sm in (80, 86, 87, 89, 90, 100, 103, 120)} == {
        80: 80, 86: 120, 87: 80, 89: 120, 90: 90, 100: 100, 103: 100, 120: 120,
    }  # fmt: skip
    assert shared_memory(86) == shared_memory(120) < shared_memory(80)


@pytest.mark.parametrize(("size", "width"), [(1, 16), (16, 16), (17, 32), (128, 128), (192, 256)])
def test_head_sizes_are_padded_to_powers_of_two(size: int, width: int) -> None:
    assert padded_head_size(size) == width


@compiled
@pytest.mark.slow
def test_explain_reads_the_machine_code_of_a_gpu_that_is_not_there() -> None:
    x = ag.TensorSpec((2, 8, 1024, 64), torch.bfloat16)
    plan = ag.compile(ag.attention(x, x, x, mask=ag.Causal(), soft_cap=30.0), target="h200")
    assert plan.backend == "triton"
    told = str(plan.explain())
    for kernel in ("forward", "query_gradient", "key_gradient"):
        (line,) = (x for x in told.splitlines() if f"- {kernel}:" in x and "registers" in x)
        assert "nothing spilled" in line
        assert "wgmma" in line
    text = plan.text()
    assert ".target sm_90a" in text
    assert "def keep(b, h, i, j, M, N, data, numbers):" in text


def test_explain_says_which_kernels_keep_registers_in_memory() -> None:
    told = []
    for size in (64, 256):
        x = ag.TensorSpec((2, 8, 1024, size), torch.bfloat16)
        graph = ag.attention(x, x, x, soft_cap=30.0)
        told.append(str(ag.explain(graph, target="b200", backends=("triton",))))
    assert "registers run short" not in told[0]
    spills = TABLE[100, 2, "key_gradient"][256]["modified"].spills
    assert f"key_gradient: registers run short, and up to {spills} bytes of a thread's" in told[1]
    assert told[1].count("registers run short") == 1


@compiled
def test_a_new_length_needs_no_new_kernel() -> None:
    """What differs in sizes alone is compiled once: the texts and the constants are the same."""
    plans = []
    for M, N in ((512, 1024), (640, 1152)):
        q, k = (ag.TensorSpec((2, 8, n, 64), torch.bfloat16) for n in (M, N))
        mask = ag.Causal("bottom_right") & ag.Window(N // 4, align="bottom_right")
        forward, _ = ag.vjp(ag.attention(q, k, k, mask=mask, alibi=True, align="bottom_right"))
        problem = sole(forward)
        plans.append(REPORT.Flash.plan(problem, ag.Target.of("h200")))
    (one,), (two,) = (plan.launches for plan in plans)
    assert one.texts == two.texts
    constants = [n for n in one.fixed if n.isupper() and n not in ("M", "N", "H")]
    assert all(one.fixed[n] == two.fixed[n] for n in constants)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "f64": ({"dtype": torch.float64}, "computes in f16, bf16 and f32, and the graph is in f64"),
    "head size": (
        {"size": 640},
        "supports head sizes up to 512, of q and k up to 576, and q has D = 640",
    ),
    "no keys": ({"keys": 0}, "needs sizes of at least 1, and B = 1, H = 2, M = 8, N = 0"),
    "offsets": ({"step": 2**24}, "counts within a tile up to 2147483647 elements, and q"),
}


def graph(
    dtype: torch.dtype = torch.float16, size: int = 16, keys: int = 8, step: int = 0
) -> ag.Graph:
    q = ag.TensorSpec((1, 2, 8, size), dtype, (8 * step, 8 * step, step, 1) if step else None)
    k = ag.TensorSpec((1, 2, keys, size), dtype)
    return ag.attention(q, k, k)


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_can_not_do_it_refuses_with_the_number(name: str) -> None:
    sizes, reason = REFUSED[name]
    with pytest.raises(ag.NoBackendError) as error:
        ag.compile(graph(**sizes), target="h200", backends=("triton",))
    ((_, reasons),) = error.value.refusals
    assert any(str(r).startswith(reason) for r in reasons), reasons


def test_machines_without_it_are_told_what_is_missing() -> None:
    bare = ag.Target("v100", "cuda", 70)
    with pytest.raises(ag.NoBackendError) as error:
        ag.compile(graph(), target=bare, backends=("triton",))
    ((_, reasons),) = error.value.refusals
    assert tuple(map(str, reasons)) == (
        "needs compute capability sm_80, and the target has sm_70",
        "needs triton, which is not installed; pip install 'attn-graph[cuda]'",
    )


def test_kernels_are_compiled_for_sinks_of_their_own_dtype() -> None:
    x, sinks = ag.TensorSpec((1, 2, 64, 64), torch.bfloat16), ag.TensorSpec((2,), torch.bfloat16)
    problem = sole(ag.vjp(ag.attention(x, x, x, sinks=sinks))[0])
    assert REPORT.Flash.plan(problem, ag.Target.of("h200")).dtypes()["sinks"] == torch.bfloat16


def test_a_large_tensor_is_addressed_in_64_bits() -> None:
    """Over 2^31 elements: heads and tiles begin at 64-bit offsets, a bias is read by them."""
    x = ag.TensorSpec((1, 2, 65536, 128), torch.float16)
    bias = ag.TensorSpec((1, 2, 65536, 65536), torch.float16)
    problem = sole(ag.vjp(ag.attention(x, x, x, bias=bias))[0])
    flash = REPORT.Flash.plan(problem, ag.Target.of("h200"))
    assert "(i).to(tl.int64) * numbers" in flash.code.change


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("pass_", REPORT.PUSHES)
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_forward_mode_compiles_in_float32_too(sm: int, pass_: str) -> None:
    """With head size 128 registers are few, and some spill; it has to fit all the same."""
    for machine in REPORT.Case(sm, 4, 128, pass_, "causal").compile()[2]:
        assert machine.shared <= shared_memory(sm)
        assert machine.registers * 32 * machine.warps <= 65536


NARROW = [  # each pass on one architecture, and on both of them in `make deep`
    pytest.param(sm, pass_, marks=[pytest.mark.deep] * (n in (1, 2, 5)))
    for n, (pass_, sm) in enumerate(product(REPORT.PUSHES, (80, 90)))
]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(("sm", "pass_"), NARROW)
def test_forward_mode_of_heads_narrower_than_their_tile_spills_as_told(sm: int, pass_: str) -> None:
    _, tile, machines = REPORT.Case(sm, 2, 72, pass_, "causal").compile()
    for machine in machines:
        assert machine.shared <= shared_memory(sm)
        assert machine.spilled <= most_spilled(tile)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_rows_are_summed_again_without_spilling(sm: int) -> None:
    """With a loop that computes scores and dp, as slopes that train have it."""
    x, slopes = (
        ag.TensorSpec((2, 16, 4096, 128), torch.bfloat16),
        ag.TensorSpec((16,), torch.float32),
    )
    forward = ag.attention(x, x, x, mask=ag.Causal(), alibi=slopes)
    problem = sole(ag.vjp(forward, ["q", "k", "v", "alibi"])[1])
    flash = REPORT.Flash.plan(problem, target_of(sm))
    (launch,) = (x for x in flash.launches if x.kernel == "sum_weights")
    (machine,) = REPORT.compile_launches(evolve(flash, launches=(launch,)))
    assert not machine.spilled
    assert machine.shared <= shared_memory(sm)


MORE_SPILLED = 0 if IS_OF_THIS else 768  # by other versions than the one that tiles are chosen by


def most_spilled(tile: Tiling) -> int:
    """The most bytes of a thread's registers that a kernel may keep in memory."""
    return (tile.spills or FEW_SPILLED) + MORE_SPILLED


LENGTHS = (256, 4096)  # of few programs, which have smaller blocks, and of many
FITTED = (80, 89, 90, 100, 120)
SIZES = (16, 32, 64, 96, 128, 192, 256)


def changes(M: int) -> dict[str, dict[str, Any]]:
    """What takes registers and shared memory beside q, k and v [2,4,M,D]."""
    table: dict[str, Any] = {
        "modifiers": (ag.RelativeBias(129),),
        "table": ag.TensorSpec((4, 129), F32),
    }
    return {
        "no mask": {},
        "causal": {"mask": ag.Causal()},
        "soft cap": {"mask": ag.Causal(), "soft_cap": 9.0},
        "slopes": {"mask": ag.Causal(), "alibi": ag.TensorSpec((4,), F32)},
        "table": table,
        "table, soft cap": {**table, "soft_cap": 9.0},
        "bias": {"bias": ag.TensorSpec((2, 4, M, M), F32)},
        "keep": {"keep": ag.TensorSpec((2, 4, M, M), torch.bool)},
        "blocks": {
            "mask": ag.KeepBlocks(64, 64),
            "keep_blocks": ag.TensorSpec((2, 4, M // 64, M // 64), torch.bool),
        },
        "segments": {"segments": (ag.TensorSpec((2, M), torch.int32),) * 2},
        "dropout": {"dropout": 0.1},
        "sinks": {"mask": ag.Window(99, 0), "sinks": ag.TensorSpec((4,), F32)},
        "lengths": {"kv_lengths": ag.TensorSpec((2,), torch.int32)},
    }


NAMES_OF_CHANGES = (*changes(LENGTHS[0]), "packed", "pages")
HARD = [  # that took the most registers or shared memory
    *((sm, 32, torch.bfloat16, 4096, "blocks", pass_) for sm in (89, 90) for pass_ in (0, 1)),
    *((sm, 192, F32, 256, "causal", pass_) for sm in (90, 100) for pass_ in (0, 1)),
    *((sm, 64, torch.bfloat16, 4096, "table, soft cap", 1) for sm in (80, 100)),
    (90, 128, torch.bfloat16, 4096, "table, soft cap", 1),
    # where tiles that are told to spill do so, and smaller ones than the usual do not
    (80, 32, torch.bfloat16, 4096, "dropout", 1),
    (80, 16, torch.bfloat16, 4096, "table, soft cap", 1),
    (100, 256, torch.bfloat16, 4096, "pages", 1),
    (100, 128, torch.bfloat16, 4096, "slopes", 1),
    (100, 256, torch.bfloat16, 4096, "blocks", 1),
    (100, 256, torch.bfloat16, 4096, "dropout", 1),
    (120, 128, torch.bfloat16, 4096, "blocks", 0),
    (100, 256, F32, 4096, "soft cap", 1),
]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", ["slopes", "table", "table, soft cap"])
@pytest.mark.parametrize("sm", [90, 100])
def test_gradients_of_trained_modifiers_fit_the_shared_memory(sm: int, name: str) -> None:
    check_shared(flash_of(sm, 128, torch.bfloat16, 256, name, 1), shared_memory(sm))


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("case", HARD, ids=lambda case: "-".join(map(str, case)))
def test_kernels_that_take_the_most_fit_and_spill_little(case: Any) -> None:
    check_fit(*case)


@compiled
@pytest.mark.slow
@given(
    sm=st.sampled_from(FITTED),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from((torch.bfloat16, torch.bfloat16, F32)),
    name=st.sampled_from(NAMES_OF_CHANGES),
    pass_=st.integers(0, 1),
)
@settings(max_examples=settings().max_examples // 5)  # of seconds each
def test_kernels_that_are_drawn_fit_the_shared_memory(
    sm: int, size: int, dtype: torch.dtype, name: str, pass_: int
) -> None:
    check_shared(flash_of(sm, size, dtype, 256, name, pass_), shared_memory(sm))


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_OF_CHANGES)
@pytest.mark.parametrize("sm", FITTED)
def test_every_kernel_of_the_table_fits_and_spills_little(
    sm: int, name: str, request: pytest.FixtureRequest
) -> None:
    """Each row of tilings, in both passes, by head size, dtype and length: hours of one core."""
    if not request.config.getoption("--every-plan"):
        pytest.skip("`make compiled` compiles the whole table")
    wrong: list[str] = []
    every = product(SIZES, (torch.bfloat16, F32), LENGTHS, (0, 1))
    for size, dtype, M, pass_ in every:
        each = needs_of(sm, size, dtype, M, name, pass_)
        wrong += [str(x) for x in each if x.is_too_much]
    assert not wrong, "\n".join(wrong)


@final
class Shared(Exception):
    """A kernel's bytes of shared memory, which are known before there is machine code."""


def stop(_backend: object, _code: str, metadata: dict[str, Any], *_options: object) -> NoReturn:
    raise Shared(metadata["shared"])


def check_shared(flash: Flash, most: int) -> None:
    """Assert that no kernel takes more shared memory; in half the time of machine code."""
    tensors = mock_tensors(flash)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_ptx", stop)
        for launch in flash.launches:
            try:
                shared = compile_launch(launch, tensors, flash.target.sm).metadata.shared
            except Shared as stopped:
                (shared,) = stopped.args
            assert shared <= most, launch.kernel


def check_fit(sm: int, size: int, dtype: torch.dtype, M: int, name: str, pass_: int) -> None:
    """Assert that every kernel of a forward, or of a gradient, fits and spills little."""
    assert not [str(x) for x in needs_of(sm, size, dtype, M, name, pass_) if x.is_too_much]


@final
@frozen
class Needs:
    """What a kernel needs. case: of which graph. most: bytes that it may spill."""

    case: str
    code: MachineCode
    sm: int
    most: int

    def __str__(self) -> str:
        code = self.code
        return f"{self.case}: {code.kernel} spills {code.spilled} bytes, {code.shared} shared"

    @property
    def is_over(self) -> bool:
        """True if it needs more shared memory than there is."""
        return self.code.shared > shared_memory(self.sm)

    @property
    def is_too_much(self) -> bool:
        """True if it does, or spills more than it may."""
        return self.is_over or self.code.spilled > self.most


def needs_of(
    sm: int, size: int, dtype: torch.dtype, M: int, name: str, pass_: int
) -> Iterator[Needs]:
    """What the kernels of a forward, or of a gradient, need."""
    flash = flash_of(sm, size, dtype, M, name, pass_)
    lying, case = flash.lying, f"sm_{sm}, {dtype}, D {size}, M {M}, {name}"
    for code in REPORT.compile_launches(flash):
        of = PASS_OF.get(code.kernel, "query_gradient")  # as of rows whose weights are summed
        tile = choose_tiling(lying.flat, flash.target, of, None, lying.packed is None)
        yield Needs(case, code, sm, most_spilled(tile))


def flash_of(sm: int, size: int, dtype: torch.dtype, M: int, name: str, pass_: int) -> Flash:
    """How the kernels of a forward, or of a gradient, are launched."""
    lying = lying_of(ag.vjp(changed_graph(size, dtype, M, name))[pass_])
    return Flash.plan(lying, target_of(sm))


def changed_graph(size: int, dtype: torch.dtype, M: int, name: str) -> ag.Graph:
    """Attention of four heads to two of keys, with one of NAMES_OF_CHANGES."""
    q, k = (ag.TensorSpec((2, heads, M, size), dtype) for heads in (4, 2))
    if name == "packed":
        q, k = (ag.TensorSpec((2 * M, heads, size), dtype) for heads in (4, 2))
        starts = ag.TensorSpec((3,), torch.int32)
        return ag.attention(q, k, k, q_starts=starts, mask=ag.Causal(), max_lengths=(M, M))
    if name == "pages":
        k = ag.TensorSpec((2 * M // 16, 16, 2, size), dtype)
        pages, lengths = (ag.TensorSpec(x, torch.int32) for x in ((2, M // 16), (2,)))
        mask = ag.Causal("bottom_right")
        return ag.attention(q, k, k, pages=pages, kv_lengths=lengths, mask=mask)
    return ag.attention(q, k, k, **changes(M)[name])


# Packed tensors, keys in pages, and few queries


def serving_code(sm: int, size: int, page: int | None, M: int | None) -> Any:  # Any: machine code
    """The machine code of one kernel: of packed sequences, causal, or, of M queries, against a
    cache in pages, or in one piece for page 0."""
    H, G, B, N, kind = 32, 8, 4, 4096, torch.bfloat16
    target = evolve(ag.Target.of({80: "a100", 90: "h200"}[sm]), sm=sm)
    if M is None:
        q, k = (ag.TensorSpec((16384, h, size), kind) for h in (H, G))
        starts = ag.TensorSpec((65,), torch.int32)
        graph = ag.attention(q, k, k, q_starts=starts, mask=ag.Causal(), max_lengths=(2048, 2048))
    else:
        table: dict[str, Any] = {}
        table |= {"pages": ag.TensorSpec((B, N // page), torch.int32)} if page else {}
        shape = (B * N // page, page, G, size) if page else (B, G, N, size)
        q, k = ag.TensorSpec((B, H, M, size), kind), ag.TensorSpec(shape, kind)
        lengths = ag.TensorSpec((B,), torch.int32)
        mask = ag.Causal("bottom_right") if M > 1 else None
        graph = ag.attention(q, k, k, kv_lengths=lengths, mask=mask, **table)
    lying = facts_of(simplify(graph)).once(Lying.of)
    assert lying is not None
    return REPORT.compile_launches(REPORT.Flash.plan(lying, target))


SERVING = [
    *((sm, size, None, None) for sm in (80, 90) for size in (64, 128, 256)),
    *((sm, 128, page, 1) for sm in (80, 90) for page in (0, 1, 16, 64, 128)),
    *((sm, size, 16, 1) for sm in (80, 90) for size in (64, 256)),
    (90, 128, 64, 16),
]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(("sm", "size", "page", "M"), SERVING)
def test_kernels_that_serve_spill_nothing(
    sm: int, size: int, page: int | None, M: int | None
) -> None:
    """They copy ahead, at every size of a page, and two programs of a step fit a multiprocessor."""
    machine, *merge = serving_code(sm, size, page, M)
    counts = dict(machine.instructions)
    assert not machine.spilled
    assert not machine.serialized
    assert counts["cp.async"]
    many = M is None or M > 1  # rows: wgmma takes 64 at least
    assert counts["wgmma" if sm == 90 and many else "mma"]
    if M == 1:
        assert machine.registers <= 200
        assert PROCESSORS[sm].programs(machine.registers, machine.warps, machine.shared) >= 2
    for each in merge:
        most = 56 if LATER or size == 256 else 48
        assert each.registers <= most + 2 * (TRITON < (3, 7) and size == 256)
        assert not each.spilled


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "kind", "most"),
    [
        (80, torch.float8_e5m2, 35),
        (80, torch.float8_e4m3fn, 57),
        (80, torch.int8, 44),
        (90, torch.float8_e4m3fn, 34),
        (90, torch.int8, 44),
        (100, torch.float8_e4m3fn, 33),
    ],
)
def test_eight_bits_with_one_scale_take_few_instructions_a_key(
    sm: int, kind: torch.dtype, most: int
) -> None:
    """Of a multiprocessor, for 16 rows; bfloat16 takes 17. None converts a number by itself: such
    instructions take four times as long."""
    q, k = ag.TensorSpec((1, 32, 1, 128), torch.bfloat16), ag.TensorSpec((1, 8, 32768, 128), kind)
    scale = ag.TensorSpec((1, 8, 1, 1), torch.float32)
    graph = ag.attention(q, k, k, k_scale=scale, v_scale=scale)
    lying = Lying.of(facts_of(simplify(graph)))
    assert lying is not None
    split, _ = REPORT.compile_launches(REPORT.Flash.plan(lying, target_of(sm)))
    issued = read_body(split.sass).full.issued * split.warps / 64  # keys of a tile
    assert issued <= most
    code, _ = read_instructions(split.sass)
    assert not [name for name, _ in code if name.startswith(("F2F.", "I2F.F16", "I2F.BF16"))]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_kernel_compiles_for_gpus_of_others(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a soft cap, though the hardware's tanh is an instruction of NVIDIA's, and with keys in
    8 bits, as NVIDIA's oldest have them."""
    monkeypatch.setattr(machine_code, "Driver", partial(amd_driver, machine_code.Driver, arch))
    kind, made = torch.bfloat16, set[str]()
    q, k = ag.TensorSpec((4, 32, 1, 64), kind), ag.TensorSpec((4, 8, 4096, 64), torch.float8_e4m3fn)
    one = ag.TensorSpec((1, 1, 1, 1), F32)
    names = ("table, soft cap", "bias", "blocks", "pages")
    graphs = [ag.attention(q, k, k, k_scale=one, v_scale=one)]
    graphs += chain(*(ag.vjp(changed_graph(64, kind, 256, name)) for name in names))
    for lying in (Lying.of(facts_of(simplify(graph))) for graph in graphs):
        assert lying is not None
        flash = REPORT.Flash.plan(lying, target_of(80))
        tensors = mock_tensors(flash)
        for launch in (x for x in flash.launches if x.kernel not in made):
            code = machine_code.compile_launch(launch, tensors, 80)
            assert "amdgcn" in code.asm
            assert "inline_asm" not in code.asm["ttgir"]
            made.add(launch.kernel)
    assert made == {*HOMES}


def amd_driver(make: Callable[[int], machine_code.Driver], arch: str, sm: int) -> Any:
    """Stands for the driver of an AMD GPU."""
    driver = make(sm)
    driver.sm = int(arch.removeprefix("gfx"))  # a name of its own for kernels that Triton holds
    driver.target = GPUTarget("hip", arch, 64)
    return driver
