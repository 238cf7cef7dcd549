"""Programs for other runtimes: core ATen, and ONNX's Attention where it says the same.

    >>> program = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
    >>> program = program.run_decompositions(ag.decompositions())  # for OpenVINO, ExecuTorch, ...

or `ag.decompositions(onnx=24)`, then `torch.onnx.export(program, opset_version=24)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor

from attn_graph.errors import GraphError, show
from attn_graph.ir.attention import Attention, Operands
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Bias, Modifier, SoftCap
from attn_graph.ir.storage.packed import and_parts
from attn_graph.masks import And, Band, Causal, KeyLengths, Mask, Window, join_masks, needs_of
from attn_graph.masks.places import Place
from attn_graph.nn.decomposition import absent_keys, decompose, read_graph
from attn_graph.nn.ops import OP
from attn_graph.spec import INF, to_integer

FIRST, WITH_LENGTHS, WITH_WINDOWS = 23, 24, 25  # versions of Attention
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STEPS: tuple[tuple[type[Modifier], ...], ...]  # its changes of scores, in its order
STEPS = ((), (SoftCap,), (Bias,), (SoftCap, Bias))
logger = logging.getLogger(__name__)
Tensors = Sequence[Tensor]
Table = dict[Any, Callable[..., Any]]  # Any: operators of PyTorch, and their results


def decompositions(*, onnx: int | None = None) -> Table:
    """What `ExportedProgram.run_decompositions` takes to leave no operator of this library.

    Without onnx: PyTorch's own decompositions too, so that core ATen alone is left. onnx: the
    opset of a later `torch.onnx.export`, whose Attention, from 23 on, stands where it says the
    same; PyTorch's other operators stay for the exporter. Raises GraphError for another opset.
    """
    if onnx is None:
        table: Table = torch.export.default_decompositions()
        table[OP] = decompose
        return table
    opset = to_integer(onnx)
    if opset is None or opset < 18:
        raise GraphError(f"decompositions: onnx {show(onnx)} is not an opset from 18 on, as 24 is")
    return {OP: partial(write_attention, opset)}


def write_attention(opset: int, tensors: Tensors, text: str, saves: bool = False) -> list[Tensor]:
    """A call as ONNX's Attention, or by `decompose` where that does not say the same."""
    if opset >= FIRST and not saves:
        graph = read_graph(tensors, text)
        problem = next(problems(graph, tensors), None)
        if problem is None:
            node: Any = graph.eqns[0].op  # Any: an Attention, without problems
            operands = [tensors[i] for i in graph.eqns[0].args]
            return [Node(min(opset, WITH_WINDOWS), node, operands).write()]
        logger.info("plain operators in place of ONNX's Attention: %s", problem)
    return decompose(tensors, text, saves)


def problems(graph: Graph, tensors: Tensors) -> Iterator[str]:
    """Why ONNX's Attention does not say what a graph says."""
    eqn, *others = graph.eqns
    node = eqn.op
    if others or not isinstance(node, Attention):
        yield "the graph is not one attention of its inputs"
        return
    q, *_ = operands = [tensors[i] for i in eqn.args]
    biases = [operands[i] for data in node.slots.modifiers for i in data.values()]
    if len(graph.outputs) > 1:
        yield "the call returns statistics, which Attention does not have"
    if node.sinks:
        yield "Attention has no sinks"
    if "kv_lengths" in needs_of(node.mask) and KeyLengths() not in and_parts(node.mask):
        yield "Attention sees keys past the lengths, which the mask does not hide from all queries"
    if not node.scale > 0:
        yield f"Attention takes the square root of the scale, {node.scale}"
    if q.dtype not in DTYPES:
        yield f"Attention has a scale in float32, and q is {q.dtype}"
    if tuple(map(type, node.modifiers)) not in STEPS:
        yield "Attention changes scores by a soft cap, then a bias, and in no other way"
    elif any(bias.dtype != q.dtype for bias in biases):
        yield f"Attention takes a bias in the dtype of q, {q.dtype}"


