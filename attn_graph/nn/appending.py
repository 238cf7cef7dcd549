"""Appends rows of keys and values to pages of a cache, rotated, and rounded to a cache in 8 bits.

On NVIDIA GPUs one kernel of Triton does it and reads nothing on the host; on CPUs a few operations
of PyTorch, after a check of the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.compiler import is_dynamo_compiling

from attn_graph.errors import GraphError, PlanMismatchError, TensorError, binds, show
from attn_graph.ir.storage.packing import list_sequences
from attn_graph.ir.storage.scaling import neighbours, scales_fit, spread, to_eight
from attn_graph.machine.ambient import has_tangent, is_traced
from attn_graph.machine.imports import load_modules
from attn_graph.nn.ops import KINDS, LIBRARY, NAME
from attn_graph.spec import FLOATS, INTEGERS, QUANTISED, accumulator

Scale = Tensor | float | None
FORM = "[T,G,D] with q_starts or slot_mapping, else [B,G,M,D]"


@binds()
def append_to_pages(
    k: Tensor,
    v: Tensor | None,
    pool_k: Tensor,
    pool_v: Tensor | None,
    pages: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    *,
    q_starts: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    q: Tensor | None = None,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Tensor | None:
    """Write new rows of keys and values to their places in a paged cache, in place; q, rotated.

    k [B,G,M,D] and v [B,G,M,E] go to the pools [n,P,G,D] and [n,P,G,E], of any strides, halves of
    one cache included. pages [B,count] and kv_lengths [B] are equal to those of the attention that
    follows: lengths count the new rows, the last of their sequence. With q_starts [B+1] rows are
    packed, k [T,G,D] and v [T,G,E]; rows of no sequence are not written. With slot_mapping [T] in
    place of pages and lengths, row t goes to row slot_mapping[t] of all pages in order, page
    slot // P; a negative slot is not written. v and pool_v may both be None, for values within
    keys. No two rows may have one place.

    cos and sin [positions,R/2] rotate the first R elements of each row of k, and of q [B,H,M,D] or
    [T,H,D], by the row's position: its place in the sequence, or positions [rows], required with
    slot_mapping. Element d turns with d + R/2, as in Llama; with interleaved=True, 2d turns with
    2d + 1, as in GPT-J. Computed in float32 (float64 for float64), rounded once. q is returned
    rotated, 0 in rows without a place; without q the result is None.

    A pool in 8 bits holds x / scale, to nearest, and no larger than its largest. k_scale and
    v_scale are as in `attention`: float32 with the axes of the pool, each a divisor; or a number. A
    scale for each row or block has to hold its number before the call.

    Raises TensorError for tensors of sizes or dtypes that disagree, GraphError if one needs a
    gradient or under a transform of torch.func, and on CPUs PlanMismatchError for places outside of
    the pools, before anything is written. GPUs read nothing on the host, and skip such rows.
    """
    packed = q_starts is not None or slot_mapping is not None
    tensors = (k, v, pool_k, pool_v, q, pages, kv_lengths, q_starts, slot_mapping, positions)
    problem = next(append_problems(tensors, (cos, sin), (k_scale, v_scale), packed), None)
    if problem:
        raise TensorError(f"append_to_pages: {problem}")
    given = [x for x in tensors[:5] if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise GraphError("append_to_pages has no gradient; call it under torch.no_grad()")
    if not is_dynamo_compiling() and (_are_functorch_transforms_active() or has_tangent(given)):
        raise GraphError(
            "append_to_pages writes to its pools, which no transform of torch.func can follow; "
            "call it outside of them: its rows have an axis of sequences"
        )
    held = [x if isinstance(x, Tensor) else None for x in (k_scale, v_scale)]
    numbers = [1.0 if x is None or isinstance(x, Tensor) else x for x in (k_scale, v_scale)]
    traced = is_dynamo_compiling() or is_traced()
    through: Any = torch.ops.attn_graph.append_to_pages if traced else run
    rotated: Tensor = through(*tensors, cos, sin, *held, *numbers, interleaved)
    return None if q is None else rotated


def append_problems(
    tensors: Sequence[Tensor | None],
    turns: tuple[Tensor | None, Tensor | None],
    scales: tuple[Scale, Scale],
    packed: bool,
) -> Iterator[str]:
    """Why tensors do not fit, a sentence each."""
    k, v, pool_k, pool_v, q, pages, lengths, starts, slots, positions = tensors
    assert k is not None and pool_k is not None  # noqa: PT018  # both have no default
    axes = 4 - packed
    rows = (*k.shape[:1], *k.shape[2:3]) if not packed else k.shape[:1]
    yield from row_problems("k", k, k, pool_k, axes)
    if (v is None) != (pool_v is None):
        yield "v and pool_v go together; pass both, or None for both if values lie within keys"
    if v is not None and pool_v is not None:
        yield from row_problems("v", v, k, pool_v, axes)
        if pool_v.shape[:3] != pool_k.shape[:3]:
            yield f"pool_v {[*pool_v.shape]} and pool_k {[*pool_k.shape]} differ in pages or heads"
    if q is not None and (q.ndim != axes or q.shape[-1] != k.shape[-1] or q.dtype != k.dtype):
        yield f"q {q.dtype} {[*q.shape]} and k {k.dtype} {[*k.shape]} do not fit; both are {FORM}"
    elif q is not None and (len(q) != len(k) or (not packed and q.shape[2] != k.shape[2])):
        yield f"q {[*q.shape]} and k {[*k.shape]} have different rows"
    yield from place_problems(k, pages, lengths, starts, slots)
    integers = (pages, lengths, starts, slots, positions)
    names = ("pages", "kv_lengths", "q_starts", "slot_mapping", "positions")
    for name, x in zip(names, integers, strict=True):
        if x is not None and x.dtype not in INTEGERS:
            yield f"{name} is {x.dtype}; it must be torch.int32 or torch.int64"
    count = rows[0] * (1 if packed else rows[1])
    if positions is not None and positions.shape != (count,):
        yield f"positions {[*positions.shape]} must have one of each row, [{count}]"
    yield from turn_problems(k, turns, slots is not None and positions is None)
    for name, scale, pool in (("k", scales[0], pool_k), ("v", scales[1], pool_v)):
        yield from pool_scale_problems(name, scale, pool)


def row_problems(name: str, x: Tensor, k: Tensor, pool: Tensor, axes: int) -> Iterator[str]:
    """Why new rows do not fit their pool."""
    if x.ndim != axes or pool.ndim != 4:
        rows = x.ndim == 3 and axes == 4
        edit = f"; write {name}[:, :, None] for one row of each sequence" * rows
        own = f", and pool_{name} {[*pool.shape]} [n,P,G,D]" * (not rows or pool.ndim != 4)
        yield f"{name} {[*x.shape]} must be {FORM}{own}{edit}"
    elif x.shape[:-1] != k.shape[:-1]:
        yield f"{name} {[*x.shape]} and k {[*k.shape]} differ in heads or rows"
    elif (x.shape[1], x.shape[-1]) != (*pool.shape[2:],):
        yield f"{name} {[*x.shape]} and pool_{name} {[*pool.shape]} differ in heads or head size"
    elif x.dtype not in FLOATS or pool.dtype not in (*FLOATS, *QUANTISED):
        yield f"{name} is {x.dtype} and pool_{name} {pool.dtype}; new rows must be floats"
    elif not pool.shape[1]:
        yield f"pool_{name} {[*pool.shape]} has pages of 0 rows"


def place_problems(
    k: Tensor, pages: Tensor | None, lengths: Tensor | None, starts: Tensor | None,
    slots: Tensor | None,
) -> Iterator[str]:  # fmt: skip
    """Why the places of new rows do not fit."""
    if slots is not None:
        if pages is not None or lengths is not None or starts is not None:
            yield "slot_mapping takes the place of pages, kv_lengths and q_starts; leave these out"
        if slots.shape != (k.shape[0],):
            yield f"slot_mapping {[*slots.shape]} must have one slot of each row, [{k.shape[0]}]"
        return
    if pages is None or lengths is None:
        yield "pass pages= and kv_lengths=, or slot_mapping= with a slot for each row"
        return
    B = k.shape[0] if starts is None else starts.shape[0] - 1
    if pages.ndim != 2 or lengths.shape != (B,) or pages.shape[0] != B:
        yield (
            f"pages {[*pages.shape]} and kv_lengths {[*lengths.shape]} must be [{B},count] and "
            f"[{B}], for {B} sequences"
        )


def turn_problems(
    k: Tensor, turns: tuple[Tensor | None, Tensor | None], nameless: bool
) -> Iterator[str]:
    """Why the tables of a rotation do not fit. nameless: rows without positions."""
    cos, sin = turns
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        yield "cos and sin go together; pass both"
        return
    if cos.ndim != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= k.shape[-1]:
        yield (
            f"cos {[*cos.shape]} and sin {[*sin.shape]} must be [positions,R/2], R at most "
            f"{k.shape[-1]}; of tables [positions,R] that repeat pass the half that they repeat"
        )
    if nameless:
        yield "slot_mapping does not tell positions, which cos and sin need; pass positions="


def pool_scale_problems(name: str, scale: Scale, pool: Tensor | None) -> Iterator[str]:
    """Why a scale does not fit its pool."""
    quantised = pool is not None and pool.dtype in QUANTISED
    if quantised != (scale is not None):
        kind = "none" if pool is None else pool.dtype
        edit = f"pass {name}_scale=" if quantised else f"leave {name}_scale out"
        yield f"pool_{name} is {kind} and {name}_scale {show(scale)}; {edit}"
    elif (
        isinstance(scale, Tensor)
        and pool is not None
        and (scale.dtype != torch.float32 or not scales_fit((*scale.shape,), (*pool.shape,)))
    ):
        yield (
            f"{name}_scale {scale.dtype} {[*scale.shape]} must be torch.float32 with the axes of "
            f"pool_{name} {[*pool.shape]}, each a divisor of its own"
        )


def run(
    k: Tensor, v: Tensor | None, pool_k: Tensor, pool_v: Tensor | None, q: Tensor | None,
    pages: Tensor | None, kv_lengths: Tensor | None, q_starts: Tensor | None,
    slot_mapping: Tensor | None, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, k_number: float, v_number: float,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """The operator: writes, and q rotated, or a tensor without elements."""
    rotated = k.new_empty(0) if q is None else torch.empty_like(q)
    if not k.numel():
        return rotated
    packed = k.ndim == 3
    rows = [  # before heads: views [B,M,G,D], or [1,T,G,D] of packed ones
        None if x is None else x[None] if packed else x.transpose(1, 2)
        for x in (k, v, q, None if q is None else rotated)
    ]
    scales = (k_number if k_scale is None else k_scale, v_number if v_scale is None else v_scale)
    places = (pages, kv_lengths, q_starts, slot_mapping, positions)
    write = write_on_host if k.is_cpu else load_modules("attn_graph.kernels.appending").launch
    write(rows, (pool_k, pool_v), places, (cos, sin, interleaved), scales)
    return rotated


def write_on_host(
    rows: Sequence[Tensor | None],
    pools: tuple[Tensor, Tensor | None],
    places: Sequence[Tensor | None],
    turns: tuple[Tensor | None, Tensor | None, bool],
    scales: tuple[Tensor | float, Tensor | float],
) -> None:
    """As the kernel's `launch`, by PyTorch's operations. Checks the places before it writes."""
    k, v, q, out = rows
    assert k is not None
    (n, P), (B, M) = pools[0].shape[:2], k.shape[:2]
    slots, at = slots_of_rows(n, P, B, M, places)
    kept = None if int(slots.min()) >= 0 else (slots >= 0).nonzero().flatten()
    if kept is not None:
        slots, at = slots[kept], at[kept]
    page, line = slots // P, slots % P
    turn = None
    if turns[0] is not None and turns[1] is not None:
        most = len(turns[0])
        if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < most:
            raise PlanMismatchError(
                f"positions: from {int(at.min())} to {int(at.max())}, and cos and sin have {most}",
                way_out="pass longer tables",
            )
        turn = turns[0][at], turns[1][at], turns[2]
    for x, pool, scale, turned in ((k, pools[0], scales[0], turn), (v, pools[1], scales[1], None)):
        if x is None or pool is None:
            continue
        write_rows(pool, (page, line), rotate(flat_rows(x, kept), turned), scale)
    if q is not None and out is not None:
        result = rotate(flat_rows(q, kept), turn).to(q.dtype)
        if kept is None:
            out.copy_(result.view(out.shape))
        else:
            out.zero_()[kept // M, kept % M] = result


def write_rows(
    pool: Tensor, cells: tuple[Tensor, Tensor], x: Tensor, scale: Tensor | float
) -> None:
    """Write x [T,G,D] to a pool [n,P,G,D]; to one in 8 bits x / scale, to nearest and within its
    range. cells: the page of each row, and its line there."""
    if pool.dtype in QUANTISED:
        own = scale
        if isinstance(scale, Tensor) and scale.ndim:  # not one number for all rows
            blocks = map(neighbours, pool.shape[:2], scale.shape)
            own = scale[tuple(at // n for at, n in zip(cells, blocks, strict=True))]
            own = spread(own, (len(x), *pool.shape[2:]))
        x = to_eight(x.to(accumulator(x.dtype)) / own, pool.dtype).view(torch.uint8)
        pool = pool.view(torch.uint8)  # PyTorch has no index_put of float8
    pool.index_put_(cells, x.to(pool.dtype))


def flat_rows(x: Tensor, kept: Tensor | None) -> Tensor:
    """Some rows, or all, of x [B,M,G,D], in one axis: [rows,G,D]."""
    flat = x.flatten(0, 1)
    return flat if kept is None else flat[kept]


def rotate(x: Tensor, turn: tuple[Tensor, Tensor, bool] | None) -> Tensor:
    """x [rows,G,D] with pairs of elements rotated, in float32 or wider; unchanged without `turn`:
    cos and sin [rows,R/2], and whether pairs are neighbours."""
    if turn is None:
        return x
    wide = accumulator(x.dtype)
    cos, sin = (t.to(wide)[:, None] for t in turn[:2])
    half = cos.shape[-1]
    x = x.to(wide)
    if turn[2]:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    both = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(both, -1).flatten(-2) if turn[2] else torch.cat(both, -1)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], -1)


def slots_of_rows(
    n: int, P: int, B: int, M: int, places: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """The slot of each row, -1 without one, and its position. Raises PlanMismatchError for places
    outside of the pools."""
    pages, lengths, starts, slots, positions = places
    if slots is not None:
        slots = slots.long()
        if int(slots.max()) >= n * P:
            raise PlanMismatchError(
                f"slot_mapping: row {int(slots.argmax())} has slot {int(slots.max())}, of {n * P} "
                f"slots, {n} pages of {P} rows",
                way_out="give slots of the pool, or a negative one for rows that are not written",
            )
        return slots, slots if positions is None else positions.long()
    assert pages is not None and lengths is not None  # noqa: PT018  # checked before
    starts = torch.arange(0, B * M + 1, M) if starts is None else starts
    entry, at = packed_places(lengths, starts, B * M)
    room = pages.shape[1] * P
    there = entry >= 0
    if wrong := first_row(there & ((at < 0) | (at >= room))):
        b = int(entry[wrong - 1])
        raise PlanMismatchError(
            f"kv_lengths: entry {b} has {int(lengths[b])}, and its new rows would be at position "
            f"{int(at[wrong - 1])}, of {room} in its pages",
            way_out="count the new rows in kv_lengths, and give a table of enough pages",
        )
    entry, inside = entry.clamp(min=0), at.clamp(0, max(room - 1, 0))
    page = pages[entry, inside // P].long() if room else entry
    if wrong := first_row(there & ((page < 0) | (page >= n))):
        raise PlanMismatchError(
            f"pages: entry {int(entry[wrong - 1])} has page {int(page[wrong - 1])} at position "
            f"{int(at[wrong - 1])}, of a pool of {n}",
            way_out="put the pages of new rows into the table before the call",
        )
    return torch.where(there, page * P + inside % P, -1), at if positions is None else positions


def first_row(wrong: Tensor) -> int:
    """The number of the first wrong row, from 1 on; 0 without one."""
    return int(wrong.int().argmax()) + 1 if bool(wrong.any()) else 0


def packed_places(lengths: Tensor, starts: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """The entry, -1 without one, and the position of each of T packed rows."""
    counts = starts.diff()
    list_sequences(starts, counts, T, T, "q")
    row, starts = torch.arange(T), starts.long()
    entry = torch.searchsorted(starts, row, right=True) - 1
    entry = torch.where(entry < len(counts), entry, -1)
    own = entry.clamp(min=0)
    return entry, lengths.long()[own] - counts[own] + row - starts[own]


def fake(
    k: Tensor, v: object, pool_k: object, pool_v: object, q: Tensor | None, *_: object
) -> Tensor:
    """The result for fake tensors."""
    return k.new_empty(0) if q is None else torch.empty_like(q)


SCHEMA = (
    "(Tensor k, Tensor? v, Tensor(a!) pool_k, Tensor(b!)? pool_v, Tensor? q, Tensor? pages, "
    "Tensor? kv_lengths, Tensor? q_starts, Tensor? slot_mapping, Tensor? positions, Tensor? cos, "
    "Tensor? sin, Tensor? k_scale, Tensor? v_scale, float k_number, float v_number, "
    "bool interleaved) -> Tensor"
)
LIBRARY.define(f"append_to_pages{SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
for kind in KINDS:
    LIBRARY.impl("append_to_pages", run, kind.upper())
torch.library.register_fake(f"{NAME}::append_to_pages", fake, lib=LIBRARY)
