"""Arguments of `attention` that are read before its graph is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from attn_graph import masks
from attn_graph.errors import GraphError, show
from attn_graph.ir import ops
from attn_graph.ir.modifiers import Modifier

T = TypeVar("T")


def require_modifiers(modifiers: object) -> tuple[Modifier, ...]:
    """The modifiers. Raises GraphError for anything but a sequence of them."""
    if isinstance(modifiers, Sequence):
        steps = tuple(step for step in modifiers if isinstance(step, Modifier))
        if len(steps) == len(modifiers):
            return steps
    raise GraphError(
        f"attention: modifiers {show(modifiers)} are not a sequence of Modifiers; write "
        "modifiers=m, **tensors, where m, tensors = from_flex_score(score_mod)"
    )


def read_by(mask: object, modifiers: Iterable[Modifier]) -> set[str]:
    """The names of the tensors that a mask and modifiers read."""
    needs = mask.needs if isinstance(mask, masks.Mask) else ()
    return {*needs, *(name for step in modifiers for name in step.needs)}


def statistic_names(stats: object) -> tuple[str, ...]:
    """The requested statistics. Raises GraphError for unknown or repeated ones."""
    if isinstance(stats, bool):
        return ("lse",) * stats
    if isinstance(stats, str) or not isinstance(stats, Iterable):
        raise GraphError(
            f"attention: stats {show(stats)} is not a sequence of names; write ('lse',)"
        )
    names = tuple(stats)
    if unknown := [name for name in names if name not in ops.ROW_RESULTS]:
        raise GraphError(
            f"attention: stats {show(unknown[0])} is none of {', '.join(ops.ROW_RESULTS)}"
        )
    if len({*names}) < len(names):
        raise GraphError(f"attention: stats {names} name one statistic twice")
    return names


def two_segments(segments: object, kind: type[T]) -> tuple[T, T]:
    """q_segments and kv_segments. Raises GraphError for anything but a pair of this kind."""
    match segments:
        case (q, kv) if isinstance(q, kind) and isinstance(kv, kind):
            return q, kv
    raise GraphError(
        f"attention: segments {show(segments)} is not a pair of {kind.__name__}; write "
        "segments=(x, x) if queries and keys share them, or (q_segments, kv_segments)"
    )
