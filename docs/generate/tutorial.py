"""The forward kernel of Triton's tutorial on fused attention, written anew after its description.

FlashAttention 2's algorithm: a block of queries walks tiles of keys, which the copy engine fetches
by descriptors, first those that need no mask, then those on the diagonal. Scores are scaled after
their maximum is taken, and o is divided once. For figures beside ours: nothing else runs it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import evolve

from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.codegen.machine_code import MachineCode, compile_for, inspect_compiled
from docs.generate.sass import Body, read_body

TILE = Tiling(128, 128, 8, 2)  # the best of those that the tutorial searches, on sm_90


@triton.jit
def attend_fused(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, scale, heads, rows,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """q, k, v [B*H,rows,D] -> o, and m [B*H,rows], the logarithm in base 2 of each row's sum."""
    block, head = tl.program_id(0), tl.program_id(1)
    count = heads * rows
    k = tl.make_tensor_descriptor(k_ptr, [count, D], [D, 1], [BLOCK_N, D])
    v = tl.make_tensor_descriptor(v_ptr, [count, D], [D, 1], [BLOCK_N, D])
    q = tl.make_tensor_descriptor(q_ptr, [count, D], [D, 1], [BLOCK_M, D])
    o = tl.make_tensor_descriptor(o_ptr, [count, D], [D, 1], [BLOCK_M, D])
    first, base = block * BLOCK_M, head * rows
    i = first + tl.arange(0, BLOCK_M)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    q_tile = q.load([base + first, 0])
    stop = first if CAUSAL else rows
    acc, total, m = walk_keys(
        acc, total, m, q_tile, k, v, base, 0, stop, i, scale * 1.44269504, BLOCK_N, False
    )
    if CAUSAL:
        acc, total, m = walk_keys(
            acc, total, m, q_tile, k, v, base, first, first + BLOCK_M, i, scale * 1.44269504,
            BLOCK_N, True,
        )  # fmt: skip
    tl.store(m_ptr + base + i, m + tl.math.log2(total))
    o.store([base + first, 0], (acc / total[:, None]).to(o_ptr.dtype.element_ty))


@triton.jit
def walk_keys(
    acc, total, m, q, k, v, base, start, stop, i, scale, BLOCK_N: tl.constexpr,
    DIAGONAL: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys start.. to stop."""
    for key in tl.range(start, stop, BLOCK_N):
        key = tl.multiple_of(key, BLOCK_N)
        s = tl.dot(q, k.load([base + key, 0]).T)
        if DIAGONAL:
            j = key + tl.arange(0, BLOCK_N)
            s = s * scale + tl.where(i[:, None] >= j[None, :], 0, -1.0e6)
            new = tl.maximum(m, tl.max(s, 1))
            s -= new[:, None]
        else:
            new = tl.maximum(m, tl.max(s, 1) * scale)
            s = s * scale - new[:, None]
        p = tl.math.exp2(s)
        shrink = tl.math.exp2(m - new)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), v.load([base + key, 0]), acc)
        m = new
    return acc, total, m


def compile_tutorial(sm: int, size: int, causal: bool) -> tuple[MachineCode, Body]:
    """What its machine code needs, in bfloat16, and its loops. size: of a head.

    The one tile on the diagonal is not a loop, but stands behind the other's.
    """
    machine = compile_kernel(sm, size, causal)
    body = read_body(machine.sass)
    if not causal:
        return machine, body
    plain = read_body(compile_kernel(sm, size, False).sass).outside
    mixed = evolve(body.full, issued=body.outside - plain)
    return machine, Body((body.full, mixed), plain)


def compile_kernel(sm: int, size: int, causal: bool) -> MachineCode:
    """The same, as it is read."""
    from triton.runtime.jit import MockTensor

    tensors = [MockTensor(torch.bfloat16)] * 4
    with compile_for(sm):
        compiled = attend_fused.warmup(
            *tensors, MockTensor(torch.float32), size**-0.5, 64, 4096, D=size, CAUSAL=causal,
            BLOCK_M=TILE.block_m, BLOCK_N=TILE.block_n, num_warps=TILE.warps,
            num_stages=TILE.stages, grid=(1,),
        )  # fmt: skip
    return inspect_compiled(compiled, "tutorial", TILE.warps)
