"""Keys and values visit the ranks with queries for them: one hop ahead, or all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.mesh.exchange import Transfer, pack, post, unpack
from attn_graph.mesh.layout import Ranges
from attn_graph.mesh.schedule import Visit, count, visits_of
from attn_graph.mesh.sharded import pair_chunks
from attn_graph.mesh.site import BoxRun, Site
from attn_graph.mesh.totals import Cotangents, RowResults, Totals

Tensors = Sequence[torch.Tensor]


@final
@frozen(eq=False)
class Guest:
    """A visit, with its keys and values."""

    visit: Visit
    k: torch.Tensor
    v: torch.Tensor


def forward_ring(site: Site, inputs: Tensors) -> RowResults:
    """The results of the rank's queries over all keys, without sinks."""
    q, k, v = (inputs[i] for i in site.sharded.eqn.args[:3])
    results = RowResults.empty(site, q, v.shape[3])

    def attend(guest: Guest) -> None:
        for run in runs_of(site, guest, q, inputs):
            results.add(run.rows, *run.forward())

    travel(site, k, v, attend)
    return results


def prepare_ring(site: Site) -> None:
    """Plan the first box. Raises NoBackendError."""
    inputs = site.unpack_all(site.empty_inputs())
    q, k, v = (inputs[i] for i in site.sharded.eqn.args[:3])
    for visit in site.sharded.once(visits_of, site.rank):
        shapes = key_shapes(k, v, visit.receives)
        came = (x.new_empty(shape) for x, shape in zip((k, v), shapes, strict=True))
        guest = Guest(visit, *(came if visit.step else (k, v)))
        if next(runs_of(site, guest, q, inputs), None) is not None:
            return


def runs_of(site: Site, guest: Guest, q: torch.Tensor, inputs: Tensors) -> Iterator[BoxRun]:
    """The calls of a visit."""
    for jobs in site.batches(guest.visit.jobs):
        yield site.attend(jobs, (q, guest.k, guest.v), inputs)


def travel(site: Site, k: torch.Tensor, v: torch.Tensor, use: Callable[[Guest], None]) -> None:
    """Use the keys and values of each visit, the rank's own first, while the next are under way.

    Under "gather" all are under way from the start. A visit's tensors are freed before the one
    after the next is requested, so at most two hops are held. If `use` fails, pending messages are
    waited for, so none is left.
    """
    own, *visits = site.sharded.once(visits_of, site.rank)
    waiting, under_way = deque(visits), deque[tuple[Visit, Transfer]]()
    ahead = 1 if site.sharded.method == "ring" else len(visits)

    def post_next() -> None:
        while waiting and len(under_way) < ahead:
            visit = waiting.popleft()
            under_way.append((visit, post_keys(site, visit, k, v)))

    def receive() -> Guest:
        visit, transfer = under_way.popleft()
        flat = transfer.wait()[visit.source]
        return Guest(visit, *unpack(flat, key_shapes(k, v, visit.receives)))

    try:
        post_next()
        use(Guest(own, k, v))
        while under_way:
            guest = receive()  # whose transfer is freed before the next one
            post_next()
            use(guest)
    finally:
        for _, transfer in under_way:
            transfer.wait()


def key_shapes(k: torch.Tensor, v: torch.Tensor, chunks: Ranges) -> list[tuple[int, ...]]:
    """The shapes of k and v of some keys."""
    return [(*x.shape[:2], count(chunks), x.shape[3]) for x in (k, v)]


def post_keys(site: Site, visit: Visit, k: torch.Tensor, v: torch.Tensor) -> Transfer:
    """Send the keys and values of a visit, and be sent others."""
    shapes, places = key_shapes(k, v, visit.sends), own_places(site, visit.sends)
    flat = k.new_empty(sum(map(prod, shapes)))
    for x, room in zip((k, v), unpack(flat, shapes), strict=True):
        for place, piece in pair_chunks(x, places, room):
            piece.copy_(place)
    size = sum(map(prod, key_shapes(k, v, visit.receives)))
    return post(site.line, {visit.to: flat}, {visit.source: size}, k)


def own_places(site: Site, keys: Ranges) -> Ranges:
    """The places of a rank's keys in its own tensors."""
    places: list[range] = []
    start = 0
    for chunk in site.holding.keys:
        inside = (x for x in keys if chunk.start <= x.start < chunk.stop)
        places += [
            range(start + x.start - chunk.start, start + x.stop - chunk.start) for x in inside
        ]
        start += len(chunk)
    return tuple(places)


def backward_ring(site: Site, inputs: Tensors, cotangents: Cotangents) -> Totals:
    """Gradients of the rank's inputs except sinks: those of its keys come back from all visits."""
    nq, nk, nv = site.sharded.eqn.args[:3]
    q, k, v = inputs[nq], inputs[nk], inputs[nv]
    totals = Totals.zeros(site, inputs)
    own = totals.own(nk), totals.own(nv)
    back: deque[tuple[Visit, Transfer]] = deque()

    def collect_all() -> None:
        while back:
            collect(site, *back.popleft(), own)

    def attend(guest: Guest) -> None:
        at_home = guest.visit.step == 0
        shares = own if at_home else zeros_like((guest.k, guest.v), own[0].dtype)
        for run in runs_of(site, guest, q, inputs):
            add_run(site, totals, run, cotangents, shares)
        collect_all()
        if not at_home:
            flat, visit = pack(shares, k.dtype), guest.visit
            size = sum(map(prod, key_shapes(k, v, visit.sends)))
            back.append((visit, post(site.line, {visit.source: flat}, {visit.to: size}, k)))

    try:
        travel(site, k, v, attend)
        collect_all()
    finally:
        for _, transfer in back:
            transfer.wait()
    return totals


def zeros_like(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Zeros of the shapes of tensors."""
    return [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in tensors]


def add_run(
    site: Site, totals: Totals, run: BoxRun, cotangents: Cotangents, shares: Tensors
) -> None:
    """Add the gradients of a box. shares: those of its keys."""
    rows = run.rows
    gradients = run.backward(*cotangents.of(rows))
    nq = site.sharded.eqn.args[0]
    sums = (totals.own(nq), *shares)
    each = gradients.dq, gradients.dk, gradients.dv
    for total, chunks, gradient in zip(sums, (rows, run.at, run.at), each, strict=True):
        for place, piece in pair_chunks(total, chunks, gradient):
            place += piece
    totals.add_more(run.here, gradients)


def collect(site: Site, visit: Visit, transfer: Transfer, own: Tensors) -> None:
    """Add the returned gradients of this rank's keys."""
    flat = transfer.wait()[visit.to]
    places, (dk, dv) = own_places(site, visit.sends), own
    shares = unpack(flat, key_shapes(dk, dv, visit.sends))
    for total, share in zip(own, shares, strict=True):
        for place, piece in pair_chunks(total, places, share):
            place += piece
