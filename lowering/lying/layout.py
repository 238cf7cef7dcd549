"""How the tensors of a problem lie: each batch entry by itself, packed, or in pages.

The kernels take strides by batch entry, head, row and element: (0, head, row, element) of a packed
tensor [T,H,D], (page, head, row, element) of a pool [n,P,G,D].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.errors import Reason
from attn_graph.ir.packed import LENGTHS, STARTS, Packed
from attn_graph.ir.packing import row_count
from attn_graph.ir.scaling import KEY_SCALES
from attn_graph.lowering.facts import Facts
from attn_graph.lowering.problem import (
    PREPARING,
    Lies,
    Problem,
    declared_strides,
    has_problem,
    operand_specs,
)
from attn_graph.spec import MOST_INT32, TensorSpec

MOST_BATCH = 2 * 4096  # more than AT_ONCE of kernels/sequences.py
KEY_TENSORS = ("k", "v", "dk", "dv", *KEY_SCALES)  # the others have the rows of q
Strides = tuple[int, ...]

# The entries of a table of pages sorted by page, in which order their gradients are added. Several
# entries may name a page. A stable sort brings them together and leaves them in the order of the
# table, so sums have equal bits each time.
NAMED, ORDER = "pages.named", "pages.order"  # read by the summing kernel
DTYPES = {NAMED: torch.int32, ORDER: torch.int64}
KEPT = sum(dtype.itemsize for dtype in DTYPES.values())  # bytes of an entry
PASSING = 2 * KEPT + 16  # and while they are sorted: copies, and a table within the lengths


@final
@frozen(cache_hash=True)
class Layout:
    """A problem with padded sizes, and the true layout of its operands.

    specs: of the operands, as they are. op: of packed, paged and quantised tensors. tables: the
    specs of its further tensors, scales, starts and then pages.
    """

    problem: Problem
    specs: tuple[TensorSpec, ...]
    op: Packed | None = None
    tables: tuple[TensorSpec, ...] = ()

    @classmethod
    def of(cls, facts: Facts) -> Layout | None:
        """Of a graph of one attention, or one gradient, packed or not; None of others."""
        graph, problem = facts.graph, facts.problem
        if problem is not None:
            return cls.dense(problem)
        if not graph.eqns or any(not isinstance(eqn.op, PREPARING) for eqn in graph.eqns[:-1]):
            return None
        last, outs = graph.numbered[-1]
        op: Packed | None = last.op.packed
        if op is None or min(graph.outputs) < outs.start:
            return None
        return cls.packed(op, operand_specs(graph, last), declared_strides(graph, last, outs))

    @classmethod
    def dense(cls, problem: Problem) -> Layout:
        return cls(problem, problem.specs)

    @classmethod
    def packed(cls, op: Packed, specs: list[TensorSpec], lies: Lies = ()) -> Layout | None:
        """specs: of all operands of the op. lies: as of Problem, of results as they are. None for
        an op beyond `Problem`."""
        if not has_problem(op.op):
            return None
        own, where = op.split(specs)
        padded = op.padded([x.type for x in specs])
        whole = [
            TensorSpec(type_.shape, spec.dtype) if side in where else spec
            for spec, type_, side in zip(own, padded, op.op.operand_sides, strict=True)
        ]
        return cls(Problem.of(op.op, whole, lies), own, op, tuple(specs[len(own) :]))

    @property
    def layout(self) -> Layout:
        """Itself, as forward mode has one."""
        return self

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """The packed sides, of "rows" and "keys"."""
        return self.op.sides if self.op else ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tables."""
        starts = (STARTS[side] for side in self.sides)
        return (*self.scales, *starts, *("pages",) * (self.op is not None and self.op.paged))

    @property
    def scales(self) -> tuple[str, ...]:
        """The names of the scales, if k and v are quantised."""
        return KEY_SCALES if self.op is not None and self.op.scaled else ()

    @cached_property
    def pages(self) -> TensorSpec | None:
        """The table of pages, if k and v lie in them."""
        return self.tables[-1] if self.op and self.op.paged else None

    @property
    def totals(self) -> dict[str, int]:
        """The rows of each packed side."""
        pairs = ("rows", self.T), ("keys", self.T_keys)
        return {side: n for side, n in pairs if n is not None}

    @cached_property
    def T(self) -> int | None:
        """Rows of q, if it is packed."""
        return row_count(self.specs[0].shape) if "rows" in self.sides else None

    @cached_property
    def T_keys(self) -> int | None:
        """Rows of k, if it is packed."""
        return row_count(self.specs[1].shape) if "keys" in self.sides else None

    @cached_property
    def flat(self) -> Problem:
        """The problem with all packed sequences as one, with the true number of programs and
        memory."""
        p = self.problem
        shapes = [x.shape for x in p.specs[:3]]
        if self.T is not None:
            shapes[0] = (1, p.H, self.T, p.D)
        if self.T_keys is not None:
            shapes[1], shapes[2] = (1, p.G, self.T_keys, p.D), (1, p.G, self.T_keys, p.E)
        pairs = zip(shapes, p.specs, strict=False)
        specs = (TensorSpec(shape, x.dtype) for shape, x in pairs)
        return evolve(p, specs=(*specs, *p.specs[3:])) if self.sides else p

    @property
    def fewest(self) -> int:
        """The fewest sequences with all rows; B without packed tensors."""
        types = [x.type for x in (*self.specs, *self.tables)]
        return self.op.fewest(types) if self.op else self.problem.B

    # Operands and results

    def large(self) -> dict[str, TensorSpec]:
        """The specs of q, k, v, do and dlse, by name."""
        specs = dict(zip("qkv", self.specs, strict=False))
        if self.problem.grad is not None:
            given = self.problem.grad.split(self.specs)
            cotangents = ("do", given.do), ("dlse", given.dlse)
            specs |= {name: x for name, x in cotangents if x is not None}
        return specs

    def strides(self, name: str, spec: TensorSpec) -> Strides:
        """The strides of a tensor as kernels take them; name: "k", "dlse", ..."""
        side = "keys" if name in KEY_TENSORS else "rows"
        if side == "keys" and self.pages is not None:
            page, line, g, last = spec.strides
            return page, g, line, last
        if side not in self.sides:
            return spec.strides
        row, head, *each = spec.strides
        return (0, head, row, *each) if each else (0, row, head)

    def o(self) -> TensorSpec:
        """How o lies: as declared, or dense in the memory order of q."""
        p = self.problem
        shape = (p.B, p.H, p.M, p.E) if self.T is None else (self.T, p.H, p.E)
        return p.lay("o", shape, self.specs[0])

    def statistic(self) -> tuple[int, ...]:
        """The shape of lse and other statistics of rows."""
        p = self.problem
        return (p.B, p.H, p.M) if self.T is None else (p.H, self.T)

    def lines(self) -> tuple[int, int, int]:
        """[B,H,M] for a kernel without sequences."""
        p = self.problem
        return (p.B, p.H, p.M) if self.T is None else (1, p.H, self.T)

    def gradient(self, n: int) -> TensorSpec:
        """How the gradient of q, k or v lies: as declared, or dense in the operand's order."""
        spec = self.specs[n]
        return self.problem.lay(f"d{self.problem.node.roles[n]}", spec.shape, spec)

    # Programs

    def row_programs(self, block: int) -> int:
        """Programs of one for each block of queries of each head."""
        p = self.problem
        if self.T is None:
            return -(-p.M // block) * p.H * p.B
        return (-(-self.T // block) + p.B + 2) * p.H

    def key_programs(self, block: int, heads: int) -> int:
        """Programs for each block of keys, per head of a number of heads."""
        p = self.problem
        if self.T_keys is None:
            return -(-p.N // block) * heads * p.B
        return (-(-self.T_keys // block) + p.B + 2) * heads

    def pointers(self) -> dict[str, str]:
        """Tensors of the places of sequences, by parameter."""
        names = {*self.names} - {*KEY_SCALES} | {LENGTHS[side] for side in self.sides}
        if self.pages is not None and LENGTHS["keys"] in self.problem.by_role.mask:
            names.add(LENGTHS["keys"])
        return {f"{name}_ptr": name for name in names}

    def steps(self, side: str) -> tuple[int, ...]:
        """The strides of starts and lengths of a side, and of the table of pages along them; 0 of
        absent ones."""
        given = dict(zip(self.names, self.tables, strict=True)) | self.problem.by_role.mask
        specs = given.get(STARTS[side]), given.get(LENGTHS[side])
        step = self.pages.strides[1] if self.pages and side == "keys" else 0
        return (*(0 if x is None else x.strides[0] for x in specs), step)

    def known_lengths(self) -> dict[str, str]:
        """The lengths equal to M or N of a batch entry in kernels, and read there."""
        pointers = self.pointers()
        names = (LENGTHS["rows"], "M"), (LENGTHS["keys"], "N")
        return {name: size for name, size in names if f"{name}_ptr" in pointers}

    def where(
        self, mask: Mapping[str, torch.Tensor], tables: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Tensors of the places of sequences, by name. mask: the mask's tensors."""
        named = {n: mask[n] for n in LENGTHS.values() if n in mask}
        return named | dict(zip(self.names, tables, strict=True))

    def sizes(self) -> dict[str, int | tuple[int, ...] | None]:
        """Facts of packed tensors and of pages for kernels, by parameter."""
        pool, page = self.specs[1].shape[:2] if self.pages else (0, 0)
        return {
            "B": self.problem.B,
            "T": self.T,
            "T_KEYS": self.T_keys,
            "BATCH": batch_room(self.problem.B) if self.sides else 0,
            "q_steps": self.steps("rows"),
            "kv_steps": self.steps("keys"),
            "pages_stride": self.pages.strides[0] if self.pages else 0,
            "POOL": pool,
            "PAGE": page,
        }

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor of the places of sequences."""
        mask = self.problem.by_role.mask
        dtypes = {name: x.dtype for name, x in zip(self.names, self.tables, strict=True)}
        return dtypes | {n: mask[n].dtype for n in LENGTHS.values() if n in mask}

    def reasons(self) -> Iterator[Reason]:
        """Against packed tensors beyond the kernels."""
        if self.pages is not None:
            yield from self.page_reasons()
        grad, roles = self.problem.grad, self.problem.node.roles
        for role, wanted in zip(roles, grad.wants if grad else (), strict=False):
            if (self.sides or self.pages) and wanted and role not in ("q", "k", "v", "sinks"):
                limit = "has gradients of q, k, v and sinks of packed tensors"
                yield Reason(f"packed_gradient.{role}", limit, f"that of {role} is wanted")

    def page_reasons(self) -> Iterator[Reason]:
        """Against pages beyond the kernels."""
        for name, x in zip("kv", self.specs[1:3], strict=True):
            if (x.shape[1] - 1) * x.strides[1] > MOST_INT32:
                limit = f"reads pages whose rows lie within {MOST_INT32} elements"
                yield Reason(f"page_rows.{name}", limit, f"{name} is {x}")
        if not self.specs[1].shape[0]:
            yield Reason("pool", "needs a page at least", f"k is {self.specs[1]}")


def batch_room(sequences: int) -> int:
    """How many starts of sequences a program reads at once: few sizes, since each is a kernel."""
    return next((room for room in (2**5, 2**8, 2**12) if room >= sequences + 2), MOST_BATCH)


def sums_pages(layout: Layout) -> bool:
    grad = layout.problem.grad
    return layout.pages is not None and grad is not None and any(grad.wants[1:3])


def order_pages(
    table: torch.Tensor, lengths: torch.Tensor | None, page: int, pool: int
) -> dict[str, torch.Tensor]:
    """NAMED: the pages of a table [B,pages], ascending. ORDER: the entry naming each.

    page: rows of one. pool: the number of pages; it also stands for entries past the lengths [B].
    """
    named = table.clamp(0, pool - 1).to(DTYPES[NAMED])
    if lengths is not None:
        begin = torch.arange(0, table.shape[1] * page, page, device=table.device)
        named = named.where(begin < lengths[:, None], pool)
    values, order = named.flatten().sort(stable=True)
    return {NAMED: values, ORDER: order}


def order_bytes(layout: Layout) -> int:
    """Bytes allocated by `order_pages`, at most."""
    if layout.pages is None or not sums_pages(layout):
        return 0
    return (KEPT + PASSING) * prod(layout.pages.shape)
