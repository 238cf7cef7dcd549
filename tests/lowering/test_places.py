"""What the model of programs takes of places, against what machine code says of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

import attn_graph as ag
from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.backend import Options
from attn_graph.lowering.triton.launch_list import BY_KEYS, PASS_OF
from attn_graph.lowering.triton.launches import Launch
from attn_graph.lowering.triton.offline import MachineCode, inspect_launch, mock_tensors
from attn_graph.lowering.triton.plan import Flash
from attn_graph.lowering.triton.predict import (
    PROCESSORS,
    Clocks,
    TileWork,
    predict_clocks,
)
from attn_graph.lowering.triton.programs import FULL, LONE, START, places_of
from attn_graph.lowering.triton.tiles import choose_tiling, spread_tilings
from docs.generate.kernel_rows import PRODUCTS, Kernel, target_of
from tests.lowering.test_programs import LONG, attention, compiling, flashes

SIZES = (64, 128)
VARIANTS = (
    *("half the queries and warps", "half the keys and warps"),
    *("half the queries", "twice the keys and warps"),
)
SHARE = max(1, 50 // settings().max_examples)  # `make deep` takes all


def kernels_of(
    sm: int, size: int, variant: str | None = None
) -> Iterator[tuple[Flash, Launch, MachineCode]]:
    """The three long launches of an attention and its gradient, and their machine code."""
    graph = attention(1, 64, 64, 4096, 4096, size, mask=ag.Causal())
    for flash in flashes(graph, target_of(sm), Options(variant=variant)):
        for launch in (x for x in flash.launches if x.kernel in LONG):
            yield flash, launch, inspect_launch(launch, mock_tensors(flash), sm)


def tile_of(launch: Launch) -> Tiling:
    """The tile of a launch."""
    fixed = launch.fixed
    return Tiling(fixed["BLOCK_M"], fixed["BLOCK_N"], launch.warps, launch.stages)


def clocks_of(sm: int, size: int, launch: Launch, machine: MachineCode, programs: int) -> Clocks:
    """Clocks of a score of full tiles, of mixed ones and of a program, with so many resident."""
    tile = tile_of(launch)
    rows = tile.block_m if launch.kernel in BY_KEYS else tile.block_n
    scores = tile.block_m * tile.block_n
    work = TileWork(2 * PRODUCTS[launch.kernel] * scores * size, 4 * rows * size)
    clocks = predict_clocks(PROCESSORS[sm], machine.body, work, machine.warps, programs)
    return Clocks(clocks.full / scores, clocks.mixed / scores, clocks.program)


@compiling
@pytest.mark.slow
@pytest.mark.parametrize("sm", START)
@pytest.mark.parametrize("size", SIZES)
def test_places_and_their_speed_are_those_of_machine_code(sm: int, size: int) -> None:
    """How many programs are resident, what one that is alone takes, and what each does once."""
    for flash, launch, machine in kernels_of(sm, size):
        tile, kernel = tile_of(launch), Kernel(sm, 2, size, launch.kernel)
        places = places_of(flash.problem, flash.target, tile, PASS_OF[launch.kernel])
        assert places is not None
        assert places.each == min(kernel.programs(machine), FULL // launch.warps)
        clocks = clocks_of(sm, size, launch, machine, places.each)
        assert 0.4 <= clocks.program / clocks.full / START[sm] <= 1.65
        if places.each == 2:
            alone = clocks_of(sm, size, launch, machine, 1)
            assert alone.full / clocks.full == pytest.approx(LONE, abs=0.06)


@compiling
@pytest.mark.slow
@pytest.mark.parametrize("sm", START)
@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_few_programs_compile_clean_and_are_as_fast_as_taken(sm: int, size: int) -> None:
    usual = {x.kernel: clocks_of(sm, size, x, m, Kernel(sm, 2, size, x.kernel).programs(m)).full
             for _, x, m in kernels_of(sm, size)}  # fmt: skip
    turn = SIZES.index(size) + [*START].index(sm)  # each variant meets each size, and each GPU
    for variant in VARIANTS[turn % SHARE :: SHARE]:
        for flash, launch, machine in kernels_of(sm, size, variant):
            kernel, tile = Kernel(sm, 2, size, launch.kernel), tile_of(launch)
            p, by_keys = flash.problem, launch.kernel in BY_KEYS
            chosen = choose_tiling(p, flash.target, PASS_OF[launch.kernel])
            slower = spread_tilings(p, flash.target, by_keys, chosen).get(tile)
            if tile == chosen or slower is None:
                continue
            assert not [*kernel.complaints(machine)]
            programs = min(kernel.programs(machine), FULL // launch.warps)
            few = LONE if programs * launch.warps < FULL else 1.0
            full = clocks_of(sm, size, launch, machine, programs).full
            assert full / usual[launch.kernel] == pytest.approx(few * slower, rel=0.2)
