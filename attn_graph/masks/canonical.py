"""One form for equal masks where equality is easy to see, so that they share a plan."""

from __future__ import annotations

from typing import TypeGuard

from attn_graph.machine.cache import remember
from attn_graph.masks.joins import And, Join, Mask, Not, Or, join_masks
from attn_graph.masks.leaves import LEAVES, LENGTHS, Band, KeyLengths, QueryLengths, ragged_in
from attn_graph.masks.places import Block, tighter
from attn_graph.spec.dims import are_numbers, dims_in, surely_least

EVERYTHING = Band()
CAUSAL = Band(None, 0)  # from the top left corner, as fused kernels know it


@remember  # a graph is checked by it, and simplified
def canonical_mask(mask: Mask, M: int, N: int) -> Mask | None:
    """The mask in one form; None if every query keeps every key.

    Alignments become offsets, bands joined by `&` one band, and parts are sorted. Without queries
    or keys the mask is simplified as for one, so that it keeps the lengths of packed sides. Raises
    GraphError for a missing alignment.
    """
    resolved = mask.resolved(M, N, ragged_in(mask.needs))
    simple = simplify_mask(resolved, *(1 if n == 0 else n for n in (M, N)))
    return None if simple == EVERYTHING else simple


def simplify_mask(mask: Mask, M: int, N: int) -> Mask:
    """An equal mask: EVERYTHING if it keeps every place, else with flat joins."""
    simple = simplify_parts(mask, M, N)
    return EVERYTHING if keeps_everything(simple, M, N) else simple


def keeps_everything(mask: Mask, M: int, N: int) -> bool:
    """True if a mask surely keeps every place, in all batch entries and heads.

    One entry and one head stand for all, as in the library's leaves; a user's leaf may differ, so
    it counts as unknown. Dims count as their largest size, which covers smaller ones too unless the
    bounds of the mask move with them.
    """
    if next(dims_in(mask), None) is not None:
        return False
    everywhere = Block(range(1), range(1), range(M), 1, M, N)
    return is_ours(mask) and mask.surely(everywhere).covers(0, N)


def is_ours(mask: Mask) -> bool:
    """True if all leaves of a mask are the library's."""
    return all(map(is_ours, mask.parts)) if isinstance(mask, Join) else type(mask) in LEAVES


def simplify_parts(mask: Mask, M: int, N: int) -> Mask:
    """Simplify the parts of a mask. The result may keep every place, not yet EVERYTHING."""
    match mask:
        case Band(low, high, ()):
            return trim_band(low, high, M, N)
        case Band(None, 0, ("kv_lengths",)) if M == 1:  # the one query is the last of its keys
            return KeyLengths()
        case Not(a):
            inner = simplify_mask(a, M, N)
            return inner.a if isinstance(inner, Not) else Not(inner)
        case And() | Or():
            parts = sorted(dict.fromkeys(simplified_parts(mask, type(mask), M, N)), key=str)
            if isinstance(mask, And):
                parts = intersect_bands(end_at_keys(parts) if M == 1 else parts)
            return join_masks(type(mask), parts)
        case _:
            return mask


def end_at_keys(parts: list[Mask]) -> list[Mask]:
    """The parts of an And for one query, which is the last of its keys or of no sequence."""
    last = Band(None, 0, LENGTHS)
    known = QueryLengths() in parts
    replaced = (KeyLengths() if known and part == last else part for part in parts)
    return [*dict.fromkeys(replaced)]


def trim_band(low: int | None, high: int | None, M: int, N: int) -> Band:
    """A band without the bounds outside -M < j - i < N.

    A bound that excludes every place becomes the nearest such bound, so that it fits into int64.
    With Dims a bound goes only if it has no effect for any size.
    """
    if not are_numbers(M, N, low or 0, high or 0):
        return Band(
            None if low is None or surely_least(1 - M - low) >= 0 else low,
            None if high is None or surely_least(high - N + 1) >= 0 else high,
        )
    return Band(
        None if low is None or low <= 1 - M else min(low, N),
        None if high is None or high >= N - 1 else max(high, -M),
    )


def simplified_parts(mask: Mask, join: type[Join], M: int, N: int) -> list[Mask]:
    if isinstance(mask, join):
        return [leaf for part in mask.parts for leaf in simplified_parts(part, join, M, N)]
    simple = simplify_mask(mask, M, N)
    return simplified_parts(simple, join, M, N) if isinstance(simple, join) else [simple]


def intersect_bands(parts: list[Mask]) -> list[Mask]:
    """The parts of an And, with one band for each `ragged`.

    Bands that move with Dims stay apart: the sizes decide which is tighter.
    """
    bands: dict[tuple[str, ...], Band] = {}
    for part in parts:
        if is_fixed_band(part):
            other = bands.get(part.ragged, part)
            low = tighter(max, part.low, other.low)
            bands[part.ragged] = Band(low, tighter(min, part.high, other.high), part.ragged)
    rest = [part for part in parts if not is_fixed_band(part)]
    bounded = [part for part in (*bands.values(), *rest) if part != EVERYTHING]
    return sorted(bounded, key=str) or [EVERYTHING]


def is_fixed_band(mask: Mask) -> TypeGuard[Band]:
    return isinstance(mask, Band) and are_numbers(mask.low or 0, mask.high or 0)
