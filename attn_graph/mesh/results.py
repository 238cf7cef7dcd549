"""Results of `compile` and `explain` for a sharded graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from attrs import asdict, frozen

from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.mesh.layout import Mesh, Method, Placement, balance
from attn_graph.planner.cost import format_scaled
from attn_graph.printing.text import align_columns, show_call
from attn_graph.spec import TensorSpec

COLUMNS = (
    *("rank", "queries", "pairs", "flops", "sent", "received", "sent backward", "hops"),
    *("buffers", "compute", "transfer", "both"),
)
MOST_NAMES = 8  # of ranks in a line


class ShardedPlan(ABC):
    """One rank's plan for its part of a sharded graph. Made by `compile`.

    Every rank of the group calls its own, in the same order, for the rank's part of the graph's
    outputs. If an input requires grad the results are differentiable, once, and every rank has to
    go backward too. At the first call ranks compare their graphs, and raise GraphError if they
    disagree, or if one refuses its tensors. DTensors with the plan's placement give DTensors.
    Raises PlanMismatchError for shards other than `split` makes.
    """

    @abstractmethod
    def __call__(
        self, /, *tensors: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The rank's part of the outputs, of its parts of the inputs."""

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, TensorSpec]:
        """The rank's parts of the inputs, by name: dense, in the whole's memory order."""

    @property
    @abstractmethod
    def target(self) -> Target:
        """The kind of device of each rank."""


@final
@frozen
class Flow:
    """Bytes from one rank to another, in each pass."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: Flow) -> Flow:
        return Flow(self.forward + other.forward, self.backward + other.backward)


@final
@frozen
class Hop:
    """One step of a rank: its pairs of query and key, and its messages."""

    pairs: int
    sent: Flow
    received: Flow

    @property
    def moved(self) -> Flow:
        """The larger of both ways, in each pass: links work both ways at once."""
        ways = self.sent, self.received
        return Flow(max(x.forward for x in ways), max(x.backward for x in ways))


@final
@frozen
class RankFigures:
    """One rank's work. seconds: of both passes, None without a rate; compute and transfer are those
    of each alone, `seconds` with overlap.
    """

    queries: int
    hops: tuple[Hop, ...]
    flops: int
    buffers: int
    compute: float | None = None
    transfer: float | None = None
    seconds: float | None = None

    @property
    def pairs(self) -> int:
        """Pairs of query and key, over batch entries and heads."""
        return sum(hop.pairs for hop in self.hops)

    @property
    def sent(self) -> Flow:
        """Bytes sent by the rank."""
        return sum((hop.sent for hop in self.hops), Flow())

    @property
    def received(self) -> Flow:
        """Bytes received by the rank."""
        return sum((hop.received for hop in self.hops), Flow())


@final
@frozen
class Outlook:
    """The result of `explain` for a sharded graph: figures of each rank and of other methods.

    balance: pairs of the slowest rank over the mean. Bytes are exact; seconds are lower bounds by
    the target's peak and the link. owners: for each tile of the mask, queries down and keys across,
    the rank of its queries, or -1 if no batch entry keeps any; none if the sequence is whole on
    each rank.
    """

    mesh: Mesh
    placement: Placement
    method: Method | None  # None: nobody needs what others have
    target: Target
    link: float | None
    ranks: tuple[RankFigures, ...]
    others: tuple[Outlook, ...] = ()
    owners: tuple[tuple[int, ...], ...] = ()

    @property
    def balance(self) -> float:
        """The pairs of the slowest rank over the mean."""
        return balance([rank.pairs for rank in self.ranks])

    @property
    def seconds(self) -> float | None:
        """Of both passes: of the slowest rank."""
        times = [rank.seconds for rank in self.ranks]
        return None if None in times else max(x for x in times if x is not None)

    @property
    def sent(self) -> Flow:
        """Bytes sent by all ranks."""
        return sum((rank.sent for rank in self.ranks), Flow())

    def __str__(self) -> str:
        return "\n".join([self.title(), *self.rows(), *self.comparison()])

    def picture(self) -> str:
        """The mask as text, a mark a tile: the rank of its queries, - for an empty tile.

        Ranks of two digits show the last one.
        """
        return "\n".join(
            "".join("-" if rank < 0 else str(rank % 10) for rank in line) for line in self.owners
        )

    def _repr_html_(self) -> str:
        """For notebooks: figures of ranks and methods, and the mask in a colour for each rank."""
        from attn_graph.printing import html

        tables = ["\n".join(self.rows()), "\n".join(self.comparison())]
        parts = [html.element("p", self.title()), *map(html.code, filter(None, tables))]
        if self.owners:
            tiles = [[rank + 1 for rank in line] for line in self.owners]
            hues = [f"hsl({360 * n // len(self.ranks)} 60% 50%)" for n in range(len(self.ranks))]
            caption = f"queries down, keys across, a colour for each of {len(hues)} ranks"
            parts.append(html.tile_picture(tiles, caption, hues))
        return html.page(*parts)

    def title(self) -> str:
        """The first line of the text."""
        link = "no link known" if self.link is None else f"{format_scaled(self.link, 'B/s')} a way"
        method = f", {self.method}" if self.method else ""
        head = f"{show_call(self.mesh)}, {self.placement}{method}; {self.target}, {link}"
        text = f"{head}; balance {self.balance:.3f}"
        idle = [n for n, rank in enumerate(self.ranks) if not rank.pairs]
        if not idle or len(idle) == len(self.ranks):
            return text
        names = ", ".join(map(str, idle[:MOST_NAMES]))
        more = f" and {len(idle) - MOST_NAMES} more" if len(idle) > MOST_NAMES else ""
        who = f"rank {names} has" if len(idle) == 1 else f"ranks {names}{more} have"
        return f"{text}; {who} nothing to do"

    def rows(self) -> list[str]:
        """A line for each rank."""
        lines: list[tuple[str, ...]] = [COLUMNS]
        for n, rank in enumerate(self.ranks):
            flops = format_scaled(rank.flops, "flop")
            sizes = rank.sent.forward, rank.received.forward, rank.sent.backward
            buffers = str(len(rank.hops) - 1), format_bytes(rank.buffers)
            times = map(format_time, (rank.compute, rank.transfer, rank.seconds))
            head = str(n), f"{rank.queries:,}", f"{rank.pairs:,}", flops
            lines.append((*head, *map(format_bytes, sizes), *buffers, *times))
        return align_columns(lines)

    def comparison(self) -> list[str]:
        """A line for each method, if there are several."""
        if not self.others:
            return []
        head = ("method", "sent forward", "sent backward", "balance", "buffers", "seconds")
        rows = [
            (
                str(x.method),
                format_bytes(x.sent.forward),
                format_bytes(x.sent.backward),
                f"{x.balance:.3f}",
                format_bytes(max(rank.buffers for rank in x.ranks)),
                format_time(x.seconds),
            )
            for x in (self, *self.others)
        ]
        return align_columns([head, *rows])

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Plain numbers, texts, lists and dicts."""
        return {
            "mesh": asdict(self.mesh),
            "placement": self.placement,
            "method": self.method,
            "target": str(self.target),
            "link": self.link,
            "balance": self.balance,
            "sent": asdict(self.sent),
            "seconds": self.seconds,
            "ranks": [asdict(x) | {"pairs": x.pairs, "sent": asdict(x.sent)} for x in self.ranks],
            "others": [x.to_dict() for x in self.others],
        }


def format_time(seconds: float | None) -> str:
    """Seconds as text; "-": not known."""
    return "-" if seconds is None else format_scaled(seconds, "s")
