"""One sequence of a packed batch: its place, its pages, and its form as an attention of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import torch
from attrs import evolve, frozen

from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.modifiers import UNPLACED, Alibi, Modifier
from attn_graph.ir.ops import join_statistics
from attn_graph.ir.storage.packed import LEAVES, LENGTHS, Packed, and_parts, run_one, without_hidden
from attn_graph.ir.storage.paging import list_entries
from attn_graph.ir.storage.scaling import Dequantise, spread
from attn_graph.ir.terms.relative import RelativeBias
from attn_graph.ir.transforms.boxes import Piece
from attn_graph.kernels.merging import merge_
from attn_graph.lowering.backend import Executable
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.steps import Step, lease_rooms
from attn_graph.machine.tensors import lay_in_order
from attn_graph.machine.workspace import Scratch, Views, Workspace
from attn_graph.masks import LEAVES as KNOWN_LEAVES
from attn_graph.masks import Band, Join, KeyLengths, Mask, Prefix, QueryLengths
from attn_graph.masks.canonical import EVERYTHING
from attn_graph.masks.joins import leaves
from attn_graph.spec import TensorSpec, accumulator, memory_order

BLOCK_BYTES = 2**22  # of k and v in pages, or quantised, read at a time
Tensors = Sequence[torch.Tensor]
Lower = Callable[[Graph], Executable]


@final
@frozen
class Sizes:
    """The queries and keys of a sequence, and its lengths as the mask reads them."""

    rows: int
    keys: int
    q_length: int
    kv_length: int


@final
@frozen
class Span:
    """The place of one sequence: its batch entry, first row and first key, 0 in padded tensors.
    pages: of its keys. seen: the keys in pages that count; None: all."""

    entry: int
    row: int
    key: int
    sizes: Sizes
    pages: torch.Tensor | None = None
    seen: range | None = None

    def of_keys(self, keys: range, page: int) -> Span:
        """The place of some keys: whole pages of `page` keys, but for the last of all."""
        pages = self.pages
        if pages is not None:
            pages = pages[keys.start // page : -(-keys.stop // page)]
        sizes = evolve(self.sizes, keys=len(keys))
        seen = self.seen
        if seen is not None:
            seen = range(max(0, seen.start - keys.start), max(0, seen.stop - keys.start))
        return evolve(self, key=self.key + keys.start, sizes=sizes, pages=pages, seen=seen)


@final
@frozen(eq=False)
class Places:
    """The sequences of a call, as read on the host.

    rows, keys: of each the first one, and the length as the mask has it. In pages, seen: the keys
    of each that count, and table: their pages.
    """

    rows: Sequence[tuple[int, int]]
    keys: Sequence[tuple[int, int]]
    seen: Sequence[range] | None = None
    table: torch.Tensor | None = None

    @cached_property
    def least(self) -> tuple[int, int]:
        """How many rows q must have, and how many k, or how many pages there must be."""
        rows, keys = (max((a + n for a, n in x), default=0) for x in (self.rows, self.keys))
        pages = self.table
        if pages is None:
            return rows, keys
        return rows, int(pages.max()) + 1 if pages.numel() else 0


@final
@frozen
class KeyPart:
    """All keys of a sequence, or a block of them.

    op: of the sequence, an attention or a derivative. reads: its operands, by number. piece: the
    attention of a block; None for all keys.
    """

    op: Any  # of a Fused
    reads: tuple[int, ...]
    piece: Piece | None

    @cached_property
    def sources(self) -> tuple[int | None, ...]:
        """For each operand of a block's attention, the number of the sequence's."""
        return 0, 1, 2, *(feed.source for feed in (self.piece.feeds if self.piece else ()))

    @cached_property
    def gives(self) -> tuple[int, ...]:
        """For each result of a block's gradient, the number of its operand of the sequence."""
        return tuple(n for n in self.sources if n is not None and self.op.wants[n])

    @property
    def own(self) -> Op:
        """The op of these keys."""
        op: Op = self.op
        if self.piece is None:
            return op
        if op.grad is None:
            return self.piece.node
        grad: AttentionGrad = op.grad
        wants = [n is not None and grad.wants[n] for n in self.sources]
        return evolve(grad, attention=self.piece.node, wants=wants)

    def operands(self, views: Tensors) -> Tensors:
        """The operands of `own`. views: of the sequence, with the keys of a block alone."""
        if self.piece is None:
            return views
        rest = views[len(self.op.attention.ranks) :]
        return [*views[:3], *self.piece.tensors(views, self.piece.box), *rest]


def is_separable(op: Packed) -> bool:
    """True if a sequence is an attention of its own: no step depends on its number in the batch, or
    on the longest sequence."""
    node = op.attention
    masks = () if node.mask is None else leaves(node.mask)
    known = all(type(leaf) in KNOWN_LEAVES for leaf in masks)
    return known and all(is_relative(m, op) for m in node.modifiers)


