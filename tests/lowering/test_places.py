"""Other tiles for few programs, against what machine code says of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels.tilings import FULL
from attn_graph.lowering.codegen.launches import Launch
from attn_graph.lowering.codegen.machine_code import MachineCode, inspect_launch
from attn_graph.lowering.problem import sole
from attn_graph.lowering.request import Options
from attn_graph.lowering.triton.launch_list import BY_KEYS, PASS_OF
from attn_graph.lowering.triton.plan import Flash, mock_tensors
from attn_graph.lowering.triton.programs import choose_tiling, spread_tilings
from docs.generate.kernel_rows import PRODUCTS, Kernel, target_of
from docs.generate.predict import PROCESSORS, TileWork, predict_clocks
from docs.generate.sass import read_body
from tests.lowering.test_programs import LONG, attention, flashes, tile_of
from tests.support.kernels import compiled

SIZES, GENERATIONS = (64, 128), (80, 90, 120)
VARIANTS = (
    *("half the queries and warps", "half the keys and warps"),
    *("half the queries", "twice the keys and warps"),
)
SHARE = max(1, 100 // settings().max_examples)  # `make deep` takes all


def kernels_of(
    sm: int, size: int, variant: str | None = None
) -> Iterator[tuple[Flash, Launch, MachineCode]]:
    """The three long launches of an attention and its gradient, and their machine code."""
    graph = attention(1, 64, 64, 4096, 4096, size, mask=ag.Causal())
    for flash in flashes(graph, target_of(sm), Options(variant=variant)):
        for launch in (x for x in flash.launches if x.kernel in LONG):
            yield flash, launch, inspect_launch(launch, mock_tensors(flash), sm)


def clocks_of(sm: int, size: int, launch: Launch, machine: MachineCode, programs: int) -> float:
    """Clocks of a score of full tiles, with so many programs resident."""
    tile = tile_of(launch)
    rows = tile.block_m if launch.kernel in BY_KEYS else tile.block_n
    scores = tile.block_m * tile.block_n
    work = TileWork(2 * PRODUCTS[launch.kernel] * scores * size, 4 * rows * size)
    body = read_body(machine.sass)
    return predict_clocks(PROCESSORS[sm], body, work, machine.warps, programs).full / scores


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_few_programs_compile_clean_and_are_faster_where_one_is_alone(
    sm: int, size: int
) -> None:
    """Blocks of half the length, of which two are resident, take 1.4 times as long as one for a
    score at most, and tiles for one alone on a multiprocessor are faster than those for two."""
    few = sole(simplify(attention(1, 4, 4, 512, 512, size, mask=ag.Causal())))
    assert few is not None
    usual = {x.kernel: clocks_of(sm, size, x, m, 1) for _, x, m in kernels_of(sm, size)}
    turn = SIZES.index(size) + GENERATIONS.index(sm)  # each variant meets each size, and each GPU
    for variant in VARIANTS[turn % SHARE :: SHARE]:
        for flash, launch, machine in kernels_of(sm, size, variant):
            kernel, tile = Kernel(sm, 2, size, launch.kernel), tile_of(launch)
            of = flash.problem, flash.target, PASS_OF[launch.kernel]
            chosen = choose_tiling(*of)
            if tile == chosen or tile not in spread_tilings(few, *of[1:], chosen):
                continue
            assert not [*kernel.complaints(machine)]
            programs = min(kernel.programs(machine), FULL // launch.warps)
            clocks = clocks_of(sm, size, launch, machine, programs)
            assert clocks <= 1.4 * usual[launch.kernel]
