"""Loops are read off machine code, and the model gives the figures that it was fitted to."""

from __future__ import annotations

import pytest
from attrs import evolve

from docs.generate.predict import (
    PROCESSORS,
    Clocks,
    TileWork,
    predict_clocks,
    slots_per_score,
    tile_clocks,
)
from docs.generate.sass import Body, Loop, read_body

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
.L_x_2:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0040*/              @!P1 BRA `(.L_x_2) ;
        /*0050*/                   MUFU.EX2 R9, R8 ;
        /*0060*/                   FFMA R8, R9, R7, R6 ;
        /*0070*/                   STL [R1], R9 ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
.L_x_3:
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*00a0*/               @P0 BRA `(.L_x_3) ;
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*00d0*/                   BRA `(.L_x_1) ;
"""


def test_innermost_loops_over_tiles_are_counted() -> None:
    full = Loop(issued=8, special=1, floats=1, spills=1, fetched=2 * 16 * (64 + 128 + 128))
    mixed = Loop(issued=2, fetched=2 * 16 * (64 + 64))
    body = read_body(SASS)
    assert body == Body((full, mixed), outside=4)
    assert (body.full, body.mixed) == (full, mixed)


def predicted(sm: int, loop: Loop, tile: tuple[int, int, int], warps: int, programs: int) -> float:
    """TFLOP/s of a forward in half precision, in full tiles. tile: queries, keys, head size."""
    at, (rows, keys, width) = PROCESSORS[sm], tile
    flop = 4 * rows * keys * width
    clocks = tile_clocks(at, loop, TileWork(flop, 4 * keys * width), warps, programs)
    return flop / clocks * at.count * at.clock / 1e12


# Counts of machine code for sm_90 by Triton 3.7.1, and what others measured on an H100.
@pytest.mark.parametrize(
    ("loop", "tile", "measured"),
    [
        (Loop(issued=492, special=66), (128, 128, 128), (469, 477)),  # Triton's tutorial
        (Loop(issued=434, special=34), (128, 64, 128), (400, 408)),  # FlexAttention
    ],
)
def test_published_figures_are_met_within_5_percent(
    loop: Loop, tile: tuple[int, int, int], measured: tuple[float, float]
) -> None:
    found = predicted(90, loop, tile, warps=8, programs=1)
    assert measured[0] * 0.95 <= found <= measured[1] * 1.05


@pytest.mark.parametrize("sm", PROCESSORS)
def test_more_of_anything_is_no_faster_and_company_no_slower(sm: int) -> None:
    at, loop, work = PROCESSORS[sm], Loop(400, 64, 200), TileWork(4e6, 16384)
    alone = tile_clocks(at, loop, work, 8, 1)
    worse = (evolve(loop, issued=900), evolve(loop, special=300), evolve(loop, floats=4000))
    assert all(tile_clocks(at, each, work, 8, 1) > alone for each in worse)
    assert tile_clocks(at, loop, evolve(work, flop=8e6), 8, 1) > alone
    assert tile_clocks(at, loop, evolve(work, bytes=10**6), 8, 1) > alone
    assert tile_clocks(at, loop, work, 8, 2) < alone
    products = work.flop / at.products
    assert tile_clocks(at, loop, work, 8, 8) >= products


@pytest.mark.parametrize(
    ("sm", "registers", "warps", "shared", "programs"),
    [
        (90, 255, 8, 163840, 1),  # by registers
        (90, 100, 4, 57344, 4),  # by shared memory
        (90, 32, 4, 1000, 16),  # by warps
        (120, 128, 4, 57344, 1),
        (80, 255, 4, 57344, 2),
    ],
)
def test_programs_of_one_multiprocessor(
    sm: int, registers: int, warps: int, shared: int, programs: int
) -> None:
    assert PROCESSORS[sm].programs(registers, warps, shared) == programs


def test_a_kernel_takes_its_tiles_and_its_programs() -> None:
    at, body = PROCESSORS[90], Body((Loop(100), Loop(200)), 1000)
    clocks = predict_clocks(at, body, TileWork(0, 0), 8, 1)
    assert clocks == Clocks(240.0, 480.0, 3600.0)
    assert clocks + clocks == Clocks(480.0, 960.0, 7200.0)
    whole = clocks.seconds(at, full=10, mixed=2, programs=3)
    assert whole == pytest.approx(1.01 * (2400 + 960 + 10800) / (132 * 1.65e9))
    assert slots_per_score(body.full, 8, 1024) == 25
