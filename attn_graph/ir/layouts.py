"""How values lie in memory. Plans, fake kernels, `out=` and backward graphs read it here."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import cast

from attn_graph.errors import GraphError, show
from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.ops import Weigh
from attn_graph.ir.storage.packing import Pack
from attn_graph.ir.storage.scaling import Dequantise, Quantise
from attn_graph.ir.storage.views import VIEWS
from attn_graph.ir.transforms.sums import Add
from attn_graph.machine.cache import remember
from attn_graph.spec import DTYPES, NAMES, TensorSpec, dense_like, dense_strides, memory_order

Layouts = Mapping[str, TensorSpec | str]  # of outputs, by name
Plain = str | tuple[tuple[int, ...], str, tuple[int, ...]]  # an order; shape, dtype and strides
PlainLayouts = tuple[tuple[str, Plain], ...]


@remember
def output_specs(graph: Graph) -> tuple[TensorSpec, ...]:
    """How each output lies: as declared, or dense: o like q, a gradient or tangent like its
    operand, all else in C order."""
    if not graph.layouts:
        return tuple([dense_like(value_spec(graph, i)) for i in graph.outputs])
    pairs = zip(graph.outputs, graph.declared_outputs, strict=True)
    return tuple([due or dense_like(value_spec(graph, i)) for i, due in pairs])


def result_spec(graph: Graph, i: int) -> TensorSpec:
    """Value i as an output: see `output_specs`."""
    if i in graph.outputs:
        return output_specs(graph)[graph.outputs.index(i)]
    return dense_like(value_spec(graph, i))


def value_spec(graph: Graph, i: int) -> TensorSpec:
    """How value i lies between equations."""
    if i < len(graph.inputs):
        return graph.inputs[i].spec
    type_ = graph.types[i]
    eqn, outs = next(numbered for numbered in graph.numbered if i in numbered[1])
    if isinstance(eqn.op, VIEWS) and i not in statistics(graph):
        view = eqn.op.view(value_spec(graph, eqn.args[0]))
        return view or TensorSpec(type_.shape, type_.dtype)
    like = leader_of(graph, eqn, i - outs.start)
    order = memory_order(like) if like and len(like.shape) == len(type_.shape) else None
    return TensorSpec(type_.shape, type_.dtype, dense_strides(type_.shape, order))


def leader_of(graph: Graph, eqn: Eqn, place: int) -> TensorSpec | None:
    """The value in whose memory order the result at `place` lies; None for C order."""
    match eqn.op:
        case Fused(gives=roles):
            n = roles[place].leader
            return None if n is None else value_spec(graph, eqn.args[n])
        case Weigh() | Pack(blind=False):
            i = eqn.args[0]
            while i >= len(graph.inputs):  # to the input at the end of first operands: q mostly
                maker = next(maker for maker, outs in graph.numbered if i in outs)
                if not maker.args:
                    return None
                i = maker.args[0]
            return value_spec(graph, i)
        case Add() | Dequantise() | Quantise():
            return value_spec(graph, eqn.args[0])
    return None


def statistics(graph: Graph) -> frozenset[int]:
    """The values that are statistics of rows."""
    return graph.named_results(attrgetter("statistics"))


def require_layouts(outputs: object) -> None:
    """Raise GraphError for anything but a mapping of names to layouts."""
    if not isinstance(outputs, Mapping):
        raise GraphError(
            f"lay_out: outputs {show(outputs)} is not a mapping of names to layouts; write "
            '{"o": "bshd"}'
        )
    for name, layout in outputs.items():
        if not isinstance(layout, str | TensorSpec):
            raise GraphError(
                f"lay_out: {name} {show(layout)} is neither a TensorSpec nor an order of axes such "
                'as "bshd"'
            )


def plain_layouts(outputs: object) -> PlainLayouts:
    """Declared layouts as constants. Raises GraphError for anything but a mapping of layouts."""
    require_layouts(outputs)
    return tuple(
        (name, x if isinstance(x, str) else (x.shape, NAMES[x.dtype], x.strides))
        for name, x in cast(Layouts, outputs).items()
    )


def restore_layouts(plain: PlainLayouts) -> Layouts:
    """The layouts of `plain_layouts`. Raises GraphError for anything else."""
    whole: dict[str, TensorSpec | str] = {}
    for pair in plain if isinstance(plain, tuple) else (plain,):
        match pair:
            case str(name), str(order):
                whole[name] = order
            case str(name), (tuple(shape), str(dtype), tuple(strides)) if dtype in DTYPES:
                whole[name] = TensorSpec(shape, DTYPES[dtype], strides)
            case _:
                raise GraphError(f"the text has outputs={plain!r}, which are not layouts by name")
    return whole


def has_sizes(plain: PlainLayouts | None) -> bool:
    """True if a layout is for one size of the result: a TensorSpec, not an order of axes."""
    return any(not isinstance(layout, str) for _, layout in plain or ())
