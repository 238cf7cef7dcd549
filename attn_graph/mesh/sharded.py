"""A graph over several devices: a value with the layout and the method."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from ctypes import string_at
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import evolve, field, frozen

from attn_graph.compiler import Compilable
from attn_graph.errors import GraphError
from attn_graph.ir.attention import Attention
from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.storage.packed import TOTALS, Packed, packed_sides
from attn_graph.ir.storage.packing import Lengths, list_sequences
from attn_graph.ir.transforms.boxes import Piece, move_attention
from attn_graph.ir.transforms.moving import Box
from attn_graph.lowering.request import Request
from attn_graph.machine.cache import Remembers
from attn_graph.machine.philox import WORDS
from attn_graph.machine.target import Target
from attn_graph.mesh.layout import (
    SEQUENCES,
    Holding,
    Mesh,
    Method,
    Placement,
    Ranges,
    divide_heads,
)
from attn_graph.mesh.results import Outlook, ShardedPlan
from attn_graph.printing.text import show_call
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

UNPACKED = str.maketrans({TOTALS["rows"]: "i", TOTALS["keys"]: "j"})  # axes of all packed rows
STARTS = {"rows": "<", "keys": ">"}  # letters of the starts of packed sequences
AXES = {
    "b": "the batch", "h": "query heads", "g": "key/value heads", "i": "queries", "j": "keys",
    **dict.fromkeys(STARTS.values(), "starts"),
}  # fmt: skip


@final
@frozen
class Known:
    """A tensor known when a graph is sharded, by its content.

    Its text has runs of equal elements in C order, each with its length.
    """

    name: str
    spec: TensorSpec
    content: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Known:
        """The content of a tensor."""
        dense = tensor.detach().cpu().contiguous()
        content = string_at(dense.data_ptr(), dense.nbytes)
        return cls(name, TensorSpec(tensor.shape, tensor.dtype), content)

    @property
    def tensor(self) -> torch.Tensor:
        """A new tensor of this content."""
        if not self.content:
            return torch.empty(self.spec.shape, dtype=self.spec.dtype, device="cpu")
        flat = torch.frombuffer(bytearray(self.content), dtype=self.spec.dtype)
        return flat.reshape(self.spec.shape)

    def __str__(self) -> str:
        values, counts = torch.unique_consecutive(self.tensor.flatten(), return_counts=True)
        runs = zip(values.tolist(), counts.tolist(), strict=True)
        return f"{self.name}={self.spec}({', '.join(map(str, runs))})"


@final
@frozen
class Stretch:
    """Neighbouring queries and keys of the axes that ranks divide, of one length for some entries
    of the batch: those of all entries, or of one packed sequence.
    """

    batch: range
    rows: range
    keys: range

    def of(self, axis: str) -> range:
        """Its queries, i, or keys, j."""
        return self.rows if axis == "i" else self.keys


@final
@frozen(cache_hash=True, repr=False)
class Sharded(Remembers, Compilable[ShardedPlan, Outlook]):
    """An attention computed by the ranks of a mesh together. Made by `shard`.

    Immutable and compared by content: `Sharded.parse(str(x)) == x`. `holdings` is each rank's part.
    Its inputs are the graph's without the `known` ones; `split` makes them from whole tensors.
    """

    graph: Graph
    mesh: Mesh
    placement: Placement
    method: Method | None  # None: nobody needs what others have
    known: tuple[Known, ...]
    holdings: tuple[Holding, ...]
    answers: dict[tuple[object, ...], Any] = field(factory=dict, init=False, eq=False, repr=False)

    def compile(self, request: Request, group: ProcessGroup | None) -> ShardedPlan:
        """This process's plan, as `attn_graph.compile` gives it."""
        from attn_graph.mesh.plan import plan_rank  # which imports this module

        return plan_rank(self, request, group)

    def explain(self, target: Target, link: str | float | None) -> Outlook:
        """The ranks' work and messages: see `attn_graph.explain`."""
        from attn_graph.mesh.explanation import explain_mesh  # which imports this module

        return explain_mesh(self, target, link)

    def by(self, method: Method | None) -> Sharded:
        """The same graph and parts by another method."""
        return self if method == self.method else self.once(change_method, method)

    @cached_property
    def whole(self) -> tuple[Eqn, range]:
        """The equation of the attention, packed or not, with the numbers of its results."""
        return next(each for each in self.graph.numbered if not isinstance(each[0].op, Lengths))

    @property
    def op(self) -> Fused:
        """The attention, packed or not."""
        op: Fused = self.packed or self.node
        return op

    @cached_property
    def eqn(self) -> Eqn:
        """The attention on unpacked tensors, with its operands."""
        eqn, _ = self.whole
        return evolve(eqn, op=self.node, args=eqn.args[: len(self.node.ranks)])

    @property
    def packed(self) -> Packed | None:
        """The op of an attention on packed sequences or pages."""
        packed: Packed | None = self.whole[0].op.packed
        return packed

    @property
    def cuts_sequences(self) -> bool:
        """True if packed sequences are divided."""
        return self.packed is not None and self.placement in SEQUENCES

    @property
    def packs_rows(self) -> bool:
        """True if q is packed."""
        return self.packed is not None and self.packed.rows is not None

    @property
    def node(self) -> Attention:
        """The op of the attention."""
        node: Attention = self.whole[0].op.attention
        return node

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, M and N; for sequences packed or in pages, the most M and N of one."""
        eqn, _ = self.whole
        q, k, *_ = eqn.op.padded([self.graph.types[i] for i in eqn.args])
        return q.shape[0], q.shape[1], q.shape[2], k.shape[2]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The letters of each input's axes, by number: of q, k and v bhid, bgjd and bgje, packed
        ihd, jgd and jge, as pools npgd and npge.

        Every rank has all keys of other inputs: their letter of keys is n, and so is their letter
        of queries with packed ones. Unused inputs have n too. Starts have the letters of STARTS.
        """
        (eqn, _), letters = self.whole, dict[int, str]()
        hidden = str.maketrans(dict.fromkeys("ijxyw" if self.packs_rows else "jxyw", "n"))
        for n, role in zip(eqn.args, self.op.takes, strict=True):
            letters[n] = role.axes.translate(UNPACKED if role.side else hidden)
        letters |= {number: letter for letter, number in self.starts.items()}
        ranks = (len(i.spec.shape) for i in self.graph.inputs)
        return tuple(letters.get(n, "n" * rank) for n, rank in enumerate(ranks))

    @property
    def result_axes(self) -> tuple[str, str]:
        """The letters of o, and of statistics."""
        o, lse, *_ = self.op.gives
        return o.axes.translate(UNPACKED), lse.axes.translate(UNPACKED)

    @property
    def starts(self) -> dict[str, int]:
        """The numbers of the starts of packed sequences, by letter; one may serve both sides."""
        return starts_of(self.whole[0])

    @property
    def grain(self) -> int:
        """Chunks begin at its multiples: dropout draws bits for four keys."""
        return WORDS if self.node.dropout else 1

    @property
    def trained(self) -> frozenset[int]:
        """The numbers of the trained inputs."""
        pairs = zip(self.eqn.args, self.node.trains, strict=True)
        return frozenset(number for number, trains in pairs if trains)

    @property
    def sinks(self) -> int | None:
        """The number of the input of sinks."""
        return self.node.split(self.eqn.args).sinks

    @property
    def has_lse(self) -> bool:
        """True if lse is an output, and may have a cotangent."""
        return "lse" in self.output_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """The meaning of each output of the graph: o, or the name of a statistic."""
        _, results = self.whole
        return tuple(self.node.names[i - results.start] for i in self.graph.outputs)

    @property
    def constants(self) -> dict[int, torch.Tensor]:
        """The known tensors, by the number of the input."""
        numbers = {i.name: n for n, i in enumerate(self.graph.inputs)}
        return {numbers[x.name]: x.tensor for x in self.known}

    @property
    def open_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs of a call."""
        known = {x.name for x in self.known}
        return tuple(n for n, i in enumerate(self.graph.inputs) if i.name not in known)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """All of the batch; or each packed sequence, if these are divided.

        Raises GraphError if that takes unknown starts or lengths.
        """
        B, _, M, N = self.sizes
        if not self.cuts_sequences:
            return (Stretch(range(B), range(M), range(N)),)
        eqn, _ = self.whole
        places = ([self.numbers(n) for n in own] for own in packed_sides(eqn).values())
        rows, keys = (
            [range(a, a + n) for a, n in list_sequences(starts, lengths, total, most)]
            for (starts, lengths), total, most in zip(places, self.totals, (M, N), strict=True)
        )
        each = enumerate(zip(rows, keys, strict=True))
        return tuple(Stretch(range(b, b + 1), i, j) for b, (i, j) in each)

    @property
    def entries(self) -> int:
        """The batch entries of exchanged queries and keys: one if these are packed."""
        return 1 if self.cuts_sequences else self.sizes[0]

    @property
    def totals(self) -> tuple[int, int]:
        """The numbers of queries and of keys that ranks divide."""
        return self.axis_sizes["i"], self.axis_sizes["j"]

    def spans(self, axis: str) -> Ranges:
        """The queries, i, or keys, j, cut at the borders of stretches."""
        size, each = self.axis_sizes[axis], [x.of(axis) for x in self.stretches]
        ends = sorted({0, size, *(at for x in each for at in (x.start, x.stop))})
        return tuple(range(a, b) for a, b in pairwise(ends)) or (range(size),)

    @cached_property
    def stretch_starts(self) -> dict[str, list[int]]:
        """The first query, i, and the first key, j, of each stretch."""
        return {axis: [x.of(axis).start for x in self.stretches] for axis in "ij"}

    def find_stretches(self, axis: str, places: range) -> Iterator[Stretch]:
        """The stretches with some of these queries, i, or keys, j."""
        starts = self.stretch_starts[axis]
        first, stop = bisect_right(starts, places.start) - 1, bisect_left(starts, places.stop)
        for own in self.stretches[max(0, first) : stop]:
            if common(own.of(axis), places):
                yield own

    def box(self, own: Stretch, rows: range, keys: range, heads: range) -> Box:
        """Places by their queries and keys in a stretch."""
        lengths = (len(own.rows), len(own.keys)) if self.cuts_sequences else None
        rows, keys = shift(rows, -own.rows.start), shift(keys, -own.keys.start)
        return Box(own.batch, heads, rows, keys, self.sizes, lengths)

    def numbers(self, number: int) -> torch.Tensor:
        """The elements of starts or lengths. Raises GraphError if they are unknown."""
        if number not in self.values:
            name, how = self.graph.inputs[number].name, self.placement
            raise GraphError(
                f"shard: by {how!r} a rank's rows depend on {name}; pass {name}= with its numbers, "
                "or divide by 'heads'; processes with batches of their own compile a graph of "
                "their own"
            )
        return self.values[number]

    def piece(self, box: Box) -> Piece:
        """The attention of some places."""
        return move_attention(self.eqn, box)

    @cached_property
    def head_parts(self) -> list[tuple[range, range]]:
        """Each rank's heads, of queries and of keys, if the sequence is exchanged for heads."""
        return divide_heads(self.sizes[1], self.axis_sizes["g"], self.mesh.ranks)

    def own_box(self, rank: int) -> Box:
        """The places of a rank with all queries and keys of its sequences and heads."""
        own, (_, _, M, N) = self.holdings[rank], self.sizes
        heads = self.head_parts[rank][0] if self.method == "heads" else own.heads
        return Box(own.batch, heads, range(M), range(N), self.sizes)

    def mask_data(self) -> dict[str, torch.Tensor]:
        """The known tensors of the mask, by the mask's names."""
        inputs, values = self.node.split(self.eqn.args).mask, self.values
        return {name: values[n] for name, n in inputs.items() if n in values}

    @property
    def values(self) -> dict[int, torch.Tensor]:
        """The known tensors, and the lengths that follow from them, by number."""
        values = self.constants
        made = [(eqn.args[0], out) for eqn, (out, *_) in self.graph.numbered[:-1]]
        return values | {out: values[n].diff() for n, out in made if n in values}

    def divided_axis(self, shape: Sequence[int], axes: str) -> int | None:
        """The divided axis of a tensor; None: each rank has all of it. axes: as of `parts`."""
        places = enumerate(zip(axes, shape, strict=True))
        hits = (n for n, (x, size) in places if x in self.divided and self.axis_sizes[x] == size)
        return next(hits, None)

    @cached_property
    def divided(self) -> frozenset[str]:
        """The letters of the divided axes."""
        each = [(x, n, r) for x, n in self.axis_sizes.items() for r in range(self.mesh.ranks)]
        return frozenset(x for x, n, r in each if self.parts(r, [n], x) != [(range(n),)])

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes of the divisible axes, by letter."""
        main = ((self.axes[i], self.graph.types[i].shape) for i in self.eqn.args[:2])
        pairs = [x for own in main for x in zip(*own, strict=True)]
        B, H, M, N = self.sizes
        sizes = {"b": B, "h": H, "i": M, "j": N, **dict.fromkeys(STARTS.values(), B + 1)}
        return sizes | {x: n for x, n in pairs if x in "gij"}

    def parts(self, rank: int, shape: Sequence[int], axes: str) -> list[Ranges]:
        """A rank's part of each axis. axes: letters as those of `split`.

        Raises GraphError for a size other than the graph's or 1.
        """
        own, sizes = self.holdings[rank], self.axis_sizes
        starts = (range(own.batch.start, own.batch.stop + 1),)
        of: dict[str, Ranges] = {
            "b": (own.batch,), "h": (own.heads,), "g": (own.groups,), "i": own.rows, "j": own.keys,
            **dict.fromkeys(STARTS.values(), starts),
        }  # fmt: skip
        for n, (x, size) in enumerate(zip(axes, shape, strict=True)):
            if size not in (1, sizes.get(x, size)):
                raise GraphError(
                    f"shard: axis {n} of {[*shape]} is {AXES[x]} by its letter {x!r} in {axes!r}, "
                    f"and the graph has {sizes[x]}; cut it to {sizes[x]}, or call an axis that "
                    "ranks don't divide by another letter, such as x"
                )
        return [
            of[x] if sizes.get(x) == n else (range(n),) for x, n in zip(axes, shape, strict=True)
        ]

    def split(self, x: torch.Tensor, axes: str) -> list[torch.Tensor]:
        """Each rank's part of a tensor: new dense ones, unless it is the whole.

        axes: the name of an input; or a letter for each axis, for tensors of your own: b batch, h
        query heads, g key/value heads, i queries, j keys, any other for an undivided axis: "bhie"
        of o, "bi" of tokens or positions. Chunks of a rank are contiguous. Raises GraphError for
        another number of letters than axes, and for axes by these letters with sizes other than the
        graph's or 1; an axis of size 1 is not divided.
        """
        letters = self.letters_for(x, axes)
        return [self.part(rank, x, letters) for rank in range(self.mesh.ranks)]

    def part(self, rank: int, x: torch.Tensor, letters: str) -> torch.Tensor:
        """A rank's part of a tensor. Starts count the rank's own rows."""
        if self.cuts_sequences and letters in STARTS.values():
            holding = self.holdings[rank]
            chunks = holding.rows if letters == STARTS["rows"] else holding.keys
            before = [[len(common(c, range(int(at)))) for c in chunks] for at in x]
            return x.new_tensor([*map(sum, before)])
        own, first = take(x, self.parts(rank, x.shape, letters)), self.first_row(rank, letters)
        return own - first if first else own

    def first_row(self, rank: int, letters: str) -> int:
        """The row from which a rank's starts count; 0 for other tensors."""
        own = {STARTS["rows"]: self.holdings[rank].rows, STARTS["keys"]: self.holdings[rank].keys}
        return own[letters][0].start if letters in own else 0

    def join(self, shards: Sequence[torch.Tensor], axes: str) -> torch.Tensor:
        """The tensor with `shards` as its `split`, one of each rank.

        axes: as those of `split`. Raises GraphError for another number of shards than ranks, and
        for a shard of another shape.
        """
        if len(shards) != self.mesh.ranks:
            raise GraphError(f"shard: {len(shards)} shards of {self.mesh.ranks} ranks; give each")
        letters = self.letters_for(shards[0], axes)
        if self.cuts_sequences and letters in STARTS.values():
            return torch.stack([*shards]).sum(0, dtype=shards[0].dtype)
        named = {i.name: i.spec.shape for i in self.graph.inputs}
        sizes = self.axis_sizes
        shape = named.get(axes) or [
            sizes[x] if x in self.divided else n
            for x, n in zip(letters, shards[0].shape, strict=True)
        ]
        whole = shards[0].new_zeros(shape)  # no rank has the keys that no query head reads
        for rank, shard in enumerate(shards):
            first = self.first_row(rank, letters)
            write_parts(whole, self.parts(rank, shape, letters), shard + first if first else shard)
        return whole

    def letters_for(self, x: torch.Tensor, axes: str) -> str:
        """The letters of a tensor's axes. Raises GraphError for too many or too few."""
        names = [i.name for i in self.graph.inputs]
        letters = self.axes[names.index(axes)] if axes in names else axes
        if len(letters) != x.ndim:
            raise GraphError(f"shard: {axes!r} has {len(letters)} axes, and the tensor {x.ndim}")
        return letters

    @staticmethod
    def parse(text: str, *, known: Iterable[type[Any]] = ()) -> Sharded:  # Any: masks, ops
        """The sharded graph of a text printed by `str`.

        Arguments and errors as those of `attn_graph.parse`.
        """
        from attn_graph.mesh.sharding import parse_sharded  # which imports this module

        return parse_sharded(text, known)

    def __str__(self) -> str:
        method = [f"method={self.method!r}"] if self.method else []
        data = ["graph", show_call(self.mesh), repr(self.placement), *method, *map(str, self.known)]
        ranks: list[str] = []
        for n, x in enumerate(self.holdings):
            own = {"batch": (x.batch,), "heads": (x.heads,), "queries": x.rows, "keys": x.keys}
            texts = (f"{name} {show_chunks(chunks)}" for name, chunks in own.items())
            ranks.append(f"# rank {n}: {', '.join(texts)}")
        return "\n".join([str(self.graph), f"shard({', '.join(data)})", *ranks])

    __repr__ = __str__


