"""What ranks compute and send, and how long it takes, before anything runs and without a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final, get_args

from attrs import asdict, evolve, frozen

from attn_graph.compiler import resolve_target
from attn_graph.errors import GraphError
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.masks.moving import Box
from attn_graph.mesh.counts import count_box
from attn_graph.mesh.layout import SEQUENCES, balance, divide_heads
from attn_graph.mesh.schedule import visits_of
from attn_graph.mesh.sharded import Method, Sharded
from attn_graph.mesh.traffic import Flow, count, flow_between, heads_problem
from attn_graph.planner.cost import format_scaled
from attn_graph.printing.text import align_columns, show_call
from attn_graph.spec import NAMES

# Bytes a second that one device sends while it receives as many, by data sheets.
LINKS = {
    "pcie4": 31.5e9,  # 16 lanes: PCI-SIG
    "pcie5": 63e9,
    "infiniband": 50e9,  # one NDR port a GPU, 400 Gbit/s
}
COLUMNS = (
    *("rank", "queries", "pairs", "flops", "sent", "received", "sent backward", "hops"),
    *("buffers", "compute", "transfer", "both"),
)
NVLINKS = {80: 300e9, 90: 450e9, 100: 900e9}  # A100, H100 and H200, B200: half of both ways


@final
@frozen
class Hop:
    """One step of a rank: pairs of query and key that it computes, and what comes and goes."""

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
    """What one rank does. seconds: of both passes, None where a rate is not known; compute and
    transfer are those of each alone, `seconds` with one behind the other where they overlap."""

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
        """Bytes that it sends."""
        return sum((hop.sent for hop in self.hops), Flow())

    @property
    def received(self) -> Flow:
        """Bytes that it receives."""
        return sum((hop.received for hop in self.hops), Flow())


@final
@frozen
class Outlook:
    """A sharded graph on a target: figures of each rank, and the same of the other methods.

    balance: pairs of the slowest rank over the mean. Bytes are exact; seconds are those of the
    target's peak and of the link, which nothing beats.
    """

    sharded: Sharded
    target: Target
    link: float | None
    ranks: tuple[RankFigures, ...]
    others: tuple[Outlook, ...] = ()

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
        """Bytes that all ranks send."""
        return sum((rank.sent for rank in self.ranks), Flow())

    def __str__(self) -> str:
        return "\n".join([self.title(), *self.rows(), *self.comparison()])

    def title(self) -> str:
        """What is explained, in a line."""
        x = self.sharded
        link = "no link known" if self.link is None else f"{format_scaled(self.link, 'B/s')} a way"
        method = f", {x.method}" if x.method else ""
        head = f"{show_call(x.mesh)}, {x.placement}{method}; {self.target}, {link}"
        return f"{head}; balance {self.balance:.3f}"

    def rows(self) -> list[str]:
        """A line for each rank."""
        return align_columns([COLUMNS, *(rank_row(n, x) for n, x in enumerate(self.ranks))])

    def comparison(self) -> list[str]:
        """A line for each method, if there are several."""
        if not self.others:
            return []
        head = ("method", "sent forward", "sent backward", "balance", "buffers", "seconds")
        rows = [
            (
                str(x.sharded.method),
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
            "sharded": str(self.sharded),
            "target": str(self.target),
            "link": self.link,
            "balance": self.balance,
            "sent": asdict(self.sent),
            "seconds": self.seconds,
            "ranks": [asdict(x) | {"pairs": x.pairs, "sent": asdict(x.sent)} for x in self.ranks],
            "others": [x.to_dict() for x in self.others],
        }


def rank_row(number: int, rank: RankFigures) -> tuple[str, ...]:
    """The cells of a rank's line."""
    sizes = rank.sent.forward, rank.received.forward, rank.sent.backward
    times = rank.compute, rank.transfer, rank.seconds
    return (
        *(str(number), str(rank.queries), str(rank.pairs), format_scaled(rank.flops, "flop")),
        *map(format_bytes, sizes),
        *(str(len(rank.hops) - 1), format_bytes(rank.buffers)),
        *map(format_time, times),
    )


def format_time(seconds: float | None) -> str:
    """Seconds as text; "-": not known."""
    return "-" if seconds is None else format_scaled(seconds, "s")


def link_speed(link: str | float | None, target: Target) -> float | None:
    """Bytes a second, each way, of a link by its name. Raises GraphError for an unknown one."""
    if link is None or isinstance(link, (int, float)):
        return link
    if link == "nvlink" and target.sm in NVLINKS:
        return NVLINKS[target.sm]
    if link not in LINKS:
        known = ", ".join(LINKS)
        raise GraphError(
            f"link {link!r} of {target} is not known; known are {known}, nvlink of sm "
            f"{', '.join(map(str, NVLINKS))}, and a number of bytes a second"
        )
    return LINKS[link]


