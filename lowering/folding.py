"""Query heads with one key/value head as rows of one head, so that keys are read once for all.

q [B,H,M,D] is viewed as [B,G,rM,D], r = H/G heads one below the other, if no mask and no modifier
tells these rows apart: in a decoding step, say, with one query and grouped heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.errors import Reason
from attn_graph.ir.builder import Builder
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import UNPLACED, Modifier
from attn_graph.ir.transforms.binding import bind_graph
from attn_graph.ir.transforms.vjp import residuals
from attn_graph.lowering.backend import Backend, Executable, Run, Tensors, Write
from attn_graph.lowering.problem import Facts, Problem, facts_of
from attn_graph.lowering.request import Request
from attn_graph.masks import Keep, KeepBlocks, KeyLengths, Mask, Prefix
from attn_graph.masks.joins import leaves
from attn_graph.spec import TensorSpec, normalise_strides
from attn_graph.spec.dims import Dim, are_numbers

Shape = tuple[int, ...]
Shapes = Mapping[int, Shape]  # by place: of tensors whose heads are folded, or no longer are


@final
@frozen
class Folding:
    """A graph with its heads folded.

    By number, shapes that change: inputs: of this graph's inputs. outputs, saved: of results, in
    the graph before. rooms: of the outputs, in this graph.
    """

    graph: Graph
    inputs: Shapes
    outputs: Shapes
    saved: Shapes
    rooms: Shapes

    @property
    def note(self) -> str:
        at = self.graph.eqns[0].args[0]
        q, shape = self.graph.inputs[at].name, self.inputs[at]
        return f"heads that share keys are rows of one: {q} is {[*shape]}"

    @property
    def copied(self) -> int:
        """Bytes of results copied after a run: o lies as q, and one head is a view in any order."""
        graph = self.graph
        ((eqn, outs),) = graph.numbered
        if graph.types[eqn.args[1]].shape[1] == 1:
            return 0
        given = {graph.outputs[n] for n in self.outputs} | {residuals(graph)[n] for n in self.saved}
        named = zip(eqn.op.names, outs, strict=True)
        return sum(graph.types[i].bytes for name, i in named if i in given and name != "o")

    def run(self, run: Run, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """Run the folded graph on tensors of the graph before, and shape its results as that graph
        does."""
        outputs, saved = run(*shape_each(tensors, self.inputs))
        views = shape_each(outputs, self.outputs)
        same = {id(x): view for x, view in zip(outputs, views, strict=True)}
        kept = shape_each(saved, self.saved) if saved else []
        return views, [same.get(id(x), view) for x, view in zip(saved, kept, strict=True)]

    def infer(self, run: Run, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """As `run`, and save nothing."""
        outputs, _ = run(*shape_each(tensors, self.inputs))
        return shape_each(outputs, self.outputs), ()

    def write(self, write: Write, rooms: Tensors, *tensors: torch.Tensor) -> Tensors:
        """As `Executable.write` of the graph before."""
        made = write(shape_each(rooms, self.rooms), *shape_each(tensors, self.inputs))
        return shape_each(made, self.outputs)


def shape_each(tensors: Sequence[torch.Tensor], shapes: Shapes) -> list[torch.Tensor]:
    """Tensors with heads folded or unfolded. Statistics and dq are copied unless a view will do.
    shapes: [B,H,M,...], with -1 for an unknown size."""
    views = [*tensors]
    for n, shape in shapes.items():
        views[n] = views[n].reshape((len(views[n]), *shape[1:]) if shape[0] < 0 else shape)
    return views


def new_shapes(before: Graph, after: Graph, values: Iterable[int]) -> Shapes:
    """The shapes after, of values with another number of heads then; -1 for B and M as Dims."""
    pairs = enumerate((before.types[i].shape, after.types[i].shape) for i in values)
    changed = {n: new for n, (old, new) in pairs if old[1:2] != new[1:2]}
    return {n: tuple([i if are_numbers(i) else -1 for i in s]) for n, s in changed.items()}


def folds_heads(backend: Backend, kind: str) -> Backend:
    """A backend that gets graphs with their heads folded on devices of a kind.

    For backends without `foresees` and `variants`, since these see the graph as it was.
    """

    def folding_of(request: Request) -> Folding | None:
        problem = request.facts.problem
        shares = problem is not None and problem.H != problem.G
        return request.facts.once(fold_heads) if shares and request.target.kind == kind else None

    def why_not(request: Request) -> Iterable[Reason | str]:
        folding = folding_of(request)
        return backend.why_not(request.with_graph(folding.graph) if folding else request)

    def lower(request: Request) -> Executable:
        folding = folding_of(request)
        if folding is None:
            return backend.lower(request)
        return unfold(backend.lower(request.with_graph(folding.graph)), folding)

    def lower_any(request: Request) -> Executable | None:
        folding = folding_of(request)
        if folding is None:
            return backend.lower_any(request)
        folded = backend.lower_any(request.with_graph(folding.graph))
        return None if folded is None else unfold(folded, folding)

    return evolve(backend, why_not=why_not, lower=lower, lower_any=lower_any)


def folds_one_row(graph: Graph) -> bool:
    """True if heads are folded for one query, while the number of queries is a Dim."""
    problem = facts_of(graph).problem
    if problem is None or not isinstance(problem.M, Dim):
        return False
    sizes = {symbol.name: symbol.most for symbol in graph.symbols}
    ones = {symbol.name: 1 for symbol in problem.M.symbols}
    return fold_heads(facts_of(bind_graph(graph, sizes | ones))) is not None


def unfold(executable: Executable, folding: Folding) -> Executable:
    copied = 0 if executable.in_c_order else folding.copied
    return evolve(
        executable,
        run=partial(folding.run, executable.run),
        infer=partial(folding.infer, executable.infer),
        write=executable.write and partial(folding.write, executable.write),
        fix=None,
        writes_anywhere=False,
        temporary=max(executable.temporary, copied),
        notes=(*executable.notes, folding.note),
    )


def fold_heads(facts: Facts) -> Folding | None:
    """A graph of one attention, or one gradient, with heads folded, or None."""
    graph, problem = facts.graph, facts.problem
    folded = None if problem is None else fold_problem(problem)
    if problem is None or folded is None or shares_rows(graph, problem):
        return None
    (eqn,) = graph.eqns
    known = dict(zip(eqn.args, folded.specs, strict=True))
    specs = [known.get(n, i.spec) for n, i in enumerate(graph.inputs)]
    b = Builder(trusts=True)
    values = [b.input(i.name, s) for i, s in zip(graph.inputs, specs, strict=True)]
    values += b.emit(eqn.op, *(values[i] for i in eqn.args))
    after = b.graph(*(values[i] for i in graph.outputs))
    inputs = new_shapes(graph, after, range(len(specs)))
    outputs, saved = (new_shapes(after, graph, x) for x in (graph.outputs, residuals(graph)))
    rooms = new_shapes(graph, after, graph.outputs)
    return Folding(after, inputs, outputs, saved, rooms)


def shares_rows(graph: Graph, problem: Problem) -> bool:
    """True if the one equation reads a value as queries and also as keys or as data."""
    (eqn,) = graph.eqns
    own = len(problem.node.ranks)
    return not {eqn.args[0], *eqn.args[own:]}.isdisjoint(eqn.args[1:own])


def fold_problem(problem: Problem) -> Problem | None:
    """A problem with heads folded, or None."""
    if problem.is_empty or problem.H == problem.G or tells_rows_apart(problem):
        return None
    own, specs = len(problem.node.ranks), list[TensorSpec]()
    for n, spec in enumerate(problem.specs):
        row = fold_spec(spec, problem) if n == 0 or n >= own else spec
        if row is None:
            return None
        specs.append(row)
    folded = evolve(problem, specs=tuple(specs), lies=())
    return folded if keeps_order(problem, folded) else None


def tells_rows_apart(problem: Problem) -> bool:
    """True if a step of an attention depends on the query or on its head."""
    node = problem.node
    if node.sinks or node.dropout:
        return True
    steps: list[tuple[Modifier | Mask, Mapping[str, TensorSpec]]] = []
    steps += zip(node.modifiers, problem.by_role.modifiers, strict=True)
    if node.mask is not None:
        steps += [(leaf, problem.by_role.mask) for leaf in leaves(node.mask)]
    return any(reads_rows(step, data) for step, data in steps)


def reads_rows(step: Modifier | Mask, data: Mapping[str, TensorSpec]) -> bool:
    """data: the tensors of a modifier or of the mask."""
    if not isinstance(step, (*UNPLACED, Keep, KeepBlocks, KeyLengths, Prefix)):
        return True
    return any(
        axis in "hix" and n != 1
        for name, need in step.needs.items()
        for axis, n in zip(need.axes, data[name].shape, strict=True)
    )


def fold_spec(spec: TensorSpec, problem: Problem) -> TensorSpec | None:
    """The strides of x [B,H,M,...] as [B,G,rM,...]; None if no view gives it."""
    B, H, M, *last = spec.shape
    step, head, row, *inner = spec.strides
    if M > 1 and head != M * row:
        return None
    r = H // problem.G
    strides = (step, r * head, head if M == 1 else row, *inner)
    return TensorSpec((B, problem.G, r * M, *last), spec.dtype, strides)


def keeps_order(problem: Problem, folded: Problem) -> bool:
    """True if o in the memory order of the folded q is a view in the order of q."""
    shape, lies = folded.layout_of_o
    own, strides = problem.layout_of_o
    due = fold_spec(TensorSpec(own, problem.dtype, strides), problem)
    return due is not None and due.strides == normalise_strides(shape, lies)
