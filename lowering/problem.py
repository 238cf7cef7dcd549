"""One attention: its sizes and dtypes, read off its graph once, and all other answers about
a graph for backends, each worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeGuard, TypeVar, final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.attention import Attention, AttentionGrad, Operands
from attn_graph.ir.graph import Eqn, Graph, Op, check_graph
from attn_graph.ir.layouts import value_spec
from attn_graph.ir.storage.packing import Lengths
from attn_graph.ir.storage.scaling import Dequantise, stands_in
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.machine.cache import Remembers, remember
from attn_graph.machine.sizes import format_bytes
from attn_graph.masks.places import Block, Place, Strip
from attn_graph.spec import (
    NAMES,
    TensorSpec,
    accumulator,
    dense_like,
    dense_strides,
    memory_order,
    new_strides,
)

T = TypeVar("T")
ROWS = ("o", "dq", "dk", "dv")  # results stored by rows of a head
Lies = tuple[tuple[str, tuple[int, ...]], ...]
BSHD = (0, 2, 1, 3)  # the order of axes in which PyTorch's kernels give o and gradients
ALIGNED = 16  # bytes: the width of a kernel's loads
PREPARING = Lengths, Dequantise  # ops ahead of an attention, over few bytes
MOST_BLOCKS = 64  # of queries, in which `sees_everywhere` looks for one that sees no key


@final
@frozen(cache_hash=True)
class Problem:
    """One attention or its gradient, with the specs of its operands, as most backends compute it.

    node: scale, modifiers, mask, sinks and dropout. specs: of q, k and v, then of other operands by
    `node.roles`; of a gradient also o, lse and the given cotangents. grad: the wanted gradients;
    None for the forward pass. lies: the declared strides of results, by name. scales: the specs of
    those of q, k and v, if a backend reads these in 8 bits, and that of o, if it gives this so.
    """

    node: Attention
    specs: tuple[TensorSpec, ...]
    grad: AttentionGrad | None = None
    lies: Lies = ()
    scales: tuple[TensorSpec, ...] = ()

    @classmethod
    def of(cls, op: Op, specs: Sequence[TensorSpec], lies: Lies = ()) -> Problem:
        """op: an attention or its gradient. specs: of the operands, in their order."""
        return cls(op.attention, tuple(specs), op.grad, lies)

    @cached_property
    def by_role(self) -> Operands[TensorSpec]:
        """The specs of the attention's own operands."""
        return self.node.split(self.specs)

    @cached_property
    def B(self) -> int:
        """Batch entries."""
        return self.specs[0].shape[0]

    @cached_property
    def H(self) -> int:
        """Query heads."""
        return self.specs[0].shape[1]

    @cached_property
    def G(self) -> int:
        """Key/value heads; H is a multiple of G."""
        return self.specs[1].shape[1]

    @cached_property
    def M(self) -> int:
        """Queries."""
        return self.specs[0].shape[2]

    @cached_property
    def N(self) -> int:
        """Keys."""
        return self.specs[1].shape[2]

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, M, N: of the scores."""
        return self.B, self.H, self.M, self.N

    @property
    def narrow_o(self) -> bool:
        """True if o is in the 8 bits of q, k and v."""
        return len(self.scales) > 3

    @property
    def lines(self) -> int:
        """Rows of scores of a key/value head."""
        return self.H // self.G * self.M

    @cached_property
    def D(self) -> int:
        """The head size of q and k."""
        return self.specs[0].shape[3]

    @cached_property
    def E(self) -> int:
        """The head size of v."""
        return self.specs[2].shape[3]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return self.specs[0].dtype

    @cached_property
    def wide(self) -> torch.dtype:
        """The dtype of scores and statistics. Kernels accumulate in it."""
        return accumulator(self.dtype)

    @property
    def is_plain(self) -> bool:
        """True for softmax(scale q k^T) v alone: no mask, modifier, sink or dropout."""
        return self.node.is_bare and self.node.mask is None

    @cached_property
    def is_empty(self) -> bool:
        """True without a query or without a key: nothing to compute."""
        return 0 in self.sizes

    @cached_property
    def low_scale(self) -> str:
        """The scale as text if it is 0 or less, or below the least normal number of the dtype of
        scores, since kernels may take it for 0; "" for any larger scale."""
        scale = self.node.scale
        if scale >= torch.finfo(self.wide).tiny:
            return ""
        return f"{scale or 0}" if scale <= 0 else f"{scale}, too little for {NAMES[self.wide]}"

    @property
    def folds_scale(self) -> bool:
        """True if kernels may scale maxima instead of products: with a scale above 0 and no
        modifiers."""
        return not self.low_scale and not self.node.modifiers

    @cached_property
    def gathers(self) -> bool:
        """True if the gradient is wanted of a tensor that modifiers read alike for all keys."""
        if self.grad is None or self.node.part:
            return False
        each = zip(self.node.takes, self.grad.wants, self.specs, strict=False)
        read = [(role.axes, s.shape) for role, wants, s in each if wants and role.data]
        return any(dict(zip(*x, strict=True)).get("j", 1) == 1 for x in read)

    @property
    def drops_rounded(self) -> bool:
        """True if dropout scales an o that is rounded. With delta as the sum of do o, ds of a row
        with one key is not 0 then. A part of the keys has no other sum."""
        return self.node.dropout > 0 and self.dtype != self.wide and not self.node.part

    @cached_property
    def mask_reads(self) -> bool:
        """True if the mask reads tensors."""
        return self.node.mask is not None and bool(self.node.mask.needs)

    @cached_property
    def has_blind_rows(self) -> bool:
        """True if a query may see no key, as far as is known before a call. Its lse is -inf."""
        return any(m.hides for m in self.node.modifiers) or self.mask_has_blind_rows

    @cached_property
    def mask_has_blind_rows(self) -> bool:
        """True if the mask alone may leave a query no key."""
        mask = self.node.mask
        if mask is None:
            return False
        strip = None if self.mask_reads else mask.strip(Place(0, 0, 0, 0, self.H, self.M, self.N))
        if strip is not None:
            return not strip_sees_everywhere(strip, self.M, self.N)
        return not sees_everywhere(self)

    @cached_property
    def layout_of_o(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of o [B,H,M,E]."""
        return self.o.shape, new_strides(self.o)

    @cached_property
    def o(self) -> TensorSpec:
        """How o [B,H,M,E] lies: as declared, or dense in the memory order of q."""
        return self.lay("o", (self.B, self.H, self.M, self.E), self.specs[0])

    def lay(self, name: str, shape: Sequence[int], like: TensorSpec) -> TensorSpec:
        """How a result lies: as declared, or dense in the memory order of `like`."""
        declared = dict(self.lies).get(name)
        strides = dense_strides(shape, memory_order(like)) if declared is None else declared
        dtype = like.dtype if self.narrow_o else stands_in(like.dtype)
        return TensorSpec(shape, dtype, strides)

    def new_o(
        self, device: torch.device, rooms: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """An uninitialised o; the caller's, if it is among `rooms`."""
        if rooms and (room := rooms.get("out.o")) is not None:
            return room
        shape, strides = self.layout_of_o
        return torch.empty_strided(shape, strides, dtype=self.dtype, device=device)

    def new_statistic(
        self, name: str, device: torch.device, rooms: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """An uninitialised statistic [B,H,M]; the caller's, if it is among `rooms`."""
        if (room := rooms.get(f"out.{name}")) is not None:
            return room
        return torch.empty((self.B, self.H, self.M), dtype=self.wide, device=device)


def new_gradient(spec: TensorSpec) -> torch.Tensor:
    """An uninitialised gradient by an operand on a CPU: dense, in the operand's memory order."""
    strides = dense_like(spec).strides
    return torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device="cpu")


def sees_everywhere(problem: Problem) -> bool:
    """True if the mask surely leaves every query a key. False also if the answer takes long."""
    B, H, M, N = range(problem.B), range(problem.H), problem.M, problem.N
    mask, rows = problem.node.mask, [range(M)]
    assert mask is not None
    for _ in range(MOST_BLOCKS):
        if not rows:
            return True
        part = rows.pop()
        if len(mask.surely(Block(B, H, part, len(H), M, N))):
            continue
        if len(part) == 1:
            return False
        middle = (part.start + part.stop) // 2
        rows += [range(part.start, middle), range(middle, part.stop)]
    return False


def strip_sees_everywhere(strip: Strip, M: int, N: int) -> bool:
    for i in (0, M - 1):
        starts = [0, *(i + x for x in (strip.low,) if x is not None)]
        ends = [N, *(i + 1 + x for x in (strip.high,) if x is not None)]
        ends += [x for x in (strip.keys,) if x is not None]
        if not all(start < end for start in starts for end in ends):
            return False
    return strip.rows is None or bool(strip.rows >= M)


def has_problem(op: Op) -> TypeGuard[Attention | AttentionGrad]:
    """True for an attention, or its gradient, by lse."""
    match op:
        case Attention(keeps=keeps) | AttentionGrad(attention=Attention(keeps=keeps)):
            return not keeps
    return False


def declared_strides(graph: Graph, eqn: Eqn, outs: range) -> Lies:
    """The declared strides of an equation's results, by name."""
    pairs = zip(graph.outputs, graph.layouts, strict=False)  # mostly there are no layouts
    known = ((i, strides) for i, strides in pairs if strides is not None and i in outs)
    return tuple([(eqn.op.names[i - outs.start], strides) for i, strides in known])


def places_of_rows(graph: Graph) -> Iterator[int]:
    """The places of o and of the gradients of q, k and v, for kernels that store contiguous rows at
    multiples of 16 bytes, of one attention that is not packed."""
    if not (graph.layouts and is_single(graph)):
        return
    for n, (name, x) in enumerate(zip(graph.result_names, graph.declared_outputs, strict=True)):
        if name in ROWS and x is not None and x.unit_last and not is_misaligned(x):
            yield n


def operand_specs(graph: Graph, eqn: Eqn) -> list[TensorSpec]:
    """How an equation's operands lie."""
    return [value_spec(graph, i) for i in eqn.args]


def is_single(graph: Graph) -> bool:
    """True for one attention, or one gradient, and nothing else."""
    return len(graph.eqns) == 1 and has_problem(graph.eqns[0].op)


def find_problem(graph: Graph) -> Problem | None:
    """The problem of a single attention, or of its gradient; None of other graphs."""
    if not is_single(graph):
        return None
    ((eqn, outs),) = graph.numbered
    return Problem.of(eqn.op, operand_specs(graph, eqn), declared_strides(graph, eqn, outs))


def read_specs(problem: Problem) -> list[TensorSpec]:
    """The specs of the tensors that modifiers and mask read, in the order of the operands."""
    operands = problem.by_role
    return [spec for tensors in (*operands.modifiers, operands.mask) for spec in tensors.values()]


def read_operands(
    graph: Graph, tensors: Sequence[torch.Tensor], *, lengths: bool = True
) -> list[torch.Tensor]:
    """The operands of a graph's last equation. Those before are PREPARING, run by PyTorch.

    lengths: False if nobody reads the lengths between starts: starts stand in their place.
    """
    values = [*tensors]
    for eqn in graph.eqns[:-1]:
        given = [values[i] for i in eqn.args]
        values += given if isinstance(eqn.op, Lengths) and not lengths else eqn.op.run(*given)
    return [values[i] for i in graph.eqns[-1].args]


def select_outputs(graph: Graph, results: Sequence[T]) -> list[T]:
    """The outputs of a graph, in order, from the results of its last equation."""
    _, outs = graph.numbered[-1]
    return [results[i - outs.start] for i in graph.outputs]


def returns_lse(graph: Graph) -> bool:
    return "lse" in graph.result_names


def is_misaligned(spec: TensorSpec) -> bool:
    """True if some row, head or batch entry does not begin at a multiple of 16 bytes."""
    return not {s * spec.dtype.itemsize % ALIGNED for s in spec.strides[:-1]} <= {0}


def is_broadcast(spec: TensorSpec) -> bool:
    return any(s == 0 and n != 1 for n, s in zip(spec.shape, spec.strides, strict=True))


def fits_loads(spec: TensorSpec) -> bool:
    """True if kernels with loads of 16 bytes read these rows in place."""
    return spec.unit_last and not is_misaligned(spec) and not is_broadcast(spec)


def has_flash_order(q: TensorSpec) -> bool:
    """True if o from PyTorch's flash kernels has the memory order of q.

    `empty_like` makes it, gaps or not; axes of one stride, and broadcast ones, get an order of
    their own.
    """
    strides = [s for n, s in zip(q.shape, q.strides, strict=True) if n != 1]
    return q.is_dense or (0 not in strides and len({*strides}) == len(strides))


def is_readable(x: TensorSpec, *, like: bool = False) -> bool:
    """True if the fused CPU kernel reads x [B,H,L,D] without a copy.

    BLAS needs contiguous, non-overlapping rows of D elements. Batch entries and heads may be
    broadcast (stride 0), except in q (`like`): the kernel gives o the layout of q, and with a
    stride of 0 it may put another axis than the last innermost and write to wrong places.
    """
    (B, H, L, D), (entry, head, row, _) = x.shape, x.strides
    return (
        x.unit_last
        and (L <= 1 or row >= D)
        and (H <= 1 or head >= D or (head == 0 and not like))
        and (B <= 1 or entry >= D or (entry == 0 and not like))
    )


def cotangent_bytes(problem: Problem) -> int:
    """Bytes of a copy of do, for a kernel that cannot read every layout; 0 without do."""
    if problem.grad is None or not problem.grad.with_do:
        return 0
    return problem.B * problem.H * problem.M * problem.E * problem.dtype.itemsize


def in_bshd(x: TensorSpec) -> bool:
    """True if x in its memory order lies as PyTorch's kernels give o and gradients."""
    order = BSHD if len(x.shape) == len(BSHD) else None
    return dense_like(x) == TensorSpec(x.shape, x.dtype, dense_strides(x.shape, order))


def in_c_order(x: TensorSpec) -> bool:
    """True if the memory order of x is C order."""
    return dense_like(x).is_dense


def relaid_bytes(problem: Problem, keeps: Callable[[TensorSpec], bool]) -> int:
    """Bytes of the largest gradient that is copied to the memory order of its operand. keeps: True
    for an operand in whose order a way gives the gradient."""
    wants = problem.grad.wants if problem.grad else ()
    pairs = zip(problem.specs, wants, strict=False)
    return max((x.type.bytes for x, wanted in pairs if wanted and not keeps(x)), default=0)


def relaid_note(problem: Problem, keeps: Callable[[TensorSpec], bool]) -> Iterator[str]:
    """For `explain`: the copies of `relaid_bytes`."""
    if count := relaid_bytes(problem, keeps):
        size = format_bytes(count)
        yield f"gradients are copied, {size} at most at a time, to the memory order of their inputs"


def cotangent_note(problem: Problem, cases: str) -> Iterator[str]:
    """For `explain`: the cases in which do is copied; always, if rows may see no key."""
    if count := cotangent_bytes(problem):
        where = "with 0 in rows that see nothing" if problem.has_blind_rows else f"where it {cases}"
        yield f"do is copied, {format_bytes(count)}, {where}"


def find_misplaced(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """The fault of tensors that do not begin at multiples of 16 bytes, as kernels assume."""
    return [
        f"{name}: expected an address that is a multiple of {ALIGNED} bytes, got one "
        f"{x.data_ptr() % ALIGNED} bytes past; clone() it, or compile with other backends="
        for name, x in named
        if x.data_ptr() % ALIGNED
    ]


def require_aligned(rooms: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanMismatchError for rooms that do not begin at multiples of 16 bytes."""
    if texts := find_misplaced(rooms.items()):
        raise PlanMismatchError(*texts, way_out="")


def tidy_strides(x: torch.Tensor) -> torch.Tensor:
    """x with strides that suit the kernels along axes of size 1, in which strides mean nothing."""
    if 1 not in x.shape or not x.ndim:
        return x
    row = -(-x.shape[-1] // ALIGNED) * ALIGNED
    strides = [row if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, (*strides[:-1], 1 if x.shape[-1] == 1 else strides[-1]))


def on_boundary(x: torch.Tensor) -> torch.Tensor:
    """x, or, if its address is not a multiple of 16 bytes, a copy with the same strides."""
    if x.data_ptr() % ALIGNED == 0:
        return x
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((reach,), (1,)).clone().as_strided(x.shape, x.stride())


@final
@frozen
class Facts(Remembers):
    """A graph after all passes, as backends see it. Equal graphs share one record."""

    graph: Graph
    answers: dict[tuple[object, ...], Any] = field(factory=dict, init=False, eq=False, repr=False)

    @cached_property
    def problem(self) -> Problem | None:
        """The one attention of the graph, or the one gradient; None of other graphs."""
        return find_problem(self.graph)

    def gradient(self, wants: tuple[str, ...] | None, *, through_lse: bool = False) -> Graph:
        """The graph of a training step's gradient."""
        return self.once(derive_gradient, wants, through_lse)


def derive_gradient(facts: Facts, wants: tuple[str, ...] | None, through_lse: bool) -> Graph:
    return training_gradient(facts.graph, wants, through_lse=through_lse)


@remember
def facts_of(graph: Graph) -> Facts:
    return Facts(graph)


def sole(graph: Graph) -> Problem | None:
    """The problem of a graph that is one attention, or one attention's gradient; None of others."""
    check_graph(graph, "sole")
    return facts_of(graph).problem
