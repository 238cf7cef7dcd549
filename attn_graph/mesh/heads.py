"""The sequence is exchanged for heads and back: each rank attends whole sequences of its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from attn_graph.kernels.merging import sink_
from attn_graph.mesh.exchange import pack, post, unpack
from attn_graph.mesh.layout import Ranges
from attn_graph.mesh.schedule import Job
from attn_graph.mesh.sharded import pair_chunks, take
from attn_graph.mesh.site import BoxCall, Site
from attn_graph.mesh.totals import Cotangents, RowResults, Totals
from attn_graph.mesh.traffic import count

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
    mine, sizes = heads_of(site, site.rank), dict(zip("qk", site.sharded.sizes[2:], strict=True))

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


def attend_heads(site: Site, qkv: Tensors, inputs: Tensors) -> BoxCall:
    """The attention of the rank's heads: all queries, all keys."""
    box = site.sharded.own_box(site.rank)
    return site.attend(Job(box, box.rows, box.keys), qkv, inputs)


def prepare_heads(site: Site) -> None:
    """Plan the rank's heads. Raises NoBackendError."""
    inputs, own = site.empty_inputs(), heads_of(site, site.rank)
    sizes = dict(zip("qk", site.sharded.sizes[2:], strict=True))
    given = zip("qkk", (inputs[n] for n in site.sharded.eqn.args[:3]), strict=True)
    shapes = ((x, (x.shape[0], len(own[kind]), sizes[kind], x.shape[3])) for kind, x in given)
    attend_heads(site, [x.new_empty(shape) for x, shape in shapes], inputs)


def head_shapes(site: Site) -> list[tuple[int, ...]]:
    """The shapes of the tensors saved by `forward_heads`."""
    sharded, own = site.sharded, heads_of(site, site.rank)
    q, k, v = (sharded.graph.types[n].shape for n in sharded.eqn.args[:3])
    rows = q[0], len(own["q"]), q[2]
    keys = [(k[0], len(own["k"]), k[2], x[3]) for x in (k, v)]
    return [(*rows, q[3]), *keys, (*rows, v[3]), rows]


def forward_heads(site: Site, inputs: Tensors) -> tuple[RowResults, Tensors]:
    """The results of the rank's queries, and q, k, v, o and lse of its heads for the backward."""
    numbers, stats = site.sharded.eqn.args[:3], site.sharded.node.stats
    qkv = to_heads(site, "qkk", [inputs[n] for n in numbers])
    o, *rows = attend_heads(site, qkv, inputs).forward()
    sinks = site.sinks(inputs)
    if sinks is not None:
        own = heads_of(site, site.rank)["q"]
        wide = o.to(rows[0].dtype)
        sink_(wide, rows[0], sinks[own.start : own.stop])
        o = wide.to(o.dtype)
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
    run = attend_heads(site, qkv, inputs)
    gradients = run.backward((o, lse), grads)
    totals.add_more(run.here, gradients)
    back = to_sequence(site, "qkk", [gradients.dq, gradients.dk, gradients.dv])
    for r in range(site.sharded.mesh.ranks):
        heads = heads_of(site, r)
        for n, kind, x in zip(site.sharded.eqn.args, "qkk", back[r], strict=False):
            totals.own(n)[:, heads[kind].start : heads[kind].stop] += x
    return totals
