"""Keys in pages, or quantised, on a CPU: read a block at a time, into memory that stays small.

A block of keys is an attention of its own, under a mask moved there. Results of blocks are joined
by their lse. Gradients are added: the lse of all keys makes them independent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import final

import torch
from attrs import Factory, evolve, field, frozen

from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.boxes import Piece, move_attention
from attn_graph.ir.builder import Builder
from attn_graph.ir.graph import Eqn, Graph, Op
from attn_graph.ir.ops import join_statistics
from attn_graph.ir.packed import Packed, run_one
from attn_graph.ir.paging import list_entries
from attn_graph.ir.scaling import Dequantise
from attn_graph.kernels.merging import merge_, sink_
from attn_graph.lowering.backend import Executable
from attn_graph.lowering.cpu.fused_calls import sink_gradient_of, wanted_sinks
from attn_graph.masks.moving import Box
from attn_graph.spec import TensorSpec, accumulator

BLOCK_BYTES = 2**22  # of k and v read at a time
MOST_BLOCKS = 256  # executables kept by a sequence's run
Lower = Callable[[Graph], Executable]
Tensors = Sequence[torch.Tensor]
Rooms = Mapping[int, torch.Tensor]  # for gathered operands, by number
Keys = torch.Tensor | slice  # of a block: its pages, or a range of keys


def gather_pages(
    pool: torch.Tensor, pages: torch.Tensor, count: int, room: torch.Tensor | None = None
) -> torch.Tensor:
    """The first `count` rows of some pages of a pool [n,P,G,D], as keys [1,G,count,D].

    They lie as [n,P,G,D], or, if the pool is dense as [n,G,P,D], in this order. room: for all rows
    of the pages, flat; None: new memory.
    """
    n, P, G, D = pool.shape
    k, by_head = len(pages), pool.transpose(1, 2)
    out = None if room is None else room[: k * P * G * D]
    if pool.is_contiguous() or not by_head.is_contiguous():
        rows = select_rows(pool, pages, out if out is None else out.view(k, P, G, D))
        return rows.view(1, k * P, G, D).transpose(1, 2)[:, :, :count]
    heads = torch.arange(G, device=pages.device)[:, None]
    places, out = (pages * G + heads).flatten(), out if out is None else out.view(G * k, P * D)
    rows = select_rows(by_head.view(n * G, P * D), places, out)
    return rows.view(1, G, k * P, D)[:, :, :count]


def select_rows(x: torch.Tensor, places: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """x[places]. For tensors without memory it takes a tenth of PyTorch's time."""
    if x.is_meta:
        return x.new_empty((len(places), *x.shape[1:]))
    return torch.index_select(x, 0, places, out=out)


def add_to_pages(pool: torch.Tensor, x: torch.Tensor, pages: torch.Tensor) -> None:
    """Add x [1,G,L,D] to the first L rows of some pages of a pool [n,P,G,D], in their order."""
    _, P, G, D = pool.shape
    rows = x[0].transpose(0, 1).to(pool.dtype)
    full, rest = divmod(len(rows), max(1, P))
    whole = rows[: full * P].reshape(full, P, G, D)
    pool.index_add_(0, pages[:full], whole)
    if rest:
        pool[int(pages[full]), :rest] += rows[full * P :]


def dequantise_keys(operands: Tensors, scaled: bool) -> Tensors:
    """The operands, with k and v times their scales, the last two, if these are `scaled`."""
    if not scaled:
        return operands
    q, k, v, *rest, k_scale, v_scale = operands
    pairs = (k, k_scale), (v, v_scale)
    return [q, *(run_one(Dequantise(), x, scale, q) for x, scale in pairs), *rest]


