"""PyTorch's flash kernel for GPUs, on tensors with a layout of their own each and on packed ones.

On packed tensors it is the kernel of torch.nn.attention.varlen.varlen_attn. Limits are from PyTorch
2.13: from this function, its callees, and the kernel, FlashAttention 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import nan
from typing import final

import torch
from attrs import Factory, field, frozen

from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.packed import LEAVES, STARTS, and_parts
from attn_graph.kernels import fused_cuda
from attn_graph.kernels.fused_cuda import SequencePlaces
from attn_graph.lowering.backend import Backend, Executable
from attn_graph.lowering.libraries.forecast import forecast
from attn_graph.lowering.lying import DECLARED, Lying, copy_cleared, rows_outside
from attn_graph.lowering.problem import Facts, on_boundary, read_operands, select_outputs
from attn_graph.lowering.reasons import (
    feature_reasons,
    modifier_reasons,
    no_elements,
    no_gpu,
    other_gradients,
    scale_reasons,
)
from attn_graph.lowering.request import Request
from attn_graph.lowering.through_lse import through_lse
from attn_graph.lowering.torch_cuda.dense import (
    FLASH_KERNEL,
    Tensors,
    check_aligned,
    flash_reasons,
    kernel_operand_reasons,
    kernel_size_reasons,
    place_reasons,
    replaced_reasons,
)
from attn_graph.machine.sizes import format_bytes
from attn_graph.masks.leaves import Band
from attn_graph.spec import INF, NAMES, TensorSpec

RAGGED = ("kv_lengths", "q_lengths")  # of a Band aligned bottom right in each sequence
MARKS = 16  # bytes a row, of its number and of whether it belongs to a sequence
ROUNDED = 128  # rows of a sequence, in sums of the backward
Window = tuple[int, int]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Reasons = Iterator[Reason]


def why_not(request: Request) -> Reasons:
    lying = flash_lying(request.facts)
    if lying is None:
        yield from FLASH_KERNEL.why_not(request)
    else:
        yield from dict.fromkeys(packed_reasons(lying, request))


def lower(request: Request) -> Executable:
    """One call of the kernel, or of its backward."""
    lying = flash_lying(request.facts)
    if lying is None:
        return FLASH_KERNEL.lower(request)
    call = PackedFlashRun(lying, request.graph)
    if lying.problem.grad is None:
        return Executable(call.forward, 0, call.kept_forward(), tuple(call.notes()))
    return Executable(call.backward, 0, call.kept_backward(), tuple(call.notes()))


def flash_lying(facts: Facts) -> Lying | None:
    """How the operands of a graph on packed tensors lie; None of other graphs, and of pages."""
    lying = facts.once(Lying.of)
    if lying is None or lying.scales or lying.pages is not None:
        return None
    return lying if lying.sides else None


def packed_reasons(lying: Lying, request: Request) -> Reasons:
    """Every reason against packed tensors, some perhaps twice."""
    p = lying.problem
    yield from place_reasons(FLASH_KERNEL, request)
    yield from modifier_reasons(p.node, ())
    if p.node.mask is not None and window_of(lying) is None:
        limit = "supports Causal() or a window around it, bottom right in each sequence"
        yield Reason("window", limit, f"the mask is {p.node.mask.written()}")
    yield from feature_reasons(p)
    yield from scale_reasons(p)
    yield from kernel_size_reasons(FLASH_KERNEL, p)
    yield from no_elements(p, lying.totals)
    yield from kernel_operand_reasons(dict(zip("qkv", lying.specs, strict=False)))
    yield from sequence_reasons(lying)
    yield from flash_reasons(p, request)
    yield from replaced_reasons(request.options.switches.flash_impl)
    yield from other_gradients(p)


def sequence_reasons(lying: Lying) -> Reasons:
    """Reasons against the places of sequences."""
    for side, name in STARTS.items():
        if side not in lying.sides:
            yield Reason("both_packed", "needs q, k and v packed", f"{name} is not given")
    for side in lying.sides:
        if side not in lying.gapless:
            limit = "has no gaps between sequences: starts say their lengths"
            actual = f"{STARTS[side]} and lengths are given apart"
            yield Reason(f"gaps.{side}", limit, actual, "{limit}, and {actual}")
    for name, spec in lying.tables.items():
        if spec.dtype != torch.int32 or spec.strides != (1,):
            limit = f"reads starts in {NAMES[torch.int32]}, side by side"
            yield Reason(f"starts.{name}", limit, f"{name} is {spec}")


def window_of(lying: Lying) -> Window | None:
    """The window of the mask; None for other masks. With equal lengths of q and k, top left is
    bottom right."""
    match [x for x in and_parts(lying.problem.node.mask) if x not in LEAVES.values()]:
        case []:
            return -1, -1
        case [Band(low=low, high=high, ragged=ragged)]:
            left, right = (None if low is None else -low), high
            aligned = ragged == RAGGED or (not ragged and lying.alike)
            if aligned and all(n is None or n >= 0 for n in (left, right)):
                return (-1 if left is None else left), (-1 if right is None else right)
    return None


@final
@frozen(eq=False)
class PackedFlashRun:
    """Runs a graph. Inside, tensors are [T,H,D] and statistics [H,T]."""

    lying: Lying
    graph: Graph
    window: Window = field(
        init=False, default=Factory(lambda call: known_window(call), takes_self=True)
    )

    def sequences(self, starts: Tensors) -> SequencePlaces:
        """The kernel's arguments besides q, k and v."""
        (rows, keys), most = starts, self.lying.most
        return SequencePlaces((rows, keys), (most["rows"], most["keys"]), self.window)

    def operands(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The last equation's. The kernel reads starts, and no lengths."""
        return read_operands(self.graph, tensors, lengths=False)

    def forward(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The outputs of the forward kernel, and o and lse for the backward."""
        every, count = self.operands(tensors), len(self.lying.problem.node.ranks)
        q, k, v = every[:3]
        check_aligned(dict(zip("qkv", (q, k, v), strict=True)))
        o, lse = self.attend(q, k, v, self.sequences(every[count:]))
        due = self.lying.o()
        if TensorSpec.like(o) != due:
            o = torch.empty_strided(due.shape, due.strides, dtype=o.dtype, device=o.device).copy_(o)
        return [o if name == "o" else lse for name in self.graph.result_names], (o, lse)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: SequencePlaces
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o, 0 in rows outside sequences, and lse, -inf there and in rows without keys."""
        o, lse = fused_cuda.packed_forward(q, k, v, sequences, self.lying.problem.node.scale)
        if self.lying.sees_itself:
            return o, lse
        if "rows" not in self.lying.full:
            nobody = rows_outside(sequences.starts[0], None, len(q))
            o.masked_fill_(nobody[:, None, None], 0.0)
            lse.masked_fill_(nobody, -INF)
        return o, lse.nan_to_num_(nan, posinf=-INF, neginf=-INF)

    def pull(
        self, do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor, sequences: SequencePlaces,
    ) -> Gradients:  # fmt: skip
        """dq, dk and dv, 0 in rows of no sequence. lse: as `attend` gives it."""
        scale = self.lying.problem.node.scale
        unseen = lse if self.lying.sees_itself else lse.nan_to_num(nan, posinf=INF, neginf=INF)
        made = fused_cuda.packed_backward(do, q, k, v, o, unseen, sequences, scale)
        rows, keys = sequences.starts
        pairs = [*zip((rows, keys, keys), map(len, made), strict=True)]
        sides = zip(("rows", "keys", "keys"), made, pairs, strict=True)
        left = [(x, *pair) for side, x, pair in sides if side not in self.lying.full]
        each = {(id(starts), T): (starts, T) for _, starts, T in left}  # both may be one tensor
        nobody = {name: rows_outside(x, None, T) for name, (x, T) in each.items()}
        for x, starts, T in left:
            x.masked_fill_(nobody[id(starts), T][:, None, None], 0.0)
        return made

    def backward(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The gradients of the backward kernel, in the order of the outputs."""
        node, grad = self.lying.problem.node, self.lying.problem.grad
        assert grad is not None
        every, count = self.operands(tensors), len(grad.ranks)
        read, sequences = grad.split(every[:count]), self.sequences(every[count:])
        q, k, v = map(on_boundary, read.own[:3])
        lse = read.lse.contiguous()
        blind = None if self.lying.sees_itself else read.lse == -INF
        do = torch.zeros_like(read.o) if read.do is None else read.do
        if blind is not None:
            do = copy_cleared(do, blind.t()[..., None], torch.empty_like(read.o))
        do = on_boundary(do)
        made = list(self.pull(do, q, k, v, on_boundary(read.o), lse, sequences))
        if read.dlse is not None:
            attend = partial(self.attend_heads, sequences)
            pull = partial(self.pull_heads, sequences)
            dlse = read.dlse if blind is None else read.dlse.masked_fill(blind, 0.0)
            dq, dk = through_lse(attend, pull, by_heads(q), by_heads(k), lse, dlse, node.scale)
            made[0].add_(by_heads(dq))
            made[1].add_(by_heads(dk))
        wanted = [x for x, w in zip(made, grad.wants, strict=False) if w]
        return select_outputs(self.graph, wanted), ()

    def attend_heads(
        self, sequences: SequencePlaces, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`attend` of tensors [H,T,D]."""
        o, lse = self.attend(by_heads(q), by_heads(k), by_heads(v), sequences)
        return by_heads(o), lse

    def pull_heads(
        self, sequences: SequencePlaces, do: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    ) -> Gradients:  # fmt: skip
        """`pull` of tensors [H,T,D]."""
        do, q, k, v, o = map(by_heads, (do, q, k, v, o))
        dq, dk, dv = self.pull(do, q, k, v, o, lse, sequences)
        return by_heads(dq), by_heads(dk), by_heads(dv)

    def notes(self) -> Iterator[str]:
        yield "one call of PyTorch's flash kernel on packed tensors, as of varlen_attn"
        if len(self.lying.full) < len(self.lying.sides):
            yield DECLARED
        grad = self.lying.problem.grad
        if grad is not None and grad.with_dlse:
            yield "the gradient through lse by one more call of each pass, with k in place of v"
        if grad is not None and grad.with_do and not self.lying.sees_itself:
            size = format_bytes(self.lying.specs[0].type.bytes)
            yield f"do is copied, {size}, with 0 in rows that see nothing"
        if grad is not None and not (o := self.lying.saved["o"]).is_dense:
            yield f"o {o} is copied: the kernel's rows have no gaps"

    def kept_forward(self) -> int:
        """Bytes allocated by PyTorch beside the outputs, at most: o in another order, lse, and
        marks of rows outside sequences."""
        q = self.lying.specs[0]
        T, H, _ = q.shape
        marks = 0 if "rows" in self.lying.full else MARKS * T
        return q.type.bytes + T * 4 * H + marks

    def kept_backward(self) -> int:
        """Bytes allocated by PyTorch beside the gradients, at most: sums in float32, gradients of
        every query head, do, and o and gradients of k in place of v."""
        p, grad = self.lying.problem, self.lying.problem.grad
        assert grad is not None
        q, k = self.lying.specs[:2]
        T, H, D = q.shape
        width = -(-D // 32) * 32
        sums = 4 * (T + ROUNDED * p.B) * H * (width + 1)
        heads = 2 * k.shape[0] * H * D * q.dtype.itemsize * (p.H > p.G)
        rows = T * 4 * H + 2 * q.type.bytes
        rows += 0 if self.lying.sees_itself else T * 5 * H
        rows += sum(
            MARKS * n for side, n in self.lying.totals.items() if side not in self.lying.full
        )
        more = (4 * q.type.bytes + 3 * k.type.bytes) * grad.with_dlse
        return (sums + heads) * (1 + grad.with_dlse) + rows + more


def known_window(call: PackedFlashRun) -> Window:
    window = window_of(call.lying)
    assert window is not None
    return window


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T,H,D] as [H,T,D], or the reverse."""
    return x.transpose(0, 1)


BACKEND = Backend(
    "torch_flash",
    why_not,
    lower,
    real=True,
    price=partial(forecast, name="torch_flash"),
    no_device=no_gpu,
)