def is_relative(modifier: Modifier, op: Packed) -> bool:
    if isinstance(modifier, Alibi | RelativeBias):
        fixed = modifier.align == "top_left" or getattr(modifier, "places", False)
        named = {LENGTHS[side] for side in ending_sides(op)} <= {*modifier.ragged}
        return fixed or (modifier.align == "bottom_right" and named)
    return isinstance(modifier, UNPLACED)


def ending_sides(op: Packed) -> tuple[str, ...]:
    """The sides with sequences ended by the mask: no more of them is read. Not queries [B,H,M,D]
    beside sinks: a row without keys has the sink for its lse."""
    parts, sinks = and_parts(op.attention.mask), op.attention.sinks
    ended = [side for side, leaf in LEAVES.items() if leaf in parts]
    return tuple(side for side in ended if side == "keys" or side in op.sides or not sinks)


def replace_lengths(mask: Mask, sizes: Sizes, ending: Sequence[str], most: dict[str, int]) -> Mask:
    """A mask with one sequence's lengths as numbers; the sides `ending` have no more rows and keys
    than these. most: the sizes without lengths."""
    match mask:
        case KeyLengths():
            return EVERYTHING if "keys" in ending else Prefix(max(0, sizes.kv_length))
        case QueryLengths() if "rows" in ending:
            return EVERYTHING
        case Band(low, high, ragged) if ragged:
            keys = sizes.kv_length if LENGTHS["keys"] in ragged else most["keys"]
            rows = sizes.q_length if LENGTHS["rows"] in ragged else most["rows"]
            low, high = (None if edge is None else edge + keys - rows for edge in (low, high))
            return Band(low, high)
        case Join():
            return type(mask)(*(replace_lengths(x, sizes, ending, most) for x in mask.parts))
    return mask