def block_keys(op: Packed, specs: Sequence[TensorSpec]) -> int:
    """How many keys are read at a time: of whole pages. specs: of the operands."""
    page = specs[1].shape[1] if op.paged else 1
    return max(1, BLOCK_BYTES // max(1, key_bytes(op, specs) * page)) * page


def key_bytes(op: Packed, specs: Sequence[TensorSpec]) -> int:
    """Bytes of one key and its value of all heads, dequantised."""
    q, k, v = specs[:3]
    dtype = accumulator(q.dtype) if op.scaled else k.dtype
    return k.shape[2 if op.paged else 1] * (k.shape[-1] + v.shape[-1]) * dtype.itemsize


def check_table(pool: Sequence[int], table: torch.Tensor, *lengths: torch.Tensor) -> None:
    """Raise PlanMismatchError for lengths beyond all pages, and for a used page outside the pool.
    pool: its shape. Reads the tensors on the host."""
    (n, P), pages = pool[:2], table.shape[1]
    begin, used = torch.arange(pages, device=table.device) * P, table
    for count in lengths:
        used = table[begin < count[:, None]]
    limits = zip((used, *lengths), (n - 1, pages * P), strict=False)
    if any(x.numel() and not 0 <= x.min() <= x.max() <= most for x, most in limits):
        deque(list_entries(P, n, table, *lengths), 0)  # raises, naming the entry


def as_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def meta_pages(pool: TensorSpec, keys: int) -> torch.Tensor:
    return torch.empty(-(-keys // max(1, pool.shape[1])), dtype=torch.int64, device="meta")


@final
@frozen
class KeyBlock:
    """Runs one block of keys, `op` on the tensors of `piece`. gives: for each result of a gradient,
    the number of its operand of the sequence."""

    piece: Piece
    executable: Executable
    gives: tuple[int, ...] = ()


@final
@frozen(eq=False)
class BlockRun:
    """Runs an attention, or its gradient, of one sequence, a block of keys at a time.

    specs: of its operands, with the pools of k and v if these are in pages. keys: of the sequence.
    size: of a block, in keys. scaled: k and v are quantised, and their scales the last operands.
    """

    op: Attention | AttentionGrad
    specs: tuple[TensorSpec, ...]
    keys: int
    size: int
    lower: Lower
    paged: bool = True
    scaled: bool = False
    block_at: Callable[[int], KeyBlock] = field(
        init=False,
        default=Factory(lambda run: lru_cache(MOST_BLOCKS)(run.make_block), takes_self=True),
    )

    @cached_property
    def node(self) -> Attention:
        """Its attention."""
        return self.op.attention

    @property
    def executable(self) -> Executable:
        """Runs the first block, as long as any, with the memory of all blocks."""
        first = self.block_at(0).executable
        beside = self.specs[0].type.bytes // self.specs[0].dtype.itemsize + self.specs[0].shape[2]
        wide = accumulator(self.specs[0].dtype).itemsize
        return evolve(first, temporary=first.temporary + 2 * wide * beside)

    def make_block(self, start: int) -> KeyBlock:
        _, H, M, _ = self.specs[0].shape
        keys = range(start, min(start + self.size, self.keys))
        box = Box(range(1), range(H), range(M), keys, (1, H, M, self.keys))
        node = self.node
        piece = move_attention(Eqn(node, tuple(range(len(node.ranks))), ()), box)
        sources = (0, 1, 2, *(feed.source for feed in piece.feeds))
        op: Op = piece.node
        gives: tuple[int, ...] = ()
        if grad := self.op.grad:
            wants = [n is not None and grad.wants[n] for n in sources]
            op = evolve(grad, attention=piece.node, wants=wants)
            gives = tuple(n for n in sources if n is not None and grad.wants[n])
        metas = [as_meta(spec) for spec in self.specs]
        own = meta_pages(self.specs[1], len(keys)) if self.paged else slice(keys.start, keys.stop)
        tensors = self.tensors(piece, metas, own, {})
        b = Builder(trusts=True)
        values = [b.input(f"x{n}", TensorSpec.like(x)) for n, x in enumerate(tensors)]
        return KeyBlock(piece, self.lower(b.graph(*b.emit(op, *values))), gives)

    def tensors(
        self, piece: Piece, operands: Tensors, own: Keys, rooms: Rooms
    ) -> list[torch.Tensor]:
        """The operands of a block. own: its keys. rooms: for k and v in pages."""
        count, end = len(piece.box.keys), len(operands) - 2 * self.scaled

        def read(n: int) -> torch.Tensor:
            if isinstance(own, slice):
                return operands[n][:, :, own]
            return gather_pages(operands[n], own, count, rooms.get(n))

        keys = map(read, (1, 2, *range(end, len(operands))))
        q, k, v = dequantise_keys([operands[0], *keys], self.scaled)
        rest = operands[len(self.node.ranks) : end]
        return [q, k, v, *piece.tensors(operands, piece.box), *rest]

    def blocks(self, pages: torch.Tensor | None) -> Iterator[tuple[KeyBlock, Keys]]:
        parts: Sequence[Keys] = [slice(n, n + self.size) for n in range(0, self.keys, self.size)]
        if pages is not None:
            parts = pages.split(self.size // self.specs[1].shape[1])
        for number, own in enumerate(parts):
            yield self.block_at(number * self.size), own

    def forward(
        self, operands: Tensors, pages: torch.Tensor | None, rooms: Rooms
    ) -> list[torch.Tensor]:
        sinks, results = self.node.split(operands).sinks, list[torch.Tensor]()
        for block, own in self.blocks(pages):
            made, _ = block.executable.run(*self.tensors(block.piece, operands, own, rooms))
            if results:
                join_results(self.node.stats, results, made)
            else:
                results = [made[0].to(made[1].dtype), *made[1:]]
        if sinks is not None:
            sink_(results[0], results[1 + self.node.stats.index("lse")], sinks)
        return results

    def backward(
        self,
        operands: Tensors,
        pages: torch.Tensor | None,
        rooms: Rooms,
        keep: Callable[[int, torch.Tensor, torch.Tensor], None],
    ) -> dict[int, torch.Tensor]:
        """The gradients, by number of the operand, except of k and v. `keep` takes these block by
        block: number, gradient, pages."""
        grad: AttentionGrad = self.op.grad
        wide = accumulator(self.specs[0].dtype)
        totals = {
            n: torch.zeros_like(x, dtype=wide)
            for n, x in enumerate(operands[: len(grad.wants)])
            if n not in (1, 2) and grad.wants[n]
        }
        for block, own in self.blocks(pages):
            made, _ = block.executable.run(*self.tensors(block.piece, operands, own, rooms))
            axes = {feed.source: feed.axes for feed in block.piece.feeds}
            for n, x in zip(block.gives, made, strict=True):
                if n in (1, 2):
                    assert isinstance(own, torch.Tensor)  # quantised keys have no gradient
                    keep(n, x, own)
                else:
                    block.piece.box.cut(totals[n], axes.get(n, "")).add_(x)
        if (place := wanted_sinks(grad)) is not None:
            totals[place] = sink_gradient_of(grad, operands[: len(grad.takes)])
        return totals


def join_results(stats: Sequence[str], results: Tensors, more: Tensors) -> None:
    """Join o and the statistics of the same rows over further keys, in place."""
    own, other = (dict(zip(("o", *stats), x, strict=True)) for x in (results, more))
    merge_(own["o"], own["lse"], other["o"], other["lse"])
    join_statistics(own, other)
