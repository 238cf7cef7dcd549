"""What `explain_model` answers: a model's memory, and the attention of its layers, in words too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, final

from attrs import asdict, frozen

from attn_graph.instruments.explanation import Explanation, attention_masks
from attn_graph.ir.graph import Graph
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.mesh.results import Outlook
from attn_graph.planner.cost import format_scaled
from attn_graph.spec import NAMES

Phase = Literal["decode", "prefill", "train"]
Division = Literal["heads", "context"]


@final
@frozen
class LayerKind:
    """Layers with equal attention.

    seconds: the predicted time of all of them, of both passes in training, on the slowest GPU; None
    if no rate of the backend is known. cache: bytes of all their parts of the model's cache, on
    a GPU. For a context divided over several GPUs the explanation is of the whole attention;
    outlook: messages and work of each GPU; part: a GPU's part of the operands.
    """

    layers: tuple[str, ...]
    explanation: Explanation
    seconds: float | None
    cache: int
    outlook: Outlook | None = None
    part: Graph | None = None

    @property
    def leaves_out_messages(self) -> bool:
        """True if GPUs send messages, and the time is without them: their link is not known."""
        return self.outlook is not None and self.outlook.link is None and self.sent > 0

    @property
    def sent(self) -> int:
        """Bytes sent in a layer by a GPU, backward too if there is one: the most of any."""
        sent = [rank.sent for rank in self.outlook.ranks] if self.outlook else []
        trains = self.explanation.backward is not None
        return max((x.forward + trains * x.backward for x in sent), default=0)

    @property
    def workspace(self) -> int:
        """Bytes that a layer's attention needs while it runs, messages among them. Layers share
        them."""
        buffers = max(rank.buffers for rank in self.outlook.ranks) if self.outlook else 0
        memory = self.explanation.memory
        if memory is None:
            return buffers
        forward = memory.workspace_forward + memory.temporary_forward
        return max(forward, memory.workspace_backward + memory.temporary_backward) + buffers

    @property
    def saved(self) -> int:
        """Bytes that the attention of all these layers keeps from forward to backward, on a GPU."""
        memory = self.explanation.memory
        parts = len(self.outlook.ranks) if self.outlook else 1
        whole = len(self.layers) * memory.saved if memory and self.explanation.backward else 0
        return -(-whole // parts)

    def lines(self) -> Iterator[str]:
        """The layers, their backend and their figures."""
        backward = self.explanation.backward
        passes = {"": self.explanation} | ({"backward: ": backward} if backward else {})
        parts = f", one of {len(self.outlook.ranks)} parts" if self.outlook else ""
        graph = self.explanation.graph
        inputs = (self.part or graph).inputs
        shapes = ", ".join(f"{x.name} {NAMES[x.spec.dtype]}{[*x.spec.shape]}" for x in inputs)
        (mask,) = attention_masks(graph) or [None]
        own = f"{shapes}, {mask.written() if mask is not None else 'no mask'}"
        names = dict.fromkeys(re.sub(r"\d+", "*", name) for name in self.layers)
        yield f"{len(self.layers)} x {', '.join(names)}: {own}{parts}"
        whole = "whole: " if parts else ""
        for name, side in passes.items():
            yield f"  {whole}{name}{side.backend or 'no backend'}: {side.cause or side.verdict}"
        time = format_least(self.seconds, self.leaves_out_messages)
        figures = {"cache": self.cache, "saved for backward": self.saved}
        texts = [f"{name} {format_bytes(count)}" for name, count in figures.items() if count]
        shared = "not all known" if is_untold(self) else format_bytes(self.workspace)
        yield f"  {', '.join([f'time {time}', *texts, f'workspace {shared}'])}"
        if self.outlook:
            yield f"  method {self.outlook.method}: a GPU sends {format_bytes(self.sent)} a layer"

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Plain numbers, texts, lists and dicts."""
        figures = {x: getattr(self, x) for x in ("seconds", "cache", "saved", "workspace")}
        return {"layers": [*self.layers], **figures, "explanation": self.explanation.to_dict()}


def is_untold(kind: LayerKind) -> bool:
    """True if some workspace is known only once its plan is built."""
    memory = kind.explanation.memory
    return memory is not None and bool(memory.untold)


def format_least(seconds: float | None, is_least: bool) -> str:
    """A predicted time in words."""
    if seconds is None:
        return "unknown"
    return f"{'at least ' if is_least else ''}{format_scaled(seconds, 's')}"


