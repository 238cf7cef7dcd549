"""A graph over several devices: a value that says who has what, and by which method it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ctypes import string_at
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import field, frozen

from attn_graph.compiler import Compilable, Recipe
from attn_graph.errors import GraphError
from attn_graph.ir.attention import Attention
from attn_graph.ir.boxes import Piece, move_attention
from attn_graph.ir.graph import Eqn, Graph, op_name
from attn_graph.ir.philox import WORDS
from attn_graph.machine.target import Target
from attn_graph.masks import Data, needs_of
from attn_graph.masks.moving import Box
from attn_graph.masks.tiles import check_tensors
from attn_graph.mesh.layout import Holding, Mesh, Method, Placement, Ranges
from attn_graph.mesh.results import Outlook, ShardedPlan
from attn_graph.printing.text import show_call
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@final
@frozen
class Known:
    """A tensor that is known when a graph is sharded, by its content.

    As text its runs of equal elements in C order, each with its length.
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
@frozen(cache_hash=True, repr=False)
class Sharded(Compilable[ShardedPlan, Outlook]):
    """An attention that the ranks of a mesh compute together. Made by `shard`.

    Immutable and compared by content: `Sharded.parse(str(x)) == x`. `holdings` is what each rank
    has. Its inputs are those of the graph less what is `known`; `split` makes them of whole
    tensors.
    """

    graph: Graph
    mesh: Mesh
    placement: Placement
    method: Method | None  # None: nobody needs what others have
    known: tuple[Known, ...]
    holdings: tuple[Holding, ...]

    def compile(self, recipe: Recipe, group: ProcessGroup | None) -> ShardedPlan:
        """This process's plan, as `attn_graph.compile` gives it."""
        from attn_graph.mesh.plan import plan_rank  # which imports this module

        return plan_rank(self, recipe, group)

    def explain(self, target: Target, link: str | float | None) -> Outlook:
        """What ranks compute and send, as `attn_graph.explain` gives it."""
        from attn_graph.mesh.explanation import explain_mesh  # which imports this module

        return explain_mesh(self, target, link)

    @property
    def eqn(self) -> Eqn:
        """The attention."""
        return self.graph.eqns[0]

    @property
    def node(self) -> Attention:
        """Its op."""
        op = self.eqn.op
        assert isinstance(op, Attention)
        return op

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, M and N."""
        q, k = (self.graph.types[i].shape for i in self.eqn.args[:2])
        return q[0], q[1], q[2], k[2]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The letters of each input's axes, by number: of q, k and v bhid, bgjd and bgje.

        All others have all keys on every rank: there the letter of keys is n. So they are of an
        input that nothing reads.
        """
        own = ("bhid", "bgjd", "bgje")
        letters: dict[int, str] = dict(zip(self.eqn.args, own, strict=False))
        whole = self.node.split(self.eqn.args)
        reads: list[tuple[Mapping[str, int], Mapping[str, Data]]] = [
            (inputs, step.needs)
            for inputs, step in zip(whole.modifiers, self.node.modifiers, strict=True)
        ]
        reads += [(whole.mask, needs_of(self.node.mask))]
        for inputs, needs in reads:
            letters |= {inputs[name]: data.axes.replace("j", "n") for name, data in needs.items()}
        if whole.sinks is not None:
            letters[whole.sinks] = "h"
        ranks = (len(i.spec.shape) for i in self.graph.inputs)
        return tuple(letters.get(n, "n" * rank) for n, rank in enumerate(ranks))

    @property
    def grain(self) -> int:
        """Chunks begin at multiples of so many positions: dropout draws bits for four keys."""
        return WORDS if self.node.dropout else 1

    @property
    def trained(self) -> frozenset[int]:
        """The numbers of the inputs that have a gradient."""
        pairs = zip(self.eqn.args, self.node.trains, strict=True)
        return frozenset(number for number, trains in pairs if trains)

    @property
    def sinks(self) -> int | None:
        """The number of the input that has sinks."""
        return self.node.split(self.eqn.args).sinks

    @property
    def has_lse(self) -> bool:
        """Whether lse is an output, and may have a cotangent."""
        return len(self.graph.inputs) + self.node.names.index("lse") in self.graph.outputs

    @property
    def constants(self) -> dict[int, torch.Tensor]:
        """What is known, by the number of the input."""
        numbers = {i.name: n for n, i in enumerate(self.graph.inputs)}
        return {numbers[x.name]: x.tensor for x in self.known}

    @property
    def open_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs that a call brings."""
        known = {x.name for x in self.known}
        return tuple(n for n, i in enumerate(self.graph.inputs) if i.name not in known)

    def piece(self, box: Box) -> Piece:
        """The attention of some places."""
        return move_attention(self.eqn, box)

    def mask_data(self) -> dict[str, torch.Tensor]:
        """What is known of the tensors that the mask reads, by the mask's names."""
        inputs, constants = self.node.split(self.eqn.args).mask, self.constants
        return {name: constants[n] for name, n in inputs.items() if n in constants}

    def divided_axis(self, shape: Sequence[int], axes: str) -> int | None:
        """Which axis of a tensor ranks divide; None: each has all of it. axes: as of `parts`."""
        divided = {"batch": "b", "heads": "hg"}.get(self.placement, "ij")
        sizes = self.axis_sizes
        places = zip(axes, shape, strict=True)
        hits = (n for n, (x, size) in enumerate(places) if x in divided and sizes[x] == size)
        return next(hits, None)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes of the axes that ranks may divide, by letter."""
        return dict(zip("bhij", self.sizes, strict=True)) | {
            "g": self.graph.types[self.eqn.args[1]].shape[1]
        }

    def parts(self, rank: int, shape: Sequence[int], axes: str) -> list[Ranges]:
        """Of each axis what a rank has. axes: letters as those of `split`."""
        own, sizes = self.holdings[rank], self.axis_sizes
        of: dict[str, Ranges] = {
            "b": (own.batch,), "h": (own.heads,), "g": (own.groups,), "i": own.rows, "j": own.keys,
        }  # fmt: skip
        return [
            of[x] if sizes.get(x) == n else (range(n),) for x, n in zip(axes, shape, strict=True)
        ]

    def split(self, x: torch.Tensor, axes: str) -> list[torch.Tensor]:
        """What each rank has of a tensor: new dense ones, where it has not all of it.

        axes: the name of an input; or a letter for each axis, for tensors of your own: b batch,
        h query heads, g key/value heads, i queries, j keys, any other for an axis that is not
        divided: "bhie" of o, "bi" of tokens or positions. Chunks of a rank lie one after the other.
        Raises GraphError for another number of letters than axes.
        """
        letters = self.letters_for(x, axes)
        return [take(x, self.parts(rank, x.shape, letters)) for rank in range(self.mesh.ranks)]

    def join(self, shards: Sequence[torch.Tensor], axes: str) -> torch.Tensor:
        """The tensor whose `split` is `shards`, one of each rank.

        axes: as those of `split`. Raises GraphError for another number of shards than ranks, and
        for one of another shape.
        """
        if len(shards) != self.mesh.ranks:
            raise GraphError(f"shard: {len(shards)} shards of {self.mesh.ranks} ranks; give each")
        letters = self.letters_for(shards[0], axes)
        named = {i.name: i.spec.shape for i in self.graph.inputs}
        sizes = self.axis_sizes
        shape = named.get(axes) or [
            sizes.get(x, n) for x, n in zip(letters, shards[0].shape, strict=True)
        ]
        whole = shards[0].new_zeros(shape)  # no rank has the keys that no query head reads
        for rank, shard in enumerate(shards):
            write_parts(whole, self.parts(rank, shape, letters), shard)
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
        """The sharded graph that a text, printed by `str`, describes.

        Arguments and errors as those of `attn_graph.parse`.
        """
        from attn_graph.mesh.parsing import parse_sharded  # which imports this module

        return parse_sharded(text, known)

    def __str__(self) -> str:
        method = [f"method={self.method!r}"] if self.method else []
        data = ["graph", show_call(self.mesh), repr(self.placement), *method, *map(str, self.known)]
        ranks = [f"# rank {n}: {show_holding(x)}" for n, x in enumerate(self.holdings)]
        return "\n".join([str(self.graph), f"shard({', '.join(data)})", *ranks])

    __repr__ = __str__


def show_holding(holding: Holding) -> str:
    """What a rank has, as text: `queries 0:8 24:32, keys 0:8 24:32`."""
    chunks = {
        "batch": [holding.batch],
        "heads": [holding.heads],
        "queries": holding.rows,
        "keys": holding.keys,
    }
    return ", ".join(
        f"{name} {' '.join(f'{x.start}:{x.stop}' for x in own) or 'none'}"
        for name, own in chunks.items()
    )


def take(x: torch.Tensor, parts: Sequence[Ranges]) -> torch.Tensor:
    """The parts of a tensor along each axis, one after the other."""
    for axis, chunks in enumerate(parts):
        if sum(map(len, chunks)) < x.shape[axis]:
            pieces = [x.narrow(axis, c.start, len(c)) for c in chunks] or [x.narrow(axis, 0, 0)]
            x = torch.cat(pieces, axis)
    return x


def write_parts(whole: torch.Tensor, parts: Sequence[Ranges], shard: torch.Tensor) -> None:
    """Write a shard to where `take` has it from. Raises GraphError where its sizes differ."""
    sizes = [sum(map(len, chunks)) for chunks in parts]
    if [*shard.shape] != sizes:
        raise GraphError(f"shard: a shard is {[*shard.shape]}, and that rank has {sizes}")
    index = [torch.tensor([n for c in chunks for n in c], device=whole.device) for chunks in parts]
    if shard.numel():
        whole[torch.meshgrid(*index, indexing="ij")] = shard


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise GraphError for what is none of the known."""
    if value not in known:
        raise GraphError(f"shard: {name} {value!r} is none of {', '.join(known)}")


