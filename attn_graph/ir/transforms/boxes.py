"""The attention of a box of places: its op and the operands it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import add
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Eqn
from attn_graph.ir.modifiers import UNPLACED, Alibi, Modifier, default_slopes
from attn_graph.ir.terms.addends import Addend, Factor
from attn_graph.ir.terms.relative import RelativeBias
from attn_graph.ir.transforms.moving import (
    WHOLE,
    Box,
    cut_tensor,
    move_mask,
    move_text,
    refuse_lengths,
)
from attn_graph.masks import Data, needs_of
from attn_graph.masks.canonical import canonical_mask

SLOPES = "slopes"  # the paper's slopes of ALiBi in a box; the whole has no tensor of them
Inputs = Sequence[torch.Tensor]


@final
@frozen
class Feed:
    """An operand of a box: its name in the box's op, its axes, and the input it is cut from.

    source: the number of that input; None for the paper's slopes of ALiBi [H].
    """

    name: str
    axes: str
    source: int | None


@final
@frozen
class Piece:
    """The attention of a box of places: its op, and its operands after q, k and v."""

    box: Box
    node: Attention
    feeds: tuple[Feed, ...]

    def tensors(self, inputs: Inputs, here: Box) -> list[torch.Tensor]:
        """The operands, cut from the inputs. here: the box's place in the inputs."""
        return [cut_feed(feed, self.box, inputs, here) for feed in self.feeds]


def cut_feed(feed: Feed, box: Box, inputs: Inputs, here: Box) -> torch.Tensor:
    if feed.source is None:
        slopes = default_slopes(box.sizes[1])
        whole = torch.tensor(slopes, dtype=torch.float32, device=inputs[0].device)
        return whole[box.heads.start : box.heads.stop]
    name = feed.name.removeprefix(WHOLE)
    return cut_tensor(feed.name, feed.axes, box, {name: inputs[feed.source]}, here)


def move_attention(eqn: Eqn, box: Box) -> Piece:
    """The attention of a box, without sinks: they join all boxes of a query, once.

    It is a part unless the box has all keys. Raises GraphError for masks and steps that can't move.
    """
    node: Attention = eqn.op.forward
    whole = node.split(eqn.args)
    steps = tuple(move_modifier(step, box) for step in node.modifiers)
    mask = None if node.mask is None else canonical_mask(move_mask(node.mask, box), *box.shape[2:])
    feeds = [
        feed
        for step, inputs in zip(steps, whole.modifiers, strict=True)
        for feed in list_feeds(step.needs, inputs)
    ]
    feeds += list_feeds(needs_of(mask), whole.mask)
    part = node.part or node.sinks or len(box.keys) < box.sizes[3]
    own = evolve(node, modifiers=steps, mask=mask, sinks=False, part=part)
    if node.dropout:
        *first, heads = node.origin or (0, 0, 0, 0, box.sizes[1])
        starts = (x.start for x in (box.batch, box.heads, box.rows, box.keys))
        own = evolve(own, origin=(*map(add, first, starts), heads))
        feeds += [Feed("seed", "", whole.seed), Feed("offset", "", whole.offset)]
    return Piece(box, own, tuple(feeds))


def list_feeds(needs: Mapping[str, Data], inputs: Mapping[str, int]) -> Iterator[Feed]:
    """The operands of a moved step or mask. inputs: those of the whole one, by name."""
    for name, data in needs.items():
        yield Feed(name, data.axes, inputs.get(name.removeprefix(WHOLE)))


def move_modifier(modifier: Modifier, box: Box) -> Modifier:
    """The modifier of a box. Raises GraphError for a user's own."""
    if isinstance(modifier, UNPLACED):
        return modifier
    match modifier:
        case RelativeBias(places=True):
            return modifier
        case RelativeBias():
            first = modifier.start[0] + box.rows.start, modifier.start[1] + box.keys.start
            if box.lengths:
                return evolve(modifier, ragged=(), start=first, whole=box.ends(modifier.ragged))
            sizes = modifier.whole or box.sizes[2:]
            return modifier if box.has_all_positions else evolve(modifier, start=first, whole=sizes)
        case Alibi():
            return move_alibi(modifier, box)
        case Addend(text, elements, integers) | Factor(text, elements, integers):
            refuse_lengths({**dict(elements), **dict(integers)})
            return evolve(modifier, text=move_text(text, box))
    raise GraphError(
        f"shard: {modifier} is your own step and can't be moved to a part of the places; "
        "write it as an ag.Addend, or pass its values as a bias"
    )


def move_alibi(alibi: Alibi, box: Box) -> Modifier:
    """ALiBi as an Addend: distances from the whole's diagonal, slopes from a tensor.

    A box of all queries and keys has that diagonal itself, so it keeps an Alibi with slopes.
    """
    if box.has_all_positions and not box.lengths:
        return evolve(alibi, default=alibi.default and len(box.heads) == box.sizes[1])
    M, N = box.ends(alibi.ragged)
    ragged = alibi.ragged if alibi.align == "bottom_right" and not box.lengths else ()
    shift = box.rows.start - box.keys.start
    if alibi.align == "bottom_right":
        shift += (0 if "kv_lengths" in ragged else N) - (0 if "q_lengths" in ragged else M)
    signs = {"kv_lengths": "+", "q_lengths": "-"}
    gap = " ".join([f"i - j + {shift}", *(f"{signs[x]} {WHOLE}{x}" for x in ragged)])
    name, axes = (SLOPES, "h") if alibi.default else ("alibi", "bh" if alibi.per_batch else "h")
    lengths = tuple((f"{WHOLE}{x}", "b") for x in ragged)
    return Addend(f"real(0 - abs({gap})) * real({name})", ((name, axes),), lengths)
