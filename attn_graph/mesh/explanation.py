"""Work, messages and times of all ranks, before anything runs and without a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import get_args

from attrs import evolve

from attn_graph.errors import GraphError, show
from attn_graph.machine.target import Target
from attn_graph.masks.places import Keys
from attn_graph.mesh.counts import count_box, find_seen
from attn_graph.mesh.layout import SEQUENCES, Method
from attn_graph.mesh.results import Flow, Hop, Outlook, RankFigures
from attn_graph.mesh.schedule import count, flow_between, heads_problem, visits_of
from attn_graph.mesh.sharded import Sharded
from attn_graph.spec import INF, NAMES

# Bytes a second that one device sends while it receives as many, by data sheets.
LINKS = {
    "pcie4": 31.5e9,  # 16 lanes: PCI-SIG
    "pcie5": 63e9,
    "infiniband": 50e9,  # one NDR port a GPU, 400 Gbit/s
}
TILES = 32  # along the longer side of a picture
# Half of both ways: A100; H100 and H200; B200 and GB200; B300 and GB300.
NVLINKS = {80: 300e9, 90: 450e9, 100: 900e9, 103: 900e9}


def link_speed(link: str | float | None, target: Target) -> float | None:
    """Bytes a second, each way, of a link by its name, or by their number, also as text.

    Raises GraphError for an unknown one.
    """
    if link is None:
        return None
    if isinstance(link, str):
        with suppress(ValueError):  # the name of a link
            link = float(link)
    if isinstance(link, (int, float)):
        if not 0 < link < INF or isinstance(link, bool):
            raise GraphError(
                f"link {show(link)} is not a number of bytes a second, which is above 0"
            )
        return link
    if link == "nvlink" and target.sm in NVLINKS:
        return NVLINKS[target.sm]
    if not isinstance(link, str) or link not in LINKS:
        known = ", ".join(LINKS)
        raise GraphError(
            f"link {show(link)} of {target} is not known; known are {known}, nvlink of sm "
            f"{', '.join(map(str, NVLINKS))}, and a number of bytes a second"
        )
    return LINKS[link]


def explain_mesh(sharded: Sharded, target: Target, link: str | float | None) -> Outlook:
    """The work and messages of each rank, their balance and time, with other methods to compare.

    link: of each rank, by its name or as bytes a second each way; None leaves times out. Raises
    GraphError for an unknown name.
    """
    speed = link_speed(link, target)
    names: Sequence[Method] = get_args(Method) if sharded.placement in SEQUENCES else ()
    possible: list[Method] = [x for x in names if x != "heads" or not heads_problem(sharded)]
    each = (sharded, *(sharded.by(x) for x in possible if x != sharded.method))
    figures = ((x, tuple(list_figures(x, target, speed))) for x in each)
    first, *others = (
        Outlook(x.mesh, x.placement, x.method, target, speed, ranks) for x, ranks in figures
    )
    return evolve(first, others=tuple(others), owners=picture_owners(sharded))


def picture_owners(sharded: Sharded) -> tuple[tuple[int, ...], ...]:
    """The owners of tiles of an `Outlook`, by the query in the middle of each."""
    M, N = sharded.totals
    if sharded.placement not in SEQUENCES or not M * N:
        return ()
    side = -(-max(M, N) // TILES)
    picture: list[tuple[int, ...]] = []
    for first in range(0, M, side):
        rows = range(first, min(M, first + side))
        middle, seen = rows[len(rows) // 2], find_seen(sharded, rows)
        holdings = enumerate(sharded.holdings)
        owner = next(n for n, own in holdings if any(middle in chunk for chunk in own.rows))
        tiles = (Keys.between(at, min(N, at + side)) for at in range(0, N, side))
        picture.append(tuple(owner if (seen & tile).intervals else -1 for tile in tiles))
    return tuple(picture)


def list_figures(sharded: Sharded, target: Target, link: float | None) -> Iterator[RankFigures]:
    """The figures of each rank."""
    q, k, v = (sharded.graph.types[i] for i in sharded.eqn.args[:3])
    peak = target.peak(NAMES[q.dtype])
    D, E = k.shape[-1], v.shape[-1]
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
            else add_times(figures, sharded.method, (widths[0] / peak, widths[1] / peak), link)
        )


def list_hops(sharded: Sharded, rank: int) -> Iterator[Hop]:
    """A rank's steps in order; its own keys come first."""
    ranks = sharded.mesh.ranks
    visits = (
        {visit.step: visit for visit in sharded.once(visits_of, rank)} if sharded.method else {}
    )
    for step in range(ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        there, here = hop_flows(sharded, rank, to, source) if step else (Flow(), Flow())
        pairs = 0
        if sharded.method in (None, "heads"):
            pairs = 0 if step else count_box(sharded, sharded.own_box(rank))
        elif step in visits:
            pairs = sum(count_box(sharded, job.box) for job in visits[step].jobs)
        if not step or pairs or there != Flow() or here != Flow():
            yield Hop(pairs, there, here)


def hop_flows(sharded: Sharded, rank: int, to: int, source: int) -> tuple[Flow, Flow]:
    """The bytes sent and received by a rank at a step: gradients travel against the keys."""
    there, here = sharded.once(flow_between, rank, to), sharded.once(flow_between, source, rank)
    if sharded.method not in ("ring", "gather"):
        return there, here
    gone, come = there.forward, here.forward
    sums = there.backward - gone - sharded.once(flow_between, to, rank).forward
    back = here.backward - come - sharded.once(flow_between, rank, source).forward
    return Flow(gone, gone + come + sums), Flow(come, come + gone + back)


def hop_buffers(sharded: Sharded, hops: Sequence[Hop]) -> int:
    """The largest bytes of messages held by a rank at once in the forward.

    Under "ring" those of one hop and of the hop before; else all.
    """
    if sharded.method != "ring":
        return sum(hop.sent.forward + hop.received.forward for hop in hops)
    before = [0, *(hop.received.forward for hop in hops)]
    pairs = zip(before, hops, strict=False)
    return max(came + hop.sent.forward + hop.received.forward for came, hop in pairs)


def predict_ranks(outlook: Outlook, whole: Sequence[float]) -> float:
    """The seconds of the slowest rank, if pairs take as long as on one device.

    whole: the predicted seconds of each pass of the undivided attention, forward first. Messages
    take no time if the outlook has no link.
    """
    pairs = max(1, sum(rank.pairs for rank in outlook.ranks))
    link = INF if outlook.link is None else outlook.link
    each = [x / pairs for x in whole]
    timed = (add_times(rank, outlook.method, each, link) for rank in outlook.ranks)
    return max(rank.seconds or 0.0 for rank in timed)


def add_times(
    figures: RankFigures, method: Method | None, each: Sequence[float], link: float
) -> RankFigures:
    """The figures with seconds. each: of a pair, forward and, with a gradient, backward."""
    alone, moving, both = 0.0, 0.0, 0.0
    for seconds, side in zip(each, ("forward", "backward"), strict=False):
        compute = [hop.pairs * seconds for hop in figures.hops]
        moved = [getattr(hop.moved, side) / link for hop in figures.hops]
        alone, moving = alone + sum(compute), moving + sum(moved)
        both += overlap(method, compute, moved)
    return evolve(figures, compute=alone, transfer=moving, seconds=both)


def overlap(method: Method | None, compute: Sequence[float], moved: Sequence[float]) -> float:
    """Seconds of hops, each overlapped with the computation before it.

    Under "gather" all are under way while the rank computes with its own keys. Exchanges of heads,
    and sums of gradients at the end, overlap with nothing.
    """
    if method == "ring":
        return sum(max(a, b) for a, b in zip(compute, (*moved[1:], 0.0), strict=True))
    if method == "gather":
        return max(compute[0], sum(moved)) + sum(compute[1:])
    return sum(compute) + sum(moved)