def check_attention(graph: Graph) -> None:
    """Raise GraphError unless a simplified graph is one attention, and a whole one."""
    ops = [eqn.op for eqn in graph.eqns]
    if len(ops) != 1 or not isinstance(ops[0], Attention):
        text = ", ".join(op_name(type(op)) for op in ops) or "nothing"
        raise GraphError(f"shard: the graph is to be one attention, and is {text}; shard that part")
    if ops[0].origin:
        raise GraphError(
            f"shard: the graph is a part of a whole, at {ops[0].origin}; shard the whole"
        )
    operands = zip(graph.eqns[0].args, ops[0].trains, strict=True)
    trained = [number for number, trains in operands if trains]
    if len({*trained}) < len(trained):
        raise GraphError("shard: an input is two operands; give each operand an input of its own")


def check_known(whole: Sharded, known: Mapping[str, torch.Tensor]) -> None:
    """Raise GraphError for tensors that the mask doesn't read, or that don't fit it."""
    inputs = whole.node.split(whole.eqn.args).mask
    names = [whole.graph.inputs[n].name for n in inputs.values()]
    if unknown := [name for name in known if name not in names]:
        read = ", ".join(names) or "nothing"
        raise GraphError(f"shard: no mask reads {', '.join(unknown)}; it reads {read}")
    for x in whole.known:
        spec = next(i.spec for i in whole.graph.inputs if i.name == x.name)
        if spec.type != x.spec.type:
            raise GraphError(
                f"shard: {x.name} is {x.spec.type}, and the graph declares {spec.type}"
            )
    B, H, M, N = whole.sizes
    check_tensors(whole.node.mask, (B, H, M, N), whole.mask_data())
