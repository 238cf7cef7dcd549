"""Attentions with named sizes: planned for each size on its first call.

Results independent of sizes are computed once, when the executable is built. For the others a size
gives a problem of numbers, as for a graph of its own, and runs in equal tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast, final

import torch
from attrs import field, frozen

from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.transforms.binding import settle_attention
from attn_graph.lowering.backend import Rooms, room_name
from attn_graph.lowering.folding import Shapes, fold_problem, shape_each
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.steps import Work
from attn_graph.machine.ambient import is_neutral, neutral_state
from attn_graph.machine.cache import latest
from attn_graph.machine.fitting import Shape, compile_reads, find_reads
from attn_graph.masks import Keep, Mask
from attn_graph.spec import TensorSpec
from attn_graph.spec.dims import bind, dims_in

MOST_SIZES = 64  # kept by a step, each with its run
NEAR = 64  # keys: how many of them there are up to the next multiple decides no choice
Tensors = Sequence[torch.Tensor]
Ready = tuple[Work, Work]  # the run of a problem, and the run for o alone
Lowered = tuple[Ready, bool]  # and whether it runs the same problem of any number of keys


@final
@frozen(eq=False)
class SizedStep:
    """Runs an attention, or its gradient, in any sizes of at least 1.

    op, specs: with sizes by name; node: its attention. names: of the sizes given by its operands.
    read: operands -> sizes, in their order. moves: True if bounds of its mask move
    with sizes. folds: True if heads may be rows. lower: makes a problem of numbers run. keys: the
    place of a size used only as a number of keys; None without one, or if the mask may distinguish
    these numbers.
    """

    op: Attention | AttentionGrad
    node: Attention
    specs: tuple[TensorSpec, ...]
    names: tuple[str, ...]
    read: Callable[[Tensors], Shape]
    moves: bool
    folds: bool
    lower: Callable[[Problem], Lowered]
    keys: int | None
    at: Callable[[Shape], Ready] = field(init=False, default=latest("make", MOST_SIZES))
    near: Callable[[Shape], Ready | None] = field(init=False, default=latest("share", MOST_SIZES))

    @classmethod
    def of(
        cls,
        op: Attention | AttentionGrad,
        specs: Sequence[TensorSpec],
        folds: bool,
        lower: Callable[[Problem], Lowered],
    ) -> SizedStep | None:
        """None if operands do not give all sizes, or if more than the mask depends on them."""
        reads, node = dict(find_reads(specs)), op.attention
        inside, bounds = [*dims_in(op)], [*dims_in(node.mask)]
        needed = {x.name for dim in (*dims_in(tuple(specs)), *inside) for x in dim.symbols}
        if not needed <= reads.keys() or len(inside) > len(bounds):
            return None
        names, moves = tuple(reads), bool(bounds)
        read, keys = compile_reads([*reads.values()]), find_keys(op, specs, names)
        return cls(op, node, tuple(specs), names, read, moves, folds, lower, keys)

    def call(
        self, device: torch.device, *operands: torch.Tensor, rooms: Rooms | None = None
    ) -> Tensors:
        return self.at(self.read(operands))[0](device, *operands, rooms=rooms)

    def infer(
        self, device: torch.device, *operands: torch.Tensor, rooms: Rooms | None = None
    ) -> Tensors:
        return self.at(self.read(operands))[1](device, *operands, rooms=rooms)

    def make(self, sizes: Shape) -> Ready:
        if is_neutral():  # as it mostly is
            return self.choose(sizes)
        with neutral_state():
            return self.choose(sizes)

    def choose(self, sizes: Shape) -> Ready:
        n = self.keys
        if n is not None:
            shared = self.near((*sizes[:n], -(-sizes[n] // NEAR) * NEAR, *sizes[n + 1 :]))
            if shared is not None:
                return shared
        return self.plan_size(sizes)[0]

    def share(self, sizes: Shape) -> Ready | None:
        """The run of these sizes, if it fits any number of keys."""
        ready, is_free = self.plan_size(sizes)
        return ready if is_free else None

    def plan_size(self, sizes: Shape) -> Lowered:
        named = dict(zip(self.names, sizes, strict=True))
        specs, (op, kept) = [spec.bind(named) for spec in self.specs], (self.op, None)
        if (mask := self.node.mask) is not None or self.node.modifiers:
            mask = cast(Mask, bind(mask, named)) if self.moves else mask
            M, N = specs[0].shape[2], specs[1].shape[2]
            op, kept = settle_attention(op, self.node, mask, M, N, len(specs))
        problem = Problem.of(op, specs if kept is None else [specs[n] for n in kept])
        folded = fold_problem(problem) if self.folds else None
        alone, is_free = self.lower(problem if folded is None else folded)
        ready = unfold_ready(alone, problem, folded)
        if kept is None:
            return ready, is_free
        call, infer = ready
        return (partial(run_selected, call, kept), partial(run_selected, infer, kept)), is_free


def find_keys(
    op: Attention | AttentionGrad, specs: Sequence[TensorSpec], names: Sequence[str]
) -> int | None:
    """`SizedStep.keys`. names: of the sizes."""
    mask = op.attention.mask
    if op.is_gradient or not (mask is None or isinstance(mask, Keep)):
        return None
    others = {symbol.name for dim in specs[0].dims for symbol in dim.symbols}
    alone = {name for name, (n, axis, *by) in find_reads(specs) if (n, axis, by) == (1, 2, [1, 0])}
    return next((n for n, name in enumerate(names) if name in alone - others), None)


def unfold_ready(ready: Ready, problem: Problem, folded: Problem | None) -> Ready:
    """The runs of a problem, by those of it with heads as rows, if it has been `folded`."""
    if folded is None:
        return ready
    p, rooms, (call, infer) = problem, dict[str, Shape](), ready
    given = {n: x.shape for n, x in enumerate(folded.specs) if x != p.specs[n]}
    if p.grad is not None:
        wanted = [n for n, wants in enumerate(p.grad.wants) if wants]
        due = {at: p.specs[n].shape for at, n in enumerate(wanted) if n in given}
        first = due
    else:
        o, (rows, _) = (p.B, p.H, p.M, p.E), folded.layout_of_o
        due = dict(enumerate([o, *(o[:3] for _ in p.node.stats)]))
        first = {0: o}
        rooms = {room_name("o"): rows} | {room_name(n): rows[:3] for n in folded.node.stats}
    lay = partial(partial, run_folded)
    return lay(call, given, due, rooms), lay(infer, given, first, rooms)


def run_selected(
    work: Work, kept: Sequence[int], device: torch.device, *operands: torch.Tensor,
    rooms: Rooms | None = None,
) -> Tensors:  # fmt: skip
    return work(device, *[operands[n] for n in kept], rooms=rooms)


def run_folded(
    work: Work, given: Shapes, due: Shapes, made: Mapping[str, Shape], device: torch.device,
    *operands: torch.Tensor, rooms: Rooms | None = None,
) -> Tensors:  # fmt: skip
    """given, due: shapes of the operands with heads as rows, and of the results. made: shapes of
    the results with heads as rows, by the names of rooms."""
    folded = rooms and {name: x.reshape(made[name]) for name, x in rooms.items() if name in made}
    return shape_each(work(device, *shape_each(operands, given), rooms=folded), due)