@final
@frozen
class ModelExplanation:
    """A model's attention and memory in one phase on a target, before it exists.

    Bytes are of one GPU. weights: of parameters and buffers. cache: of the memory that the model's
    cache holds after the call. saved: of all tensors kept from forward to backward, by the whole
    model. optimizer: of AdamW's state. tensors: the most bytes of all other tensors at one time,
    cache, saved and gradients among them. gpus, divide: how many GPUs share the model, and by what.
    reserve: bytes left for CUDA itself and gaps between allocations. most_batch, most_context: the
    largest that fit, with the other as it is; None if not searched. notes: what to know of these
    figures.
    """

    model: str
    target: Target
    phase: Phase
    batch: int
    context: int
    weights: int
    cache: int
    saved: int
    optimizer: int
    tensors: int
    reserve: int
    kinds: tuple[LayerKind, ...]
    gpus: int = 1
    divide: Division = "heads"
    limit: int | None = None  # of the context, by the config
    most_batch: int | None = None
    most_context: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def workspace(self) -> int:
        """Bytes of the workspace, shared by all layers."""
        return max(kind.workspace for kind in self.kinds)

    @property
    def peak(self) -> int:
        """The most bytes in use at one time."""
        return self.weights + self.optimizer + self.tensors + self.workspace

    @property
    def room(self) -> int | None:
        """Bytes of the target's memory without the reserve; None if they are not known."""
        return None if self.target.memory is None else self.target.memory - self.reserve

    @property
    def fits(self) -> bool | None:
        """True if the peak is in the target's memory; None if not known."""
        return None if self.room is None else self.peak <= self.room

    @property
    def seconds(self) -> float | None:
        """The predicted time of all layers' attention; None if one is not known."""
        times = [kind.seconds for kind in self.kinds]
        return None if None in times else sum(x for x in times if x is not None)

    def __str__(self) -> str:
        sizes = f"batch {self.batch}, context {self.context}"
        many = f"{self.gpus} x " if self.gpus > 1 else ""
        place = f"{many}{self.target}{f' by {self.divide}' if many else ''}"
        first = f"{self.model} on {place}, {self.phase}, {sizes}: {self.verdict}"
        kinds = (line for kind in self.kinds for line in kind.lines())
        notes = (f"  - {note}" for note in self.notes)
        return "\n".join([first, *notes, *self.figures(), *kinds])

    @property
    def verdict(self) -> str:
        """The answer, with both numbers."""
        need = f"{'at least ' if any(map(is_untold, self.kinds)) else ''}{format_bytes(self.peak)}"
        if self.room is None or self.target.memory is None:
            return (
                f"fits: unknown, needs {need}; the memory of {self.target.name} is not known, so "
                "name a GPU as the target"
            )
        verb = "fits" if self.fits else "does not fit"
        less = f" ({format_bytes(self.target.memory)} less the reserve)" if self.reserve else ""
        return f"{verb}, needs {need} of {format_bytes(self.room)}{less}"

    def figures(self) -> Iterator[str]:
        """The kinds of memory, the largest sizes that fit, and the time of attention."""
        yield f"weights {format_bytes(self.weights)}"
        if self.optimizer:
            yield f"state of AdamW {format_bytes(self.optimizer)}"
        parts = {"cache": self.cache, "saved for backward": self.saved}
        texts = [f"{name} {format_bytes(count)}" for name, count in parts.items() if count]
        among = f", among them {', '.join(texts)}" if texts else ""
        yield f"other tensors {format_bytes(self.tensors)}{among}"
        workspace, reserve = format_bytes(self.workspace), format_bytes(self.reserve)
        yield f"workspace of attention {workspace}, reserve {reserve}"
        if self.most_batch is not None:
            context = f"{self.most_context}{self.end_of_search}"
            yield f"largest batch {self.most_batch}, largest context {context}"
        if self.seconds is not None:
            time = format_least(self.seconds, any(x.leaves_out_messages for x in self.kinds))
            yield f"attention takes {time} in all layers"

    @property
    def end_of_search(self) -> str:
        """Why no larger context was tried, if one may fit."""
        if self.most_context == self.limit:
            return ", the config's most"
        above = self.limit is not None and self.context > self.limit
        return (
            ", the most that was asked for" if above and self.most_context == self.context else ""
        )

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Plain numbers, texts, lists and dicts."""
        derived = {x: getattr(self, x) for x in ("workspace", "peak", "room", "fits", "seconds")}
        given = asdict(self, recurse=False) | {"target": str(self.target), "notes": [*self.notes]}
        return given | derived | {"kinds": [kind.to_dict() for kind in self.kinds]}
