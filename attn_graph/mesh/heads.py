"""The sequence is exchanged for heads and back: each rank attends whole sequences of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

from attn_graph.mesh.exchange import pack, post, unpack
from attn_graph.mesh.layout import Ranges
from attn_graph.mesh.schedule import Job, absent_rows, count
from attn_graph.mesh.sharded import Sharded, pair_chunks, take
from attn_graph.mesh.site import BoxRun, Site
from attn_graph.mesh.totals import Cotangents, RowResults, Totals

Tensors = Sequence[torch.Tensor]
Shape = tuple[int, ...]
Kinds = str  # a letter for each tensor that is exchanged: q has query heads, k key/value heads


def heads_of(site: Site, rank: int) -> dict[str, range]:
    """A rank's heads, of queries and of keys."""
    return dict(zip("qk", site.sharded.head_parts[rank], strict=True))


def chunks_of(site: Site, rank: int) -> dict[str, Ranges]:
    """A rank's places of the sequence, of queries and of keys."""
    own = site.sharded.holdings[rank]
    return {"q": own.rows, "k": own.keys}


def to_heads(site: Site, kinds: Kinds, tensors: Tensors) -> list[torch.Tensor]:
    """From the rank's part of the sequence, of all heads, all of the sequence of its heads.

    Tensors [B,heads,part,...]; kinds: of each whether it has queries, q, or keys, k.
    """
    mine, sizes = heads_of(site, site.rank), dict(zip("qk", site.sharded.totals, strict=True))

    def cut(rank: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        heads = heads_of(site, rank)[kind]
        return x.narrow(1, heads.start, len(heads))

    def shape(rank: int, kind: str, x: torch.Tensor) -> Shape:
        return x.shape[0], len(mine[kind]), count(chunks_of(site, rank)[kind]), *x.shape[3:]

    parts = swap(site, kinds, tensors, cut, shape)
    wholes = [
        x.new_empty(x.shape[0], len(mine[kind]), sizes[kind], *x.shape[3:])
        for kind, x in zip(kinds, tensors, strict=True)
    ]
    for rank, each in parts.items():
        for kind, whole, part in zip(kinds, wholes, each, strict=True):
            for place, piece in pair_chunks(whole, chunks_of(site, rank)[kind], part):
                place.copy_(piece)
    return wholes


def to_sequence(site: Site, kinds: Kinds, tensors: Tensors) -> dict[int, list[torch.Tensor]]:
    """The way back: by rank, this rank's part of the sequence, of the other's heads."""
    mine = chunks_of(site, site.rank)

    def cut(rank: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        return take(x, along(x, 2, chunks_of(site, rank)[kind]))

    def shape(rank: int, kind: str, x: torch.Tensor) -> Shape:
        return x.shape[0], len(heads_of(site, rank)[kind]), count(mine[kind]), *x.shape[3:]

    return swap(site, kinds, tensors, cut, shape)


def along(x: torch.Tensor, axis: int, chunks: Ranges) -> list[Ranges]:
    """Parts of one axis of a tensor, and all of the others."""
    return [chunks if a == axis else (range(n),) for a, n in enumerate(x.shape)]


def swap(
    site: Site,
    kinds: Kinds,
    tensors: Tensors,
    cut: Callable[[int, str, torch.Tensor], torch.Tensor],
    shape: Callable[[int, str, torch.Tensor], Shape],
) -> dict[int, list[torch.Tensor]]:
    """Send each rank its parts of tensors; return all ranks' parts, the own ones included.

    cut: a rank's part of a tensor of a kind. shape: of the part that comes from a rank.
    """
    ranks, each = range(site.sharded.mesh.ranks), [*zip(kinds, tensors, strict=True)]
    outgoing = {r: pack(cut(r, kind, x) for kind, x in each) for r in ranks}
    shapes = {r: [shape(r, kind, x) for kind, x in each] for r in ranks}
    others = {r: flat for r, flat in outgoing.items() if r != site.rank}
    sizes = {r: sum(map(prod, shapes[r])) for r in others}
    came = post(site.line, others, sizes, outgoing[site.rank]).wait()
    return {r: unpack(came.get(r, outgoing[r]), shapes[r]) for r in ranks}


def attend_heads(site: Site, qkv: Tensors, inputs: Tensors) -> Iterator[BoxRun]:
    """The attention of the rank's heads: all queries, all keys, of each sequence."""
    heads = heads_of(site, site.rank)["q"]
    for jobs in site.batches(site.sharded.once(list_wholes, heads)):
        yield site.attend(jobs, qkv, inputs)


def list_wholes(sharded: Sharded, heads: range) -> tuple[Job, ...]:
    """Some heads of all queries and keys."""
    return tuple(
        Job(sharded.box(own, own.rows, own.keys, heads), own.rows, own.keys)
        for own in sharded.stretches
    )


def lay_rows(like: torch.Tensor, pieces: Sequence[tuple[Ranges, torch.Tensor]]) -> torch.Tensor:
    """Zeros with pieces at their chunks of positions; a piece that has all of them is itself it."""
    if [chunks for chunks, _ in pieces] == [(range(like.shape[2]),)]:
        return pieces[0][1]
    whole = torch.zeros_like(like)
    for chunks, part in pieces:
        for place, piece in pair_chunks(whole, chunks, part):
            place.copy_(piece)
    return whole


def prepare_heads(site: Site) -> None:
    """Plan the rank's heads. Raises NoBackendError."""
    inputs, own = site.unpack_all(site.empty_inputs()), heads_of(site, site.rank)
    sizes = dict(zip("qk", site.sharded.totals, strict=True))
    given = zip("qkk", (inputs[n] for n in site.sharded.eqn.args[:3]), strict=True)
    shapes = ((x, (x.shape[0], len(own[kind]), sizes[kind], x.shape[3])) for kind, x in given)
    next(attend_heads(site, [x.new_empty(shape) for x, shape in shapes], inputs), None)


def head_shapes(site: Site) -> list[tuple[int, ...]]:
    """The shapes of the tensors saved by `forward_heads`."""
    sharded, own = site.sharded, heads_of(site, site.rank)
    q, k, v = (sharded.graph.types[n].shape for n in sharded.eqn.args[:3])
    (M, N), B = sharded.totals, sharded.entries
    rows = B, len(own["q"]), M
    keys = [(B, len(own["k"]), N, x[-1]) for x in (k, v)]
    return [(*rows, q[-1]), *keys, (*rows, v[-1]), rows]


def forward_heads(site: Site, inputs: Tensors) -> tuple[RowResults, Tensors]:
    """The results of the rank's queries, and q, k, v, o and lse of its heads for the backward."""
    numbers, stats = site.sharded.eqn.args[:3], site.sharded.node.stats
    qkv = to_heads(site, "qkk", [inputs[n] for n in numbers])
    own, heads = RowResults.empty(site, qkv[0], qkv[2].shape[3]), heads_of(site, site.rank)["q"]
    for run in attend_heads(site, qkv, inputs):
        own.add(run.rows, *run.forward())
    absent = site.sharded.once(absent_rows, site.sharded.spans("i"))
    own.join_sinks(site.sinks(inputs), heads, absent)
    o, rows = own.o.to(qkv[0].dtype), [*own.rows.values()]
    results = RowResults.empty(site, inputs[numbers[0]], o.shape[3])
    outs = to_sequence(site, "q", [o]), to_sequence(site, "q" * len(stats), rows)
    for r in range(site.sharded.mesh.ranks):
        heads = heads_of(site, r)["q"]
        at = slice(heads.start, heads.stop)
        results.o[:, at] = outs[0][r][0]
        for name, x in zip(stats, outs[1][r], strict=True):
            results.rows[name][:, at] = x
    return results, (*qkv, o, rows[0])


def backward_heads(site: Site, inputs: Tensors, saved: Tensors, cotangents: Cotangents) -> Totals:
    """Gradients of the rank's inputs except sinks. saved: from `forward_heads`."""
    totals, (*qkv, o, lse) = Totals.zeros(site, inputs), saved
    do = torch.zeros_like(cotangents.o) if cotangents.do is None else cotangents.do
    grads: list[torch.Tensor | None] = [*to_heads(site, "q", [do]), None]
    if site.sharded.has_lse:
        dlse = torch.zeros_like(cotangents.lse) if cotangents.dlse is None else cotangents.dlse
        (grads[1],) = to_heads(site, "q", [dlse])
    own, runs = Cotangents(o, lse, *grads), attend_heads(site, qkv, inputs)
    each = [(run, run.backward(*own.of(run.rows))) for run in runs]
    for run, gradients in each:
        totals.add_more(run.here, gradients)
    q, k, v = qkv
    laid = [
        lay_rows(q, [(run.rows, x.dq) for run, x in each]),
        lay_rows(k, [(run.at, x.dk) for run, x in each]),
        lay_rows(v, [(run.at, x.dv) for run, x in each]),
    ]
    back = to_sequence(site, "qkk", laid)
    for r in range(site.sharded.mesh.ranks):
        heads = heads_of(site, r)
        for n, kind, x in zip(site.sharded.eqn.args, "qkk", back[r], strict=False):
            totals.own(n)[:, heads[kind].start : heads[kind].stop] += x
    return totals
