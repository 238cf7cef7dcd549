"""shard: divide an attention over the ranks of a mesh, by batch, heads or sequence; and read the
text of a divided one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, get_args

import torch
from attrs import evolve

from attn_graph.errors import GraphError, PlanMismatchError, binds, show
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph, check_graph, op_name
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.data_checks import check_data
from attn_graph.ir.storage.packing import Lengths
from attn_graph.ir.transforms.binding import require_numbers
from attn_graph.ir.transforms.moving import Box
from attn_graph.ir.transforms.parse import (
    Parser,
    errors_at_line,
    graph_parser,
    literal_value,
    read_syntax,
)
from attn_graph.ir.transforms.vjp import require_no_layouts
from attn_graph.machine.tensors import is_distributed
from attn_graph.mesh.counts import count_seen
from attn_graph.mesh.layout import (
    SEQUENCES,
    Holding,
    Mesh,
    Method,
    Placement,
    Ranges,
    balance_chunks,
    chunk,
    chunk_by_weight,
    contiguous,
    zigzag,
)
from attn_graph.mesh.schedule import heads_problem, sum_bytes
from attn_graph.mesh.sharded import STARTS, Known, Sharded, starts_of
from attn_graph.printing.words import own_name
from attn_graph.sparsity.tiles import check_tensors


@binds()
def shard(
    graph: Graph,
    mesh: Mesh,
    placements: Placement,
    *,
    method: Method | None = None,
    **known: torch.Tensor,
) -> Sharded:
    """One attention, divided over the ranks of a mesh. Nothing runs, and no process is needed.

    placements: the division. "batch" and "heads" need no messages. The others divide the sequence,
    queries and keys alike: "contiguous", rank r has the r-th part; "zigzag", of twice as many parts
    the r-th and the r-th from the end; "balanced", chunks by their kept pairs, so that all ranks
    have equal work. If sizes don't divide, "batch", "heads" and "contiguous" leave less to the last
    rank, as PyTorch's chunk and DTensors do, and parts of others differ by one; under dropout, with
    the bits of one device, chunks begin at multiples of four.

    method: "ring": ranks send keys and values to the ranks with queries for them, one neighbour
    after the other; "gather": to all at once; "heads": the sequence is exchanged for heads and
    back. The default sends the fewest bytes, the first of equal ones.

    known: tensors of the mask, by name, whole: documents, lengths, starts. The plan holds them,
    calls don't pass them, and keys they hide are never sent.

    Packed sequences are divided too. By "heads" each rank has all rows; else it takes known starts,
    and lengths if there are some. By "batch" each has whole sequences, of nearly equal rows, by
    "zigzag" two parts of each sequence, by the others parts of all rows. Keys in pages, and packed
    queries with padded keys, are divided by "heads" and "batch" alone.

    Raises GraphError for anything but one attention, and for impossible divisions.
    """
    check_graph(graph, "shard")
    require_numbers(graph, "shard")
    require_no_layouts(graph, "shard")
    check_choice("placements", placements, get_args(Placement), '; write "balanced" for sequences')
    if not isinstance(mesh, Mesh):
        raise GraphError(f"shard: mesh {show(mesh)} is not a Mesh; write ag.Mesh(8)")
    simple = simplify(graph)
    check_attention(simple, placements)
    check_given(simple, known)
    constants = tuple(Known.of(name, x) for name, x in sorted(known.items()))
    whole = Sharded(simple, mesh, placements, None, constants, ())
    check_known(whole)
    whole.piece(Box.whole(*whole.sizes))  # raises for what can't be moved
    placed = evolve(whole, holdings=tuple(place_ranks(whole)))
    return placed.by(choose_method(placed, method))


def choose_method(placed: Sharded, method: Method | None) -> Method | None:
    """The given method, or the one with the fewest bytes; None without messages.

    Raises GraphError for an impossible one.
    """
    if placed.placement not in SEQUENCES:
        if method is not None:
            raise GraphError(
                f"shard: method {show(method)} is for a divided sequence, and placements "
                f"{placed.placement!r} leave it whole; leave method out"
            )
        return None
    if method is not None:
        check_choice("method", method, get_args(Method))
    problem = heads_problem(placed)
    if method == "heads" and problem:
        raise GraphError(f"shard: method 'heads' {problem}; write method='ring'")
    if method is None:
        known: list[Method] = ["ring"] if problem else ["ring", "heads"]
        return min(known, key=lambda name: sum_bytes(placed.by(name)))
    return method


def check_choice(name: str, value: object, known: Sequence[str], way_out: str = "") -> None:
    """Raise GraphError for an unknown value."""
    if value not in known:
        raise GraphError(f"shard: {name} {show(value)} is none of {', '.join(known)}{way_out}")


def check_attention(graph: Graph, placement: Placement) -> None:
    """Raise GraphError unless a simplified graph is one attention, divisible by the placement."""
    ops = [eqn.op for eqn in graph.eqns if not isinstance(eqn.op, Lengths)]
    node: Attention | None = ops[0].forward if len(ops) == 1 else None
    if node is None or node.keeps:
        text = ", ".join(op_name(type(op)) for op in ops) or "nothing"
        raise GraphError(f"shard: the graph is to be one attention, and is {text}; shard that part")
    if ops[0].packed and ops[0].packed.scaled:
        raise GraphError(
            "shard: quantised keys and values are not divided; pass k * k_scale and v * v_scale"
        )
    if ops[0].packed and placement in SEQUENCES and ops[0].packed.sides != ("rows", "keys"):
        raise GraphError(
            f"shard: {show(placement)} divides sequences with packed queries and keys, and these "
            "have padded ones, or pages; divide them whole, by 'batch', or by 'heads'"
        )
    if node.origin:
        raise GraphError(
            f"shard: the graph is a part of a whole, at {node.origin}; shard the whole"
        )
    operands = zip(graph.eqns[-1].args, node.trains, strict=False)
    trained = [number for number, trains in operands if trains]
    if len({*trained}) < len(trained):
        raise GraphError("shard: an input is two operands; give each operand an input of its own")


def check_given(graph: Graph, known: Mapping[str, torch.Tensor]) -> None:
    """Raise GraphError for anything but tensors with numbers, and for inputs without use in a mask.

    Starts of packed sequences have a use too.
    """
    eqn = graph.eqns[-1]
    node: Attention = eqn.op.attention
    lengths = {out: each.args[0] for each, (out, *_) in graph.numbered[:-1]}
    reads = [*node.split(eqn.args).mask.values(), *starts_of(eqn).values()]
    names = [graph.inputs[n].name for n in dict.fromkeys(lengths.get(n, n) for n in reads)]
    if unknown := [name for name in known if name not in names]:
        read = ", ".join(names) or "nothing"
        meant = own_name(unknown[0], names)
        end = f"write {meant}=" if meant else f"it reads {read}"
        raise GraphError(f"shard: no mask reads {', '.join(unknown)}; {end}")
    for name, x in known.items():
        if not isinstance(x, torch.Tensor):
            raise GraphError(
                f"shard: {name} is {show(x)}, not a tensor; pass torch.tensor({show(x)})"
            )
        if x.layout != torch.strided or x.is_meta or is_distributed(x):
            raise GraphError(
                f"shard: {name} is a {type(x).__name__} of layout {x.layout} on {x.device}; pass a "
                "dense tensor with all of its numbers"
            )


def check_known(whole: Sharded) -> None:
    """Raise GraphError for misfit tensors."""
    for x in whole.known:
        spec = next(i.spec for i in whole.graph.inputs if i.name == x.name)
        if spec.type != x.spec.type:
            raise GraphError(
                f"shard: {x.name} is {x.spec.type}, and the graph declares {spec.type}"
            )
    B, H, M, N = whole.sizes
    check_tensors(whole.node.mask, (B, H, M, N), whole.mask_data())
    numbers = {i.name: n for n, i in enumerate(whole.graph.inputs)}
    try:
        check_data(whole.graph, {numbers[x.name]: x.tensor for x in whole.known})
    except PlanMismatchError as error:
        (text,) = error.differences
        raise GraphError(f"shard: {text}; {error.way_out}") from error


def parse_sharded(text: str, known: Iterable[type[Any]]) -> Sharded:  # Any: masks, modifiers, ops
    """The sharded graph of a text. Raises GraphError with the wrong line."""
    parser = graph_parser(text, (Mesh, *known))
    match read_syntax(text).body:
        case [*graph, ast.Expr(ast.Call(ast.Name("shard"), [ast.Name(), *args], keywords) as call)]:
            whole = parser.function(graph)
        case _:
            raise GraphError("expected a graph, and below it `shard(graph, Mesh(...), ...)`")
    with errors_at_line(call.lineno):
        options: dict[str, Any] = {  # Any: tensors, and the name of a method
            x.arg or "**": read_tensor(x.value)
            if isinstance(x.value, ast.Call)
            else literal_value(x.value)
            for x in keywords
        }
        if len(args) != 2 or "**" in options:
            raise GraphError("expected `shard(graph, mesh, placements, ...)`")
        return shard(whole, *map(parser.value, args), **options)


def read_tensor(node: ast.Call) -> torch.Tensor:
    """The tensor of `i64[2, 3]((7, 4), (8, 2))`: runs of equal elements. Raises GraphError."""
    spec, runs = Parser({}).spec(node.func), [literal_value(x) for x in node.args]
    if not all(map(is_run, runs)) or sum(n for _, n in runs) != prod(spec.shape):
        raise GraphError(f"{ast.unparse(node.func)} is given by runs of (element, how many)")
    values, counts = (torch.tensor([run[i] for run in runs], dtype=torch.int64) for i in (0, 1))
    return values.repeat_interleave(counts).to(spec.dtype).reshape(spec.shape)


def is_run(run: object) -> bool:
    """True for an integer or a boolean with its number of repetitions."""
    match run:
        case (int(value), int(count)):
            return -(2**63) <= value < 2**63 and count > 0
    return False


def place_ranks(whole: Sharded) -> Iterator[Holding]:
    """Each rank's part. Raises GraphError for packed sequences with unknown starts."""
    (B, H, _, _), ranks, sizes = whole.sizes, whole.mesh.ranks, whole.axis_sizes
    all_ = Holding(
        range(B), range(H), range(sizes["g"]), (range(sizes["i"]),), (range(sizes["j"]),)
    )
    if whole.placement == "heads":
        yield from (evolve(all_, heads=h, groups=g) for h, g in whole.head_parts)
    elif whole.placement in SEQUENCES:
        rows, keys = place_positions(whole)
        yield from (evolve(all_, rows=i, keys=j) for i, j in zip(rows, keys, strict=True))
    elif whole.starts:
        yield from place_sequences(whole, all_)
    else:
        yield from (evolve(all_, batch=batch) for batch in chunk(B, ranks))


