"""Where kernels find the rows of dense, packed and paged tensors: strides, starts, tables of pages.

The kernels take strides by batch entry, head, row and element: (0, head, row, element) of a packed
tensor [T,H,D], (page, head, row, element) of a pool [n,P,G,D].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from attn_graph.errors import Reason
from attn_graph.ir.storage.packed import LENGTHS, STARTS
from attn_graph.lowering.lying import SIDES, Lying
from attn_graph.spec import MOST_INT32, TensorSpec

MOST_BATCH = 2 * 4096  # more than AT_ONCE of kernels/sequences.py
Strides = tuple[int, ...]

# The entries of a table of pages sorted by page, in which order their gradients are added. Several
# entries may name a page. A stable sort brings them together and leaves them in the order of the
# table, so sums have equal bits each time.
NAMED, ORDER = "pages.named", "pages.order"  # read by the summing kernel
DTYPES = {NAMED: torch.int32, ORDER: torch.int64}
KEPT = sum(dtype.itemsize for dtype in DTYPES.values())  # bytes of an entry
PASSING = 2 * KEPT + 16  # and while they are sorted: copies, and a table within the lengths


def kernel_strides(lying: Lying, name: str, spec: TensorSpec) -> Strides:
    """The strides of a tensor as kernels take them; name: "k", "dlse", ..."""
    side = SIDES.get(name, "rows")
    if side == "keys" and lying.pages is not None:
        page, line, g, last = spec.strides
        return page, g, line, last
    if side not in lying.sides:
        return spec.strides
    row, head, *each = spec.strides
    return (0, head, row, *each) if each else (0, row, head)


def row_lines(lying: Lying) -> tuple[int, int, int]:
    """[B,H,M] for a kernel without sequences."""
    p = lying.problem
    return (p.B, p.H, p.M) if lying.T is None else (1, p.H, lying.T)


def row_programs(lying: Lying, block: int, short: int = 0) -> int:
    """Programs of one for each block of queries of each head. short: packed sequences of so many
    rows or fewer have none."""
    p = lying.problem
    if lying.T is None:
        return -(-p.M // block) * p.H * p.B
    return most_blocks(lying.T, block, p.B, short) * p.H


def key_programs(lying: Lying, block: int, heads: int) -> int:
    """Programs for each block of keys, per head of a number of heads."""
    p = lying.problem
    if lying.T_keys is None:
        return -(-p.N // block) * heads * p.B
    return most_blocks(lying.T_keys, block, p.B) * heads


def most_blocks(T: int, block: int, B: int, short: int = 0) -> int:
    """The most blocks of B sequences with more than `short` rows, T in all, and of the rows around
    them."""
    return -(-T // block) + min(B, T // (short + 1)) + 2


def kernel_pointers(lying: Lying) -> dict[str, str]:
    """Tensors of the places of sequences, by parameter."""
    names = {*lying.tables} - {*lying.scales} | {LENGTHS[side] for side in lying.sides}
    if lying.pages is not None and LENGTHS["keys"] in lying.problem.by_role.mask:
        names.add(LENGTHS["keys"])
    return {f"{name}_ptr": name for name in names}


def kernel_steps(lying: Lying, side: str) -> tuple[int, ...]:
    """The strides of starts and lengths of a side, and of the table of pages along them; 0 of
    absent ones."""
    specs = lying.tables.get(STARTS[side]), lying.problem.by_role.mask.get(LENGTHS[side])
    step = lying.pages.strides[1] if lying.pages and side == "keys" else 0
    return (*(0 if x is None else x.strides[0] for x in specs), step)


def kernel_tensors(
    lying: Lying, mask: Mapping[str, torch.Tensor], tables: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors of the places of sequences, by name. mask: the mask's tensors."""
    named = {n: mask[n] for n in LENGTHS.values() if n in mask}
    return named | dict(zip(lying.tables, tables, strict=True))


