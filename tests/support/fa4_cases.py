"""Calls of FlashAttention 4's own functions on virtual GPUs, held to the accuracy rule."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import evolve, field, frozen

import attn_graph as ag
from attn_graph.masks.places import Place
from attn_graph.testing.gpu import VirtualGpu
from attn_graph.testing.rule import distance, expect_gradients, expect_outputs

CAUSAL, TOP = ag.Causal("bottom_right"), ag.Causal("top_left")
BACKWARD_KEYS = {90: 128, 100: 128}


@final
@frozen
class Case:
    """An attention, and how the package is told of it.

    options: arguments of both passes. functions: names of functions in fa4_functions, by argument.
    lists: whether the package is given lists of tiles.
    """

    M: int = 256
    N: int = 256
    D: int = 64
    E: int | None = None
    H: int = 2
    G: int = 1
    B: int = 1
    dtype: torch.dtype = torch.bfloat16
    mask: Any = None
    graph: dict[str, Any] = field(factory=dict[str, Any])
    options: dict[str, Any] = field(factory=dict[str, Any])
    functions: dict[str, str] = field(factory=dict[str, str])
    lists: bool = False

    def describe(self) -> ag.Graph:
        """The graph."""
        shapes = (
            (self.H, self.M, self.D),
            (self.G, self.N, self.D),
            (self.G, self.N, self.E or self.D),
        )
        q, k, v = (ag.TensorSpec((self.B, *shape), self.dtype) for shape in shapes)
        return ag.attention(q, k, v, mask=self.mask, stats=True, **self.graph)


JOINED = Case(mask=TOP, functions={"mask_mod": "keep_causal"}, M=200, N=300)
CASES = {
    "causal, groups": Case(mask=CAUSAL, options={"causal": True}),
    "full, ragged": Case(M=130, N=200, H=1),
    "causal, f16, ragged": Case(
        M=130, N=200, H=1, mask=CAUSAL, options={"causal": True}, dtype=torch.float16
    ),
    "one query of one key": Case(M=1, N=1, H=1),
    "window": Case(
        M=200,
        N=300,
        mask=CAUSAL & ag.Window(40, 0, "bottom_right"),
        options={"window_size_left": 40, "window_size_right": 0},
    ),
    "soft cap": Case(
        mask=CAUSAL, graph={"soft_cap": 2.0}, options={"causal": True, "softcap": 2.0}, G=2
    ),
    "sinks": Case(
        mask=CAUSAL, graph={"sinks": ag.TensorSpec((2,), torch.float32)}, options={"causal": True}
    ),
    "mask function": JOINED,
    "mask function, lists": evolve(JOINED, lists=True),
    "lists, dead rows": Case(
        M=300,
        N=300,
        mask=TOP & ~ag.Prefix(160),
        functions={"mask_mod": "keep_behind_first"},
        lists=True,
    ),
    "lists, all full": Case(mask=ag.Prefix(1000), functions={"mask_mod": "keep_all"}, lists=True),
    "lists, all mixed": Case(
        M=100, N=300, mask=TOP, functions={"mask_mod": "keep_causal"}, lists=True
    ),
    "lists, one tile": Case(
        M=64, N=64, mask=TOP, functions={"mask_mod": "keep_causal"}, lists=True
    ),
    "score function": Case(
        graph={"soft_cap": 2.0},
        functions={"score_mod": "cap_scores", "score_mod_bwd": "cap_gradient"},
        M=130,
        N=200,
        G=2,
    ),
    "head dim 128": Case(M=200, N=200, D=128, H=1, mask=CAUSAL, options={"causal": True}),
    "head dim 96": Case(M=130, N=200, D=96, H=1, mask=CAUSAL, options={"causal": True}),
}


def tile_lists(case: Case, tile: tuple[int, int], by_keys: bool) -> Any:
    """Lists of mixed and of full tiles, from the mask evaluated densely."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    M, N = case.M, case.N
    i, j = torch.arange(M)[:, None], torch.arange(N)[None]
    kept = case.mask.resolved(M, N, ()).keep(Place(0, 0, i, j, case.H, M, N)).expand(M, N)
    rows, keys = -(-M // tile[0]), -(-N // tile[1])
    padded = torch.zeros(rows * tile[0], keys * tile[1], dtype=torch.bool)
    padded[:M, :N] = kept
    tiles = padded.reshape(rows, tile[0], keys, tile[1])
    full = tiles.all(3).all(1)
    kinds = {"mixed": tiles.any(3).any(1) & ~full, "full": full}
    parts = []
    for flags in kinds.values():
        flags = (flags.T if by_keys else flags)[None, None]
        count = flags.sum(-1).int().contiguous()
        order = torch.argsort((~flags).int(), dim=-1, stable=True).int().contiguous()
        parts += [count, order]
    return BlockSparseTensorsTorch(*parts, block_size=tile)


def forward_tile(case: Case, sm: int) -> tuple[int, int]:
    """The tile of lists for a forward pass."""
    return (256 if sm == 100 and case.M * case.H // case.G > 128 else 128), 128


def arguments(case: Case) -> dict[str, Any]:
    """What the package is told, without lists."""
    from tests.support import fa4_functions

    given = {name: getattr(fa4_functions, x) for name, x in case.functions.items()}
    return {**case.options, **given}


def execute(device: VirtualGpu, case: Case, backward: bool) -> float:
    """Both passes; the largest error as a share of what the rule allows. Raises AssertionError."""
    from flash_attn.cute import interface

    generator, graph = torch.Generator().manual_seed(0), case.describe()
    tensors = []
    for n, x in enumerate(graph.inputs):
        shape = x.spec.shape if n > 2 else [x.spec.shape[axis] for axis in (0, 2, 1, 3)]
        made = torch.randn(shape, generator=generator).to(x.spec.dtype)
        tensors.append(made if n > 2 else made.transpose(1, 2))
    q, k, v, *rest = (x.transpose(1, 2) if x.ndim == 4 else x for x in tensors)
    given = arguments(case)
    if rest:
        given["learnable_sink"] = rest[0]
    forward = {name: x for name, x in given.items() if name != "score_mod_bwd"}
    sm = device.target.sm
    if case.lists:
        forward["block_sparse_tensors"] = tile_lists(case, forward_tile(case, sm), False)
        given["block_sparse_tensors"] = tile_lists(case, (128, BACKWARD_KEYS[sm]), True)
    o, lse = interface._flash_attn_fwd(q, k, v, return_lse=True, **forward)[:2]
    results: list[tuple[torch.Tensor, ...]] = [(o.transpose(1, 2), lse)]
    dues = [expect_outputs(graph, tensors)]
    if backward:
        do = torch.randn(o.shape, generator=generator).to(o.dtype)
        dlse = torch.randn(lse.shape, generator=generator)
        made = interface._flash_attn_bwd(q, k, v, o, do, lse, dlse=dlse, **given)
        own = [x.transpose(1, 2) if x.ndim == 4 else x for x in made if x is not None]
        results.append(tuple(own))
        dues.append((*expect_gradients(graph, tensors, (do.transpose(1, 2), dlse)).values(),))
    shares = [0.0]
    for due, got in zip(dues, results, strict=True):
        for each, result in zip(due, got, strict=True):
            each.check(result, f"FlashAttention 4 on {device.target.name}, ")
            shares.append(distance(result, each.ref) / each.allowance(result.dtype))
    return max(shares)