def expand_scales(op: Packed, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands, with scales for each head, and for each row or block of rows of one."""
    x = [*operands]
    for n, scale in op.scales(operands).items():
        shape, row = [*x[n].shape[:-1], scale.shape[-1]], row_axis(op, x[n])
        if scale.shape[row] > 1:
            shape[row] = scale.shape[row]
        x[len(op.op.ranks) + n - 1] = spread(scale, shape).expand(shape)
    return x


def row_axis(op: Packed, x: torch.Tensor) -> int:
    """The axis of rows of k or v as they lie."""
    return 0 if x.ndim == 3 else 1 if op.paged else 2


def cut_rows(x: torch.Tensor, first: int, n: int) -> torch.Tensor:
    """Rows of a packed tensor [T,H,D] as [1,H,n,D], or of a statistic [H,T] as [1,H,n], in one
    step: a short sequence takes little longer than views of it."""
    if x.ndim == 2:
        head, row = x.stride()
        return x.as_strided((1, x.shape[0], n), (0, head, row), x.storage_offset() + first * row)
    (_, H, D), (row, head, each) = x.shape, x.stride()
    return x.as_strided((1, H, n, D), (0, head, row, each), x.storage_offset() + first * row)


def repeat_rows(x: torch.Tensor, times: int, skip: int, n: int) -> torch.Tensor:
    """Rows of x [1,H,.,D], each as often in a row, without the first `skip`: n of them."""
    return x if times == 1 else x.repeat_interleave(times, 2)[:, :, skip : skip + n]


def gather_pages(
    pool: torch.Tensor,
    pages: torch.Tensor,
    room: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pages [k,W] of a pool [n,P,G,D], as keys [k,G,W P,D].

    They lie in the memory order of the pool. room: for them, flat; None: new memory. places: those
    of the pages, if known.
    """
    (n, P, G, D), (k, W) = pool.shape, pages.shape
    out = None if room is None else room[: k * W * P * G * D]
    if places is None:
        places = place_pages(pool, pages)
    if not lies_by_head(pool):
        rows = select_rows(pool, places, out if out is None else out.view(k * W, P, G, D))
        return rows.view(k, W * P, G, D).transpose(1, 2)
    _, row, head, number = pool.stride()
    heads = pool.as_strided(((n - 1) * heads_apart(pool) + G, P, D), (head, row, number))
    rows = select_rows(heads, places, out if out is None else out.view(k * G * W, P, D))
    return rows.view(k, G, W * P, D)


def place_pages(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Where `gather_pages` reads pages [k,W]: their numbers, or [k,G,W] those of their heads in a
    pool lying by head."""
    if not lies_by_head(pool):
        return pages
    (k, W), G = pages.shape, pool.shape[2]
    places = pages[:, None].expand(k, G, W)
    if pool.is_meta:
        return places
    return places * heads_apart(pool) + torch.arange(G, device=pages.device)[:, None]


def heads_apart(pool: torch.Tensor) -> int:
    """Heads from page to page in a pool that lies by head, of others between them too."""
    return pool.stride(0) // pool.stride(2)


def lies_by_head(pool: torch.Tensor) -> bool:
    """True if a pool [n,P,G,D] lies [n,G,P,D]: the rows of a head beside each other, and every page
    at whole heads from the one before."""
    n, P, G, _ = pool.shape
    page, row, head, _ = pool.stride()
    if G == 1 or P == 1 or n == 0:
        return False
    return row < head <= page and page % head == 0


def select_rows(x: torch.Tensor, places: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """x[places], of places in any shape. For tensors without memory it takes a tenth of PyTorch's
    time."""
    if x.is_meta:
        return x.new_empty((places.numel(), *x.shape[1:]))
    return torch.index_select(x, 0, places.flatten(), out=out)


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


def block_keys(lying: Lying) -> int:
    """How many keys are read at a time: of whole pages."""
    page = lying.page if lying.pages else 1
    return max(1, BLOCK_BYTES // max(1, key_bytes(lying) * page)) * page


def key_bytes(lying: Lying) -> int:
    """Bytes of one key and its value of all heads, dequantised."""
    q, k, v = lying.padded[:3]
    dtype = accumulator(q.dtype) if lying.scales else k.dtype
    return k.shape[1] * (k.shape[-1] + v.shape[-1]) * dtype.itemsize


def checked_table(
    pool: Sequence[int], table: torch.Tensor, seen: Sequence[range], *lengths: torch.Tensor
) -> torch.Tensor:
    """The table without the pages that no query sees. Raises PlanMismatchError for lengths beyond
    all pages, and for other pages outside the pool. pool: its shape. seen: the keys of each entry
    that count. Reads the tensors on the host."""
    (n, P), pages = pool[:2], table.shape[1]
    used = without_hidden(table, P, seen)
    limits = zip((used, *lengths), (n - 1, pages * P), strict=False)
    if any(x.numel() and not lies_within(x, most) for x, most in limits):
        deque(list_entries(P, n, table, *lengths, seen=seen), 0)  # raises, naming the entry
    return used


def lies_within(x: torch.Tensor, most: int) -> bool:
    """True if all numbers are from 0 to `most`."""
    low, high = x.aminmax()
    return low.item() >= 0 and high.item() <= most


def clear_hidden(op: Packed, read: Tensors, operands: Tensors) -> None:
    """Write 0 to padded keys out of pages that no query sees: their rows may hold anything."""
    seen = op.seen(dict(enumerate(operands)), [x.shape[2] for x in read[:2]])
    for x, side in zip(read, op.op.operand_sides, strict=True):
        for each, keys in zip(x if side == "keys" else (), seen, strict=False):
            each[:, : keys.start] = 0.0
            each[:, keys.stop :] = 0.0


def join_results(stats: Sequence[str], results: Tensors, more: Tensors) -> None:
    """Join o and the statistics of the same rows over further keys, in place."""
    own, other = (dict(zip(("o", *stats), x, strict=True)) for x in (results, more))
    merge_(own["o"], own["lse"], other["o"], other["lse"])
    join_statistics(own, other)


def padded_step(
    lying: Lying,
    due: Sequence[TensorSpec],
    lower: Lower,
    workspace: Workspace,
    check: Callable[[Tensors], None],
) -> Step:
    """Sequences padded to the longest possible one, in one graph. This is for steps dependent on a
    sequence's number in the batch, or on the largest length. due: how results lie. check: raises
    for operands of a call."""
    op, b, values = lying.packed, Builder(trusts=True), list[Value]()
    assert op is not None
    for n, (t, spec) in enumerate(zip(lying.padded, lying.specs, strict=True)):
        values.append(b.input(f"x{n}", spec if t == spec.type else TensorSpec(t.shape, t.dtype)))
    padded = lower(b.graph(*b.emit(op.op, *values)))

    orders = [*map(memory_order, due)]

    def run(operands: Tensors, _rooms: Views) -> Tensors:
        check(operands)
        operands = op.with_seen_pages(operands)
        read = op.read(run_one, operands)
        if op.paged:
            clear_hidden(op, read, operands)
        outputs, _ = padded.run(*read)
        return [*map(lay_in_order, op.write(run_one, outputs, operands), orders)]

    held = sum(t.bytes for t in (*lying.padded, *op.op.infer(*lying.padded)))
    note = f"sequences padded to the longest; {'; '.join(padded.notes)}"
    call = lease_rooms(run, Scratch({}), workspace)
    return Step(call, padded.workspace, padded.temporary + held, note, block=padded.block)
