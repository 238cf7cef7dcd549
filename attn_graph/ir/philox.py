"""Philox 4x32-10: the counter-based generator behind dropout.

J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. The key is the 64-bit
seed; the counter is (j // 4, i, b * H + h, offset), and key j takes word j % 4 of the result. So a
bit depends on its place alone, and every lowering, whatever its tiles, draws the same ones.
Only the low 32 bits of `offset` count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
ALWAYS = 2**62  # a period that no batch reaches
MOST = 2**31 - 1  # the largest number that kernels take
WORDS = 4  # that a counter draws, for as many neighbouring keys


def place_in_whole(
    origin: Sequence[int], ranges: Sequence[range], H: int
) -> tuple[Sequence[range], int, int]:
    """Ranges of b, h, i, j of a part as those of the whole, the whole's H, and the period.

    origin: b, h, i, j of the part's first place in the whole, the whole's H, and perhaps a period,
    after which entries of the batch draw alike; none: this is the whole.
    """
    if not origin:
        return ranges, H, ALWAYS
    moved = [range(r.start + n, r.stop + n) for r, n in zip(ranges, origin, strict=False)]
    return moved, origin[4], period_of(origin)


def period_of(origin: Sequence[int]) -> int:
    """After how many batch entries draws repeat."""
    return origin[5] if len(origin) > 5 else ALWAYS


def flat_origin(origin: Sequence[int]) -> tuple[int, ...] | None:
    """Dropout's origin as kernels take it: the first batch entry, head, row and key, H, period."""
    return (*origin[:5], min(period_of(origin), MOST)) if origin else None


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
    six: Sequence[torch.Tensor],
    period: int = ALWAYS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words for each counter: int64 tensors [b,h,i,counters(j)] holding 32-bit values.

    `six` are int64 tensors of that shape to work in; the result is the first four of them.
    """
    c0, c1, c2, c3, p0, p1 = six
    c0.copy_(lay_along(counters(j), c0, 3))
    c1.copy_(lay_along(i, c1, 2))
    c2.copy_(lay_along(b, c2, 0) % period * H + lay_along(h, c2, 1))
    c3.fill_(offset & WORD)
    low, high = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        torch.mul(c0, MULTIPLIERS[0], out=p0)
        torch.mul(c2, MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0).bitwise_and_(WORD).bitwise_xor_(c1)
        torch.bitwise_right_shift(p0, 32, out=c2).bitwise_and_(WORD).bitwise_xor_(c3)
        c0.bitwise_xor_(low)
        c2.bitwise_xor_(high)
        torch.bitwise_and(p1, WORD, out=c1)
        torch.bitwise_and(p0, WORD, out=c3)
        low, high = (low + STEPS[0]) & WORD, (high + STEPS[1]) & WORD
    return c0, c1, c2, c3


def lay_along(values: range, like: torch.Tensor, axis: int) -> torch.Tensor:
    """The numbers of a range as int64 along one of four axes, the others being 1."""
    flat = torch.arange(values.start, values.stop, device=like.device)
    return flat.reshape([-1 if a == axis else 1 for a in range(4)])


def keep_(
    keeps: torch.Tensor, rate: float, seed: int, offset: int, ranges: Sequence[range], H: int,
    six: Sequence[torch.Tensor], period: int = ALWAYS,
) -> torch.Tensor:  # fmt: skip
    """Fill the booleans `keeps` [b,h,i,4 * counters(j)]: whether dropout keeps a weight.

    Returns the view [b,h,i,j] of the keys of `ranges`. six: as for `random_words`.
    """
    b, h, i, j = ranges
    for word, drawn in enumerate(random_words(seed, offset, b, h, i, j, H, six, period)):
        torch.ge(drawn, threshold(rate), out=keeps[..., word::4])
    first = j.start - 4 * counters(j).start
    return keeps[..., first : first + len(j)]
