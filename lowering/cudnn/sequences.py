"""Packed tensors and paged caches in cuDNN's terms: padded shapes, and starts of sequences.

cuDNN sees a packed tensor [T,H,D] as [B,H,M,D], with the first element of each batch entry: T is
not a part of the call, so one plan serves batches of any number of rows. It sees a pool of pages
[n,P,G,D] as [n,G,P,D], with the table.
"""

from __future__ import annotations

import torch
from attrs import evolve

from attn_graph.ir.storage.packed import STARTS
from attn_graph.lowering.cudnn.graph import CudnnCall, Slot, slot
from attn_graph.lowering.lying import SIDES, Lying
from attn_graph.spec import TensorSpec, dense_strides

LEAST_STEP = 64  # rows: the grain of planned totals of backwards
GRAIN = 4  # bits of a planned total: it exceeds the number of rows by an eighth at most
TOTALS = {"rows": "max_total_seq_len_q", "keys": "max_total_seq_len_kv"}
TABLES = ("paged_attention_k_table", "paged_attention_v_table")  # one tensor


# The call


def pack_call(call: CudnnCall, lying: Lying) -> CudnnCall:
    """The call on packed tensors and pages, of the same on padded ones."""
    own = tuple(pack_slot(x, lying, dense=x.source in lying.copied) for x in call.inputs)
    outputs = tuple(pack_slot(x, lying, dense=True) for x in call.outputs)
    packed = (x for x in (*own, *outputs) if x.offsets)
    starts = dict.fromkeys(start_slot(x, lying) for x in packed)
    bounds = {TOTALS[side]: round_total(T) for side, T in lying.totals.items()}
    options = call.options + (tuple(bounds.items()) if call.name == "sdpa_backward" else ())
    tables: tuple[Slot, ...] = ()
    if lying.pages is not None:
        B, pages = lying.pages.shape
        shape, strides = (B, 1, pages, 1), dense_strides((B, 1, pages, 1))
        tables = tuple(Slot(x, "pages", shape, strides, torch.int32) for x in TABLES)
        options += (("paged_attention_max_seq_len_kv", pages * lying.page),)
    return CudnnCall(call.name, (*own, *starts, *tables), outputs, options)


def pack_slot(x: Slot, lying: Lying, *, dense: bool) -> Slot:
    """A packed slot [B,H,M,D] with the offsets of its sequences, or [n,G,P,D] of a pool; any other
    unchanged.

    dense: True for copies and results of the call: [T,H,D] without gaps. lse is [T,H].
    """
    if x.source in lying.pools:
        pool = lying.pools[x.source]
        (n, P, G, D), (outer, row, head, last) = pool.shape, pool.strides
        return slot(
            x.argument, x.source, TensorSpec((n, G, P, D), pool.dtype, (outer, head, row, last))
        )
    side = SIDES.get(x.source, "")
    if side not in lying.totals:
        return x
    _, H, M, D = x.shape
    row, head, last = H * D, D, 1
    if not dense and x.source != "lse":
        head, last = x.strides[1] if H > 1 else D, x.strides[3]
        row = x.strides[2] if M > 1 else max(x.strides[0], row)
    strides = (M * row, head, row, last)
    return evolve(x, strides=strides, offsets=f"{STARTS[side]}_{row}")


def start_slot(x: Slot, lying: Lying) -> Slot:
    """The offsets of a packed slot: the first element of each sequence, and the end of the last.

    cuDNN has no int64 kernel for them if only keys are packed.
    """
    source, step = STARTS[SIDES[x.source]], x.strides[2]
    shape, dtype = (x.shape[0] + 1, 1, 1, 1), torch.int32 if lying.T is None else torch.int64
    return Slot(x.offsets, source, shape, dense_strides(shape), dtype, step=step)


def round_total(T: int) -> int:
    """T, rounded up a little: cuDNN sizes the backward's workspace by it, and one plan serves all
    totals of equal rounding."""
    return round_up_to(T, max(LEAST_STEP, 1 << max(0, T.bit_length() - GRAIN)))


def round_up_to(n: int, step: int) -> int:
    return -(-n // step) * step
