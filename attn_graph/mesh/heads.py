"""The sequence is exchanged for heads and back: each rank attends whole sequences of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_graph.kernels.merging import sink_
from attn_graph.masks.moving import Box
from attn_graph.mesh.exchange import pack, post, unpack
from attn_graph.mesh.layout import Ranges, divide_heads
from attn_graph.mesh.schedule import Job
from attn_graph.mesh.sharded import take
from attn_graph.mesh.site import BoxCall, Site
from attn_graph.mesh.totals import Cotangents, RowResults, Totals
from attn_graph.mesh.traffic import count

Tensors = Sequence[torch.Tensor]
Kinds = str  # a letter for each tensor that is exchanged: q has query heads, k key/value heads


def heads_of(site: Site, rank: int) -> dict[str, range]:
    """A rank's heads, of queries and of keys."""
    sharded = site.sharded
    G = sharded.graph.types[sharded.eqn.args[1]].shape[1]
    heads, groups = divide_heads(sharded.sizes[1], G, sharded.mesh.ranks)[rank]
    return {"q": heads, "k": groups}


def chunks_of(site: Site, rank: int) -> dict[str, Ranges]:
    """A rank's places of the sequence, of queries and of keys."""
    own = site.sharded.holdings[rank]
    return {"q": own.rows, "k": own.keys}


def to_heads(site: Site, kinds: Kinds, tensors: Tensors) -> list[torch.Tensor]:
    """From the rank's part of the sequence, of all heads, all of the sequence of its heads.

    Tensors [B,heads,part,...]; kinds: of each whether it has queries, q, or keys, k.
    """
    ranks = range(site.sharded.mesh.ranks)
    outgoing = {r: pack_heads(heads_of(site, r), kinds, tensors) for r in ranks}
    mine, sizes = heads_of(site, site.rank), dict(zip("qk", site.sharded.sizes[2:], strict=True))
    shapes = {
        r: [
            (x.shape[0], len(mine[kind]), count(chunks_of(site, r)[kind]), *x.shape[3:])
            for kind, x in zip(kinds, tensors, strict=True)
        ]
        for r in ranks
    }
    parts = swap(site, outgoing, shapes)
    wholes = [
        x.new_empty(x.shape[0], len(mine[kind]), sizes[kind], *x.shape[3:])
        for kind, x in zip(kinds, tensors, strict=True)
    ]
    for r in ranks:
        for kind, whole, part in zip(kinds, wholes, parts[r], strict=True):
            spread(whole, chunks_of(site, r)[kind], part)
    return wholes


def pack_heads(heads: Mapping[str, range], kinds: Kinds, tensors: Tensors) -> torch.Tensor:
    """Some heads of tensors."""
    return pack(
        x.narrow(1, heads[kind].start, len(heads[kind]))
        for kind, x in zip(kinds, tensors, strict=True)
    )


def to_sequence(site: Site, kinds: Kinds, tensors: Tensors) -> dict[int, list[torch.Tensor]]:
    """The way back: by rank, this rank's part of the sequence, of the other's heads."""
    ranks = range(site.sharded.mesh.ranks)
    outgoing = {
        r: pack(
            take(x, along(x, 2, chunks_of(site, r)[kind]))
            for kind, x in zip(kinds, tensors, strict=True)
        )
        for r in ranks
    }
    mine = chunks_of(site, site.rank)
    shapes = {
        r: [
            (x.shape[0], len(heads_of(site, r)[kind]), count(mine[kind]), *x.shape[3:])
            for kind, x in zip(kinds, tensors, strict=True)
        ]
        for r in ranks
    }
    return swap(site, outgoing, shapes)


def spread(whole: torch.Tensor, chunks: Ranges, part: torch.Tensor) -> None:
    """Write contiguous places of the sequence in `part` to their chunks in `whole`."""
    start = 0
    for chunk in chunks:
        whole[:, :, chunk.start : chunk.stop] = part[:, :, start : start + len(chunk)]
        start += len(chunk)


def along(x: torch.Tensor, axis: int, chunks: Ranges) -> list[Ranges]:
    """Parts of one axis of a tensor, and all of the others."""
    return [chunks if a == axis else (range(n),) for a, n in enumerate(x.shape)]


def swap(
    site: Site,
    outgoing: Mapping[int, torch.Tensor],
    shapes: Mapping[int, Sequence[tuple[int, ...]]],
) -> dict[int, list[torch.Tensor]]:
    """Send each rank its flat tensor; return all ranks' tensors, the own one included."""
    others = {r: x for r, x in outgoing.items() if r != site.rank}
    sizes = {r: sum(map(torch.Size.numel, map(torch.Size, shapes[r]))) for r in others}
    came = post(site.line, others, sizes, outgoing[site.rank]).wait()
    flat = {r: came.get(r, outgoing[r]) for r in outgoing}
    return {r: unpack(flat[r], shapes[r]) for r in outgoing}


def attend_heads(site: Site, qkv: Tensors, inputs: Tensors) -> BoxCall:
    """The attention of the rank's heads: all queries, all keys."""
    B, _, M, N = site.sharded.sizes
    box = Box(range(B), heads_of(site, site.rank)["q"], range(M), range(N), site.sharded.sizes)
    return site.attend(Job(box, range(M), range(N)), qkv, inputs)


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
