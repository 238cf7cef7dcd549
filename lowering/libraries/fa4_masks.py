"""Masks, copied operands and tiles in FlashAttention 4's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from attrs import frozen

from attn_graph.ir.storage.packed import LEAVES, LENGTHS, and_parts
from attn_graph.lowering.lying import SIDES, Lying
from attn_graph.lowering.problem import Problem, fits_loads, is_misaligned
from attn_graph.masks import Band, Mask
from attn_graph.masks.places import Place

Bounds = tuple[int | None, int | None]
STATISTICS = "lse", "dlse"  # which a gradient reads
COPIED = *"qkvo", *STATISTICS  # in this order
LEAST_SPLIT, MOST_SPLITS = 4, 128  # tiles of keys up to which nothing is split, and the most parts


@final
@frozen
class NativeMask:
    """A mask built into the kernels: a query keeps keys from `left` before to `right` after its
    place, counted from the bottom right corner; None: no bound.

    ends: the lengths given to kernels; the corner is at their ends.
    """

    left: int | None = None
    right: int | None = None
    ends: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:  # Any: of two types
        """As the package takes it."""
        if self.left is None and self.right == 0:
            return {"causal": True}
        return {"window_size_left": self.left, "window_size_right": self.right}


def native_mask(lying: Lying) -> NativeMask | None:
    """The mask as a native one; None for others.

    A query past its length sees its sink, but kernels given the length leave the sink out. A packed
    row outside all sequences sees none anyway.
    """
    p = lying.stepped
    ends = end_names(p)
    if "q_lengths" in ends and p.node.sinks and "rows" not in lying.sides:
        return None
    rest = [x for x in and_parts(p.node.mask) if x not in LEAVES.values()]
    bounds = read_band(rest, ends, lying.alike) if ends else read_strip(p)
    if bounds is None or any(x is not None and not 0 <= x < 2**31 for x in bounds):
        return None
    return NativeMask(*bounds, ends)


def end_names(problem: Problem) -> tuple[str, ...]:
    """The lengths in a problem's mask: rows and keys past them are absent."""
    parts = and_parts(problem.node.mask)
    return tuple(LENGTHS[side] for side, leaf in LEAVES.items() if leaf in parts)


def read_band(parts: Sequence[Mask], ends: tuple[str, ...], alike: bool) -> Bounds | None:
    """A query's left and right bound from the corner of its lengths. parts: the mask's other
    conjuncts; None if they are not one band along this corner. alike: True if a sequence has as
    many keys as queries, so that its corners are on one diagonal."""
    band = parts[0] if parts else Band(ragged=ends)
    if len(parts) > 1 or not isinstance(band, Band):
        return None
    if {*band.ragged} != {*ends} and not (alike and not band.ragged):
        return None
    return None if band.low is None else -band.low, band.high


def read_strip(problem: Problem) -> Bounds | None:
    """These bounds for a mask without lengths, from the corner of all queries and keys."""
    p, mask = problem, problem.node.mask
    if mask is None:
        return None, None
    strip = None if mask.needs else mask.strip(Place(0, 0, 0, 0, p.H, p.M, p.N))
    if strip is None or strip.keys is not None or strip.rows is not None:
        return None
    corner = p.N - p.M
    left = None if strip.low is None else corner - strip.low
    return left, None if strip.high is None else strip.high - corner


def zeroed_names(lying: Lying) -> tuple[str, ...]:
    """Operands copied with 0 in their absent rows: kernels multiply these by 0, and NaN would stay
    NaN. v; in a gradient q, k and v. Kernels read no absent row of a page."""
    p, hidden = lying.stepped, {*lying.pools, *(n for n in "qkv" if SIDES[n] in lying.full)}
    names, ends = "v" if p.grad is None else "qkv", end_names(p)
    return tuple(n for n in names if LENGTHS[SIDES[n]] in ends and n not in hidden)


def copied_names(lying: Lying) -> tuple[str, ...]:
    """The operands copied for a call: cleaned ones, and ones off 16 bytes, except pages. Of a
    gradient also o and statistics, if the package would copy them as they lie."""
    p = lying.stepped
    given = dict(zip("qkv", p.specs, strict=False)) | lying.in_place
    off = {name for name, x in given.items() if is_misaligned(x) and name not in lying.pools}
    if p.grad is not None:
        read = lying.saved | lying.large
        off |= {name for name in STATISTICS if name in read and not read[name].is_dense}
        off |= set() if fits_loads(read["o"]) else {"o"}
    cleaned = zeroed_names(lying)
    return tuple(name for name in COPIED if name in cleaned or name in off)


def copies(lying: Lying) -> tuple[str, ...]:
    """The operands copied by a call, do among them if rows may see no key."""
    grad = lying.stepped.grad
    clears = grad is not None and grad.with_do and lying.has_blind_rows
    return (*copied_names(lying), *["do"] * clears)


def forward_tile(sm: int, problem: Problem) -> tuple[int, int]:
    """Queries and keys of a tile of the forward's lists: interface.py, _get_fwd_config."""
    p = problem
    if sm // 10 == 9:
        wide = p.D > 128 and p.E > 128
        return 128, (80 if p.D > 192 else 112) if wide else 128 if p.D <= 192 else 80
    two = p.M * (p.H // p.G) > 128 and p.E != 256
    return 256 if two else 128, 128


def count_splits(lying: Lying, sm: int, processors: int) -> int:
    """How many programs share the keys of a head in a forward for sm_100, which a caller has to ask
    for: interface.py, num_splits_heuristic. Heads of a group are rows of one tile. Packed sequences
    have none, since another kernel would count the parts of each first."""
    p, native = lying.stepped, native_mask(lying)
    if p.grad is not None or sm // 10 not in (10, 11) or p.D != p.E or lying.sides:
        return 1
    rows, keys = forward_tile(sm, p)
    seen = p.N
    if native is not None and native.left is not None:
        seen = min(seen, native.left + (p.N if native.right is None else native.right) + 1 + rows)
    tiles, programs = -(-seen // keys), p.B * p.G * -(-p.M * (p.H // p.G) // rows)
    return 1 if tiles <= LEAST_SPLIT else max(1, min(processors // programs, MOST_SPLITS, tiles))