def place_sequences(whole: Sharded, all_: Holding) -> Iterator[Holding]:
    """Some packed sequences for each rank, contiguous, with nearly equal rows.

    Rows of no sequence go along with those before them.
    """
    starts = {x: [int(at) for at in whole.numbers(n)] for x, n in whole.starts.items()}
    ends = next(iter(starts.values()))
    batches = chunk_by_weight([b - a for a, b in pairwise(ends)], whole.mesh.ranks)
    rows, keys = [all_.rows] * len(batches), [all_.keys] * len(batches)
    for letter, parts, axis in zip(STARTS.values(), (rows, keys), "ij", strict=True):
        if letter in starts:
            inner = [starts[letter][batch.start] for batch in batches[1:]]
            cuts = pairwise([0, *inner, whole.axis_sizes[axis]])
            parts[:] = [(range(a, b),) for a, b in cuts]
    for batch, i, j in zip(batches, rows, keys, strict=True):
        yield evolve(all_, batch=batch, rows=i, keys=j)


def place_positions(whole: Sharded) -> tuple[list[Ranges], list[Ranges]]:
    """The chunks of queries and of keys of each rank."""
    ranks, grain, rows, keys = whole.mesh.ranks, whole.grain, whole.spans("i"), whole.spans("j")
    if whole.placement == "zigzag":
        return zigzag(rows, ranks, grain), zigzag(keys, ranks, grain)
    if whole.placement == "contiguous":
        return contiguous(rows, ranks, grain), contiguous(keys, ranks, grain)
    own = balance_chunks(
        rows, ranks, lambda chunks: [whole.once(count_seen, c) for c in chunks], grain
    )
    return own, own if rows == keys else contiguous(keys, ranks, grain)