def kernel_sizes(lying: Lying) -> dict[str, int | tuple[int, ...] | None]:
    """Facts of packed tensors and of pages for kernels, by parameter."""
    # How many starts of sequences a program reads at once: few sizes, since each is a kernel.
    batch = next((n for n in (2**5, 2**8, 2**12) if n >= lying.problem.B + 2), MOST_BATCH)
    return {
        "B": lying.problem.B,
        "T": lying.T,
        "T_KEYS": lying.T_keys,
        "BATCH": batch if lying.sides else 0,
        "q_steps": kernel_steps(lying, "rows"),
        "kv_steps": kernel_steps(lying, "keys"),
        "pages_stride": lying.pages.strides[0] if lying.pages else 0,
        "POOL": lying.specs[1].shape[0] if lying.pages else 0,
        "PAGE": lying.page,
    }


def lying_reasons(lying: Lying) -> Iterator[Reason]:
    """Against packed tensors, pages and scales beyond the kernels."""
    yield from block_reasons(lying)
    for name, x in lying.pools.items():
        if (x.shape[1] - 1) * x.strides[1] > MOST_INT32:
            limit = f"reads pages whose rows lie within {MOST_INT32} elements"
            yield Reason(f"page_rows.{name}", limit, f"{name} is {x}")
    if lying.pools and not lying.specs[1].shape[0]:
        yield Reason("pool", "needs a page at least", f"k is {lying.specs[1]}")
    grad, roles = lying.problem.grad, lying.problem.node.roles
    for role, wanted in zip(roles, grad.wants if grad else (), strict=False):
        if (lying.sides or lying.pages) and wanted and role not in ("q", "k", "v", "sinks"):
            limit = "has gradients of q, k, v and sinks of packed tensors"
            yield Reason(f"packed_gradient.{role}", limit, f"that of {role} is wanted")


def block_reasons(lying: Lying) -> Iterator[Reason]:
    """Against scales of other blocks than the kernels read."""
    for name, x, blocks in zip(lying.scales, lying.specs[1:3], lying.blocks, strict=False):
        scale, last = lying.tables[name], len(x.shape) - 1
        own, pairs = (
            f"{name} is {scale} beside {x}",
            enumerate(zip(scale.shape, x.shape, strict=True)),
        )
        if any(n not in (1, m) for at, (n, m) in pairs if at not in (lying.row_axis, last)):
            limit = "has scales of blocks of rows and of columns; of other axes of each, or of all"
            yield Reason(f"scale_axes.{name}", limit, own)
        if any(n & (n - 1) for n in blocks):
            limit = "has scales of 1, 2, 4, 8, ... rows or columns, or of all"
            yield Reason(f"scale_blocks.{name}", limit, own)
        if blocks[0] > 1 and "keys" in lying.sides:
            limit = "has scales of blocks of rows of padded keys or pages, not of packed ones"
            yield Reason(f"packed_scales.{name}", limit, own)


def sums_pages(lying: Lying) -> bool:
    grad = lying.problem.grad
    return lying.pages is not None and grad is not None and any(grad.wants[1:3])


def order_pages(
    table: torch.Tensor, lengths: torch.Tensor | None, page: int, pool: int
) -> dict[str, torch.Tensor]:
    """NAMED: the pages of a table [B,pages], ascending. ORDER: the entry naming each.

    page: rows of one. pool: the number of pages; it also stands for entries past the lengths [B].
    """
    named = table.clamp(0, pool - 1).to(DTYPES[NAMED])
    if lengths is not None:
        begin = torch.arange(0, table.shape[1] * page, page, device=table.device)
        named = named.where(begin < lengths[:, None], pool)
    values, order = named.flatten().sort(stable=True)
    return {NAMED: values, ORDER: order}


def order_bytes(lying: Lying) -> int:
    """Bytes allocated by `order_pages`, at most."""
    if lying.pages is None or not sums_pages(lying):
        return 0
    return (KEPT + PASSING) * prod(lying.pages.shape)
