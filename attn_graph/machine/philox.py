"""Philox 4x32-10: the counter-based generator behind dropout.

J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. The key is the 64-bit
seed; the counter is (j // 4, i, b * H + h, offset), and key j takes word j % 4 of the result. So a
bit depends on its place alone, and every lowering, whatever its tiles, draws equal bits. Only the
low 32 bits of `offset` count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attn_graph.spec import MOST_INT32

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
ALWAYS = 2**62  # a period that no batch reaches
WORDS = 4  # drawn by a counter, for as many neighbouring keys
ROOMS = 5  # buffers to draw them in
Compare = Callable[..., object]  # two tensors, or a tensor and a number, with out=


def place_in_whole(
    origin: Sequence[int], ranges: Sequence[range], H: int
) -> tuple[Sequence[range], int, int]:
    """Ranges of b, h, i, j of a part as those of the whole, the whole's H, and the period.

    origin: b, h, i, j of the part's first place in the whole, the whole's H, and perhaps the period
    of equal draws in the batch; empty: this is the whole.
    """
    if not origin:
        return ranges, H, ALWAYS
    moved = [range(r.start + n, r.stop + n) for r, n in zip(ranges, origin, strict=False)]
    return moved, origin[4], period_of(origin)


def period_of(origin: Sequence[int]) -> int:
    return origin[5] if len(origin) > 5 else ALWAYS


def flat_origin(origin: Sequence[int]) -> tuple[int, ...] | None:
    """Dropout's origin for kernels: the first batch entry, head, row and key, H, period."""
    return (*origin[:5], min(period_of(origin), MOST_INT32)) if origin else None


def counters(keys: range) -> range:
    """The counters, of four words each, that cover these keys."""
    return range(keys.start // WORDS, -(-keys.stop // WORDS))


def threshold(rate: float) -> int:
    """The least word that keeps its weight: `rate` of the 2^32 words are below it."""
    return min(WORD + 1, round(rate * 2**32))


def random_words(
    seed: int,
    offset: int,
    b: range,
    h: range,
    i: range,
    j: range,
    H: int,
    rooms: Sequence[torch.Tensor],
    period: int = ALWAYS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words for each counter: int64 tensors [b,h,i,counters(j)] holding 32-bit values.

    `rooms` are ROOMS int64 tensors of that shape to work in; the result is four of them.
    """
    like, low, high = rooms[0], seed & WORD, (seed >> 32) & WORD
    keys = [((low + n * STEPS[0]) & WORD, (high + n * STEPS[1]) & WORD) for n in range(ROUNDS)]
    slabs = lay_along(b, like, 0) % period * H + lay_along(h, like, 1)
    counter = lay_along(counters(j), like, 3), lay_along(i, like, 2), slabs, offset & WORD
    *_, free = rooms
    c0, c1, c2, c3 = begin(*counter, keys, rooms)
    for low, high in keys[3:]:
        p0, p1 = c0.mul_(MULTIPLIERS[0]), c2.mul_(MULTIPLIERS[1])
        c0, free = stir(p1, c1, low, free), c1
        c2, free = stir(p0, c3, high, free), c3
        c1, c3 = p1, p0
    return c0, c1.bitwise_and_(WORD), c2, c3.bitwise_and_(WORD)


def begin(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: int, keys: Sequence[tuple[int, int]],
    rooms: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:  # fmt: skip
    """The counter after three rounds, in the first four rooms. Low 32 bits of c1 and c3 count.

    Each word begins with one axis of the four, and gains others by each round: nearly all of this
    computes with few numbers.
    """
    p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    c0, c2, c1 = upper(p1) ^ (c1 ^ keys[0][0]), upper(p0) ^ (c3 ^ keys[0][1]), p1 & WORD
    q0, q1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    c0 = upper(q1) ^ (c1 ^ keys[1][0])
    c2 = torch.bitwise_xor(upper(q0), p0 & WORD ^ keys[1][1], out=rooms[1])
    p0, p1 = c0 * MULTIPLIERS[0], c2.mul_(MULTIPLIERS[1])
    c0 = stir(p1, q1, keys[2][0], rooms[0])
    c2 = torch.bitwise_xor(upper(p0), q0 & WORD ^ keys[2][1], out=rooms[2])
    return c0, p1, c2, rooms[3].copy_(p0)


def upper(product: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of a product of two 32-bit values."""
    return (product >> 32) & WORD


def stir(product: torch.Tensor, word: torch.Tensor, key: int, out: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of a product, xor the low 32 bits of a word, xor a key."""
    torch.bitwise_right_shift(product, 32, out=out).bitwise_xor_(word)
    return out.bitwise_xor_(key).bitwise_and_(WORD)


def lay_along(values: range, like: torch.Tensor, axis: int) -> torch.Tensor:
    """The numbers of a range as int64 along one of four axes, the others being 1."""
    flat = torch.arange(values.start, values.stop, device=like.device)
    return flat.reshape([-1 if a == axis else 1 for a in range(4)])


def draw_(
    out: torch.Tensor, rate: float, seed: int, offset: int, ranges: Sequence[range], H: int,
    rooms: Sequence[torch.Tensor], period: int = ALWAYS, compare: Compare = torch.ge,
) -> torch.Tensor:  # fmt: skip
    """Fill `out` [b,h,i,4 * counters(j)], of any dtype, with 1 for kept weights, else 0.

    With compare=torch.sub the values are negative for dropped weights instead. Returns the view
    [b,h,i,j] of the keys of `ranges`. rooms: as for `random_words`.
    """
    b, h, i, j = ranges
    for word, drawn in enumerate(random_words(seed, offset, b, h, i, j, H, rooms, period)):
        compare(drawn, threshold(rate), out=out[..., word::WORDS])
    first = j.start - WORDS * counters(j).start
    return out[..., first : first + len(j)]
