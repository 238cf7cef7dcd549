"""How many bytes ranks send to each other, forward and backward, to the byte."""

from __future__ import annotations

from math import prod

from attn_graph.mesh.layout import Ranges
from attn_graph.mesh.results import Flow
from attn_graph.mesh.schedule import needed_keys
from attn_graph.mesh.sharded import Sharded
from attn_graph.spec import accumulator


def heads_problem(sharded: Sharded) -> str | None:
    """Why the sequence can't be exchanged for heads; None: it can."""
    (_, H, M, _), ranks = sharded.sizes, sharded.mesh.ranks
    if ranks > H:
        return f"has {H} heads for {ranks} ranks"
    for n in sharded.open_inputs:
        shape = sharded.graph.types[n].shape
        rows = any(x == "i" and size == M for x, size in zip(sharded.axes[n], shape, strict=True))
        if rows and n not in sharded.eqn.args[:3]:
            name = sharded.graph.inputs[n].name
            return f"would have to exchange {name}, of which a rank has the rows of its queries"
    return None


def count(chunks: Ranges) -> int:
    """How many positions chunks have."""
    return sum(map(len, chunks))


def flow_between(sharded: Sharded, a: int, b: int) -> Flow:
    """The bytes from rank `a` to another rank `b`."""
    sums = Flow(0, sum(gradient_bytes(sharded, n, a) for n in shared_inputs(sharded, a, b)))
    if sharded.method is None:
        return sums
    if sharded.method == "heads":
        return sums + heads_flow(sharded, a, b)
    _, k, v = (sharded.graph.types[i] for i in sharded.eqn.args[:3])
    _, keys = sharded.totals
    each = (prod(k.shape) + prod(v.shape)) // max(1, keys) * k.dtype.itemsize
    there, back = (each * count(sharded.once(needed_keys, *x)) for x in ((b, a), (a, b)))
    return sums + Flow(there, there + back)


def heads_flow(sharded: Sharded, a: int, b: int) -> Flow:
    """The bytes from rank `a` to rank `b` if the sequence is exchanged for heads.

    There: q, k and v; then o and the statistics back. Backward: do there, and dlse if lse is an
    output; then dq, dk and dv back.
    """
    q, _, v = (sharded.graph.types[i] for i in sharded.eqn.args[:3])
    B, D, E, item = sharded.entries, q.shape[-1], v.shape[-1], q.dtype.itemsize
    wide = accumulator(q.dtype).itemsize

    def size(of: int, to: int, row: int, key: int) -> int:
        """Bytes of what the rank `of` has of the sequence, of the heads that `to` computes."""
        own, (heads, groups) = sharded.holdings[of], sharded.head_parts[to]
        return B * (count(own.rows) * len(heads) * row + count(own.keys) * len(groups) * key)

    results = E * item + wide * len(sharded.node.stats)
    keys = (D + E) * item
    cotangents = E * item + wide * sharded.has_lse
    return Flow(
        size(a, b, D * item, keys) + size(b, a, results, 0),
        size(a, b, cotangents, 0) + size(b, a, D * item, keys),
    )


def shared_inputs(sharded: Sharded, a: int, b: int) -> tuple[int, ...]:
    """The numbers of the trained inputs with one part on two ranks.

    Their gradients are added up over these ranks.
    """
    trained = sharded.trained
    return tuple(
        n
        for n in sharded.open_inputs
        if n in trained
        and sharded.once(input_parts, n, a) == sharded.once(input_parts, n, b)
        and gradient_bytes(sharded, n, a)
    )


def input_parts(sharded: Sharded, n: int, rank: int) -> list[Ranges]:
    """A rank's part of an input, along each axis."""
    return sharded.parts(rank, sharded.graph.types[n].shape, sharded.axes[n])


def gradient_bytes(sharded: Sharded, n: int, rank: int) -> int:
    """Bytes of the gradient of a rank's part of an input."""
    size = prod(count(chunks) for chunks in sharded.once(input_parts, n, rank))
    return size * accumulator(sharded.graph.types[sharded.eqn.args[0]].dtype).itemsize


def sum_bytes(sharded: Sharded) -> int:
    """All bytes of both passes."""
    ranks = range(sharded.mesh.ranks)
    flows = (sharded.once(flow_between, a, b) for a in ranks for b in ranks if a != b)
    return sum(flow.forward + flow.backward for flow in flows)
