"""How long a kernel's tiles take, predicted from its machine code: pure functions of counts.

A tile takes matrix products and everything else: instructions that warps issue, exponentials on
the special units, sums in float32. Programs that share a multiprocessor do the two side by side,
and so do the warps of one program where a product is an instruction of one warp (`mma.sync`; on
sm_90 and sm_100 it is one of four warps, which wait for each other). One program does one after the
other, since its softmax needs its products.

Three numbers were fitted to measurements of others on H100, all in bf16 or f16 and forward: with
D = 128 Triton's own tutorial is predicted 491 TFLOP/s and was measured at 469 to 477
(pytorch/benchmark, pull request 2391), FlexAttention's kernel 402 and 408 (issue 2443); with D = 64
no Triton kernel was measured above 403 (FlashAttention 3's paper), though Triton's tuner may put
several programs on a multiprocessor. Backward kernels and other GPUs were compared with nothing:
read their figures as ratios between kernels of one GPU.
"""

from __future__ import annotations

from typing import final

from attrs import frozen

from docs.generate.sass import Body, Loop

STALL = 0.4  # of a tile's clocks, if each scheduler has one warp: latencies that none hides
OVERLAP = 0.5  # of the shorter part is hidden behind the longer with ever more programs
L2 = 24  # bytes a clock and multiprocessor, about 5.5 TB/s on an H100; taken for all
LATENCY = 1600  # clocks of a program before its first tile: q and the first keys come from memory
BALANCE = 1.01  # the busiest multiprocessor over the mean, where long programs come first
LANES = 32  # of a warp
SPECIAL = 16  # exponentials of one multiprocessor a clock, on every compute capability here
SCHEDULERS = 4  # of one multiprocessor: each issues one instruction of one warp a clock
REGISTERS = 65536  # of one multiprocessor
FETCH = 128  # bytes of shared memory that one multiprocessor reads a clock


@final
@frozen
class Processor:
    """One multiprocessor, and how many a GPU has.

    products: flop a clock of matrix products in half precision, summed in float32. floats: sums or
    products of float32 a clock. warps: the most that are resident. shared: bytes of shared memory.
    grouped: whether products are instructions of four warps.
    """

    products: int
    floats: int
    warps: int
    shared: int
    grouped: bool
    count: int
    clock: float

    def programs(self, registers: int, warps: int, shared: int) -> int:
        """How many programs are resident. shared: bytes of one, to which CUDA adds 1 KiB."""
        of_registers = REGISTERS // (-(-registers // 8) * 8 * LANES * warps)
        return max(1, min(of_registers, self.shared // (shared + 1024), self.warps // warps))


# Sources. floats, warps, shared, SPECIAL, SCHEDULERS: CUDA C++ Programming Guide, "Throughput of
# Native Arithmetic Instructions" and "Technical Specifications per Compute Capability". products:
# the data sheets' dense TFLOP/s of half precision by multiprocessors and boost clock, A100 312 =
# 108 * 2048 * 1.41 GHz, A40 150 = 84 * 1024 * 1.74, L40S 362 = 142 * 1024 * 2.49, H200 989 = 132 *
# 4096 * 1.83, B200 2250 = 148 * 8192 * 1.86, RTX PRO 6000 504 = 188 * 1024 * 2.62; GeForce cards
# have half of that where sums are float32. clock: boost, but for 90, which holds 1.65 GHz in the
# measurements above.
PROCESSORS = {
    80: Processor(2048, 64, 64, 167936, False, 108, 1.41e9),
    86: Processor(1024, 128, 48, 102400, False, 84, 1.74e9),
    89: Processor(1024, 128, 48, 102400, False, 142, 2.49e9),
    90: Processor(4096, 128, 64, 233472, True, 132, 1.65e9),
    100: Processor(8192, 128, 64, 233472, True, 148, 1.86e9),
    120: Processor(1024, 128, 48, 102400, False, 188, 2.62e9),
}


@final
@frozen
class TileWork:
    """What a tile is, whatever the machine code: flop of its matrix products in half precision (0
    in float32, whose sums are instructions like others), and bytes of its rows, which L2 sends."""

    flop: float
    bytes: int


def tile_clocks(at: Processor, loop: Loop, work: TileWork, warps: int, programs: int) -> float:
    """Clocks that a multiprocessor takes for one turn of a loop of one program.

    programs: how many are resident.
    """
    share = warps / SCHEDULERS
    products = max(work.flop / at.products, loop.fetched * share / FETCH)
    others = max(
        loop.issued * share,
        loop.special * warps * LANES / SPECIAL,
        loop.floats * warps * LANES / at.floats,
    )
    resident = programs * share  # warps of one scheduler
    depth = programs if at.grouped else max(1.0, resident)
    hidden = OVERLAP * (1 - 1 / depth)
    clocks = max(products, others) + min(products, others) * (1 - hidden)
    return max((1 + STALL / resident) * clocks, work.bytes / L2)


@final
@frozen
class Clocks:
    """Clocks of a multiprocessor for a full tile, for a mixed one, and for a program besides."""

    full: float
    mixed: float
    program: float

    def __add__(self, other: Clocks) -> Clocks:
        """Of two kernels on the same tiles."""
        return Clocks(
            self.full + other.full, self.mixed + other.mixed, self.program + other.program
        )

    def seconds(self, at: Processor, full: int, mixed: int, programs: int) -> float:
        """The time of a kernel with so many tiles and programs in all."""
        clocks = full * self.full + mixed * self.mixed + programs * self.program
        return BALANCE * clocks / (at.count * at.clock)


def predict_clocks(at: Processor, body: Body, work: TileWork, warps: int, programs: int) -> Clocks:
    """All clocks of a kernel of which so many programs are resident."""
    full, mixed = (tile_clocks(at, x, work, warps, programs) for x in (body.full, body.mixed))
    return Clocks(full, mixed, body.outside * warps / SCHEDULERS + LATENCY / programs)


def slots_per_score(loop: Loop, warps: int, scores: int) -> float:
    """Instructions of one lane for each score of a tile."""
    return loop.issued * warps * LANES / scores
