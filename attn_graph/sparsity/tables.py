"""Tables for `KeepBlocks`, from the blocks of keys that each block of queries selects."""

from __future__ import annotations

import torch

from attn_graph.errors import TensorError, binds, show
from attn_graph.spec import INTEGERS, to_integer


@binds()
def select_blocks(
    indices: torch.Tensor, blocks: int, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Booleans [..., blocks], true at the blocks that `indices` [..., most] name.

    counts [...]: how many of them count, from the first on; by default all. Reads nothing on the
    host, so it works in captured CUDA graphs: an index outside of [0, blocks) that counts is an
    error on CPUs and undefined on GPUs. Raises TensorError for other dtypes and shapes.

    The indices of a top-k selection make the table of a mask:

        table = ag.select_blocks(scores.topk(16).indices, blocks=N // 64)
    """
    size = to_integer(blocks)
    if size is None or size < 1:
        raise TensorError(f"select_blocks: {show(blocks)} is not a number of blocks, at least 1")
    for name, x in (("indices", indices), ("counts", counts)):
        if x is not None and x.dtype not in INTEGERS:
            raise TensorError(f"select_blocks: {name} are {x.dtype}; they must be integers")
    if not indices.ndim or (counts is not None and counts.shape != indices.shape[:-1]):
        given = "none" if counts is None else [*counts.shape]
        raise TensorError(
            f"select_blocks: indices {[*indices.shape]} and counts {given} do not fit; they must "
            "be [..., most] and [...]"
        )
    named, names = indices.long(), torch.ones_like(indices, dtype=torch.int8)
    if counts is not None:  # the others add nothing to block 0
        rank = torch.arange(indices.shape[-1], device=indices.device)
        counted = rank < counts[..., None]
        named, names = named.where(counted, 0), names.where(counted, 0)
    table = indices.new_zeros(*indices.shape[:-1], size, dtype=torch.int8)
    return table.scatter_reduce_(-1, named, names, "amax").bool()