@final
@define(eq=False)
class Node:
    """ONNX's Attention for one of ours. What its attributes don't say is a mask tensor.

    offset: its diagonal, j <= i + offset, is of lengths if it has these, else from the top left.
    """

    version: int
    op: Attention
    operands: Tensors
    attributes: dict[str, Any] = field(factory=dict)  # Any: numbers, by ONNX's names

    @property
    def given(self) -> Operands[Tensor]:
        return self.op.split(self.operands)

    def write(self) -> Tensor:
        q, k, v = self.given.q, self.given.k, self.given.v
        self.attributes = {"scale": self.op.scale}
        caps = [step.cap for step in self.op.modifiers if isinstance(step, SoftCap)]
        self.attributes |= dict.fromkeys(("softcap",) * len(caps), sum(caps))
        parts = and_parts(self.op.mask)
        lengths = self.take_lengths(parts)
        left = [part for part in parts if not self.take_band(part, lengths is not None)]
        absent = None if self.op.mask is None else absent_keys(self.op.mask, self.places)
        if absent is not None:  # these rows may hold NaN, which it would spread
            k, v = (x.masked_fill(absent.mT, 0.0) for x in (k, v))
        more = (self.tensor(left), None, None, lengths)
        last = max((n for n, x in enumerate(more, 1) if x is not None), default=0)
        return torch.onnx.ops.symbolic(
            "Attention",
            (q, k, v, *more[:last]),
            self.attributes,
            dtype=q.dtype,
            shape=(*q.shape[:3], v.shape[3]),
            version=self.version,
        )

    @property
    def places(self) -> Place:
        q, k = self.given.q, self.given.k
        return Place.whole(q.new_empty(*q.shape[:3], k.shape[2]), self.given.mask)

    def take_lengths(self, parts: list[Mask]) -> Tensor | None:
        """kv_lengths as an input, which then is none of the parts."""
        known = self.given.mask.keys() & {"kv_lengths", "q_lengths"} == {"kv_lengths"}
        if self.version < WITH_LENGTHS or not known or KeyLengths() not in parts:
            return None
        parts.remove(KeyLengths())
        return self.given.mask["kv_lengths"].to(torch.int64)

    def take_band(self, part: Mask, by_lengths: bool) -> bool:
        """True for a part that became attributes."""
        ends = self.ends(part, by_lengths)
        if ends is None:
            return False
        left, right = ends
        if left is None and right == 0:
            self.attributes["is_causal"] = 1
            return True
        sizes = {"left_window_size": left, "right_window_size": right}
        if self.version < WITH_WINDOWS or self.attributes.keys() & sizes.keys():
            return False
        self.attributes |= {name: n for name, n in sizes.items() if n is not None}
        return True

    def ends(self, part: Mask, by_lengths: bool) -> tuple[int | None, int | None] | None:
        """How far left and right of its diagonal ONNX keeps keys for this part, None: all.

        None if the part is not a band, if its diagonal is another, and for negative bounds.
        """
        band = part.band(0, ()) if isinstance(part, Causal | Window) else part
        if not isinstance(band, Band) or not self.is_diagonal(part, by_lengths):
            return None
        left = None if band.low is None else -band.low
        return None if min(left or 0, band.high or 0) < 0 else (left, band.high)

    def is_diagonal(self, part: Mask, by_lengths: bool) -> bool:
        """True if ONNX's diagonal is the one of a band or a leaf."""
        if isinstance(part, Band):
            return part.ragged == (("kv_lengths",) if by_lengths else ())
        align = getattr(part, "align", None)
        if by_lengths:
            return align == "bottom_right"
        if align == "top_left":
            return True
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to load

        # One symbol is known to equal itself; nothing is assumed of two.
        return bool(statically_known_true(self.given.q.shape[2] == self.given.k.shape[2]))

    def tensor(self, parts: list[Mask]) -> Tensor | None:
        """The parts of the mask and the bias as one tensor, full in M and N as onnxruntime asks."""
        q, k = self.given.q, self.given.k
        biases = [x for data in self.given.modifiers for x in data.values()]
        made = None
        if biases:
            # onnxruntime hides a key where the bias is the lowest number; here it hides at -inf
            # alone, and half of the lowest has the same effect.
            lowest = torch.finfo(biases[0].dtype).min / 2
            made = torch.where(biases[0] == -INF, biases[0], biases[0].clamp(min=lowest))
        if parts:
            keep = join_masks(And, parts).keep(self.places)
            made = keep if made is None else torch.where(keep, made, made.new_full((), -INF))
        if made is None:
            return None
        made = made[(None,) * (4 - made.ndim)]
        return made.expand(*made.shape[:2], q.shape[2], k.shape[2])
