"""Attention in PyTorch's own operations, for programs that leave for other runtimes.

A program of torch.export holds `torch.ops.attn_graph.attention`, which only this library runs.
`decompose` writes it by the formulas of the graph's ops. Sizes may be symbols, and steps may write
in place: what is recorded is functional.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from attrs import define
from torch import Tensor
from torch import _decomp as tables

from attn_graph.errors import GraphError
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.passes import fuse
from attn_graph.ir.storage.paging import Unpage
from attn_graph.ir.transforms.vjp import residuals
from attn_graph.machine.ambient import neutral_state, plain_ops_on
from attn_graph.masks import And, KeyLengths, Mask, flatten_join
from attn_graph.masks.places import Place
from attn_graph.nn.calls import make_graph
from attn_graph.nn.ops import OP, example_spec, fake_attention
from attn_graph.nn.results import names_of_inputs, require_count, restore_graph
from attn_graph.planner.forms.content import CallContent, read_content

Tensors = Sequence[Tensor]
SHOULD = "can't leave for another runtime"


def decompose(tensors: Tensors, text: str, saves: bool = False) -> list[Tensor]:
    """`run_attention` in PyTorch's own operations, on tensors of any mode.

    Raises GraphError for what only this library computes.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    graph = read_graph(tensors, text)
    with plain_ops_on(tensors[0].device):
        write = dispatch_functionalize(compute, FunctionalTensorMode())
        return [*write(graph, [*tensors], saves)]


@neutral_state()
def read_graph(tensors: Tensors, text: str) -> Graph:
    """The graph of a text, with an Attention in place of each chain of steps.

    Its sizes are examples if those of the tensors are symbols. Raises GraphError.
    """
    require_count(text, len(tensors))
    content = read_content(text)
    if isinstance(content, CallContent):
        named = zip(names_of_inputs(text), map(example_spec, tensors), strict=True)
        specs = {name: spec for name, spec in named if spec is not None}
        if len(specs) < len(tensors):
            raise GraphError(
                f"attention {SHOULD} with sizes that data decide, as those of x[mask] are; give "
                "torch.export.export dynamic_shapes= for its inputs, and slice them by sizes"
            )
        graph = fuse(make_graph(specs, content.restore()))
    else:
        graph = restore_graph(text)
    if problems := [*leaving_problems(graph)]:
        raise GraphError(*problems)
    return graph


def leaving_problems(graph: Graph) -> Iterator[str]:
    """Why a graph has no formula in PyTorch's own operations."""
    if any(eqn.op.attention and eqn.op.attention.dropout for eqn in graph.eqns):
        yield (
            f"attention with dropout {SHOULD}: its draws are this library's; "
            "call model.eval() before the export"
        )
    ops_ = [eqn.op for eqn in graph.eqns]
    packs = any(op.packed and (op.packed.sides or op.packed.paged) for op in ops_)
    if packs or any(op.moves_rows or isinstance(op, Unpage) for op in ops_):
        yield (
            f"attention of packed rows or pages {SHOULD}: its sequences are read on the host; "
            "pad the rows, and pass kv_lengths="
        )


def compute(graph: Graph, tensors: list[Tensor], saves: bool) -> list[Tensor]:
    """The outputs of a graph; with `saves` also the residuals of its backward."""
    values = tensors
    for eqn in graph.eqns:
        operands = [values[i] for i in eqn.args]
        if isinstance(eqn.op, Attention):  # by its steps, without what has no effect there
            values += eqn.op.unfold(Walk().run, operands)
        else:
            values += eqn.op.run(*operands)
    more = [i for i in residuals(graph) if i not in graph.outputs] if saves else []
    return [values[i] for i in (*graph.outputs, *more)]


def absent_keys(mask: Mask, at: Place) -> Tensor | None:
    """The keys past the lengths, [B,1,1,N], if a mask hides them from all queries by KeyLengths."""
    return ~KeyLengths().keep(at) if KeyLengths() in flatten_join(And, mask) else None


@final
@define(eq=False)
class Walk:
    """The steps of one attention in order, with what is known of the scores so far.

    hides: a score may be -inf. absent: keys past the lengths, [B,1,1,N], if all queries end there.
    sorts: only the weights tell which keys are absent.
    """

    hides: bool = False
    absent: Tensor | None = None
    sorts: bool = False

    def run(self, op: Op, *operands: Any) -> tuple[Tensor, ...]:  # Any: tensors
        match op:
            case Modifier():
                before, self.hides = self.hides, self.hides or op.hides
                if not (before and (op.hides or not op.additive)):  # -inf stays by itself
                    return (op.changed(operands[0], operands[1:]),)
            case ops.Mask(mask):
                self.hides = True
                given = dict(zip(op.roles, operands, strict=True))
                self.absent = absent_keys(mask, Place.whole(given.pop("s"), given))
                self.sorts = self.absent is None and "kv_lengths" in given
            case ops.Softmax():
                return ops.softmax(*operands, hides=self.hides)
            case ops.Weigh() if not self.sorts:
                p, v = operands
                return (ops.weigh(p, v, self.absent, op.scale),)
        return op.run(*operands)


# torch.onnx.export reads PyTorch's own table. Fake tensors with symbols for sizes would too,
# in place of the operator's results for them, unless these are among PyTorch's.
if hasattr(tables, "meta_table"):
    tables.meta_table[OP] = fake_attention
    tables.decomposition_table[OP] = decompose