def explain_sharded(
    sharded: Sharded, *, target: Target | str | None = None, link: str | float | None = None
) -> Outlook:
    """What each rank computes and sends, how balanced, and how long, beside other methods.

    Nothing runs, and no process is needed. target: a device or its name, by default this machine's.
    link: what each rank sends by: "nvlink", "pcie4", "pcie5", "infiniband", or bytes a second each
    way; None leaves times out. Raises GraphError for a name that is not known.
    """
    place = resolve_target(target)
    speed = link_speed(link, place)
    names: Sequence[Method] = get_args(Method) if sharded.placement in SEQUENCES else ()
    possible = [x for x in names if x != "heads" or not heads_problem(sharded)]
    others = (evolve(sharded, method=x) for x in possible if x != sharded.method)
    return Outlook(
        sharded,
        place,
        speed,
        tuple(list_figures(sharded, place, speed)),
        tuple(Outlook(x, place, speed, tuple(list_figures(x, place, speed))) for x in others),
    )


def list_figures(sharded: Sharded, target: Target, link: float | None) -> Iterator[RankFigures]:
    """The figures of each rank."""
    q, k, v = (sharded.graph.types[i] for i in sharded.eqn.args[:3])
    peak = target.peak(NAMES[q.dtype])
    D, E = k.shape[3], v.shape[3]
    widths = (2 * (D + E), 2 * (3 * D + 2 * E)) if sharded.graph.has_gradient else (2 * (D + E), 0)
    for rank, own in enumerate(sharded.holdings):
        hops = tuple(list_hops(sharded, rank))
        figures = RankFigures(
            count(own.rows), hops, sum(hop.pairs for hop in hops) * sum(widths),
            hop_buffers(sharded, hops),
        )  # fmt: skip
        yield (
            figures
            if peak is None or link is None
            else add_times(figures, sharded, (widths[0] / peak, widths[1] / peak), link)
        )


def list_hops(sharded: Sharded, rank: int) -> Iterator[Hop]:
    """What a rank does, step by step; its own keys come first."""
    ranks = sharded.mesh.ranks
    visits = {visit.step: visit for visit in visits_of(sharded, rank)}
    for step in range(ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        there, here = hop_flows(sharded, rank, to, source) if step else (Flow(), Flow())
        pairs = 0
        if sharded.method == "heads" and not step:
            pairs = heads_pairs(sharded, rank)
        elif sharded.method != "heads" and step in visits:
            pairs = sum(count_box(sharded, job.box) for job in visits[step].jobs)
        if not step or pairs or there != Flow() or here != Flow():
            yield Hop(pairs, there, here)


def hop_flows(sharded: Sharded, rank: int, to: int, source: int) -> tuple[Flow, Flow]:
    """What a rank sends and receives at a step: gradients go against the way of the keys."""
    there, here = flow_between(sharded, rank, to), flow_between(sharded, source, rank)
    if sharded.method not in ("ring", "gather"):
        return there, here
    gone, come = there.forward, here.forward
    sums = there.backward - gone - flow_between(sharded, to, rank).forward
    back = here.backward - come - flow_between(sharded, rank, source).forward
    return Flow(gone, gone + come + sums), Flow(come, come + gone + back)


def heads_pairs(sharded: Sharded, rank: int) -> int:
    """The pairs of the heads that a rank computes."""
    B, H, M, N = sharded.sizes
    G = sharded.graph.types[sharded.eqn.args[1]].shape[1]
    heads, _ = divide_heads(H, G, sharded.mesh.ranks)[rank]
    return count_box(sharded, Box(range(B), heads, range(M), range(N), sharded.sizes))


def hop_buffers(sharded: Sharded, hops: Sequence[Hop]) -> int:
    """Bytes of messages that a rank holds at once, at most: of two hops, or of all."""
    each = [hop.sent.forward + hop.received.forward for hop in hops]
    return sum(each) if sharded.method != "ring" else sum(sorted(each)[-2:])


def add_times(
    figures: RankFigures, sharded: Sharded, each: tuple[float, float], link: float
) -> RankFigures:
    """The figures with seconds. each: of a pair, forward and backward."""
    alone, moving, both = 0.0, 0.0, 0.0
    for seconds, side in zip(each, ("forward", "backward"), strict=True):
        compute = [hop.pairs * seconds for hop in figures.hops]
        moved = [getattr(hop.moved, side) / link for hop in figures.hops]
        alone, moving = alone + sum(compute), moving + sum(moved)
        both += overlap(sharded.method, compute, moved)
    return evolve(figures, compute=alone, transfer=moving, seconds=both)


def overlap(method: Method | None, compute: Sequence[float], moved: Sequence[float]) -> float:
    """Seconds of hops of which the next is under way while one is computed.

    Under "gather" all are under way while the rank's own keys are computed; where heads are
    exchanged nothing is computed meanwhile, nor while gradients are added up at the end.
    """
    if method == "ring":
        return sum(max(a, b) for a, b in zip(compute, (*moved[1:], 0.0), strict=True))
    if method == "gather":
        return max(compute[0], sum(moved)) + sum(compute[1:])
    return sum(compute) + sum(moved)