def common(a: range, b: range) -> range:
    """The positions of both; empty without any."""
    return range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))


def shift(x: range, by: int) -> range:
    """Positions, moved."""
    return range(x.start + by, x.stop + by)


def starts_of(eqn: Eqn) -> dict[str, int]:
    """The numbers of an attention's starts, by letter."""
    packed: Packed | None = eqn.op.packed
    if packed is None:
        return {}
    given = eqn.args[len(packed.op.takes) :]
    return dict(zip((STARTS[side] for side in packed.sides), given, strict=False))


def show_chunks(chunks: Iterable[range]) -> str:
    """Positions as text: `0:8 24:32`."""
    return " ".join(f"{x.start}:{x.stop}" for x in chunks if x) or "none"


def take(x: torch.Tensor, parts: Sequence[Ranges]) -> torch.Tensor:
    """The parts of a tensor along each axis, one after the other."""
    for axis, chunks in enumerate(parts):
        if sum(map(len, chunks)) < x.shape[axis]:
            pieces = [x.narrow(axis, c.start, len(c)) for c in chunks] or [x.narrow(axis, 0, 0)]
            x = torch.cat(pieces, axis)
    return x


def pair_chunks(
    whole: torch.Tensor, chunks: Ranges, part: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The chunks of positions of a tensor [B,heads,any,...], each with its piece of another one,
    which has them one after the other."""
    pieces = part.split([*map(len, chunks)], 2)
    for chunk, piece in zip(chunks, pieces, strict=True):
        yield whole[:, :, chunk.start : chunk.stop], piece


def write_parts(whole: torch.Tensor, parts: Sequence[Ranges], shard: torch.Tensor) -> None:
    """Write a shard to its places, as `take` reads them. Raises GraphError for other sizes."""
    sizes = [sum(map(len, chunks)) for chunks in parts]
    if [*shard.shape] != sizes:
        raise GraphError(f"shard: a shard is {[*shard.shape]}, and that rank has {sizes}")
    index = [torch.tensor([n for c in chunks for n in c], device=whole.device) for chunks in parts]
    if shard.numel():
        whole[torch.meshgrid(*index, indexing="ij")] = shard


def change_method(sharded: Sharded, method: Method | None) -> Sharded:
    return evolve(sharded, method=method)
