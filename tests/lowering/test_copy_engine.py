"""Kernels that read tiles by the copy engine of Hopper GPUs (TMA), where it can, or by pointers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.layouts import result_spec
from attn_graph.lowering import parts
from attn_graph.lowering.codegen.launches import Descriptor
from attn_graph.lowering.triton.plan import Flash
from attn_graph.spec import TensorSpec, dense_strides
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.kernels import CPU, interpreted, problem_of

F32 = torch.float32


def planned_for(gpu: str, *specs: ag.TensorSpec) -> dict[str, tuple[list[str], tuple[int, int]]]:
    """What kernels of a causal attention read by descriptors, and their tiles."""
    target, launches = ag.Target.of(gpu), {}
    for graph in ag.vjp(ag.attention(*specs, mask=ag.Causal()), ["q", "k", "v"]):
        for x in Flash.plan(problem_of(graph), target).launches:
            if x.kernel != "delta":
                sizes = x.fixed["BLOCK_M"], x.fixed["BLOCK_N"]
                launches[x.kernel] = sorted(x.descriptors), sizes
    return launches


def test_on_hopper_the_copy_engine_brings_what_it_can() -> None:
    """Half precision in rows on 16 bytes, each element in its own place; tiles are made for it."""
    x = ag.TensorSpec((4, 32, 4096, 128), torch.bfloat16)
    every = ["do_desc", "k_desc", "q_desc", "v_desc"]
    assert planned_for("h200", x, x, x) == {
        "forward": (every[1:], (128, 64)),
        "query_gradient": (every, (128, 128)),
        "key_gradient": (every, (64, 64)),
    }
    repeated = ag.TensorSpec(x.shape, x.dtype, (x.strides[0], 0, *x.strides[2:]))
    odd = ag.TensorSpec(x.shape, x.dtype, (32 * 4096 * 136, 4096 * 136, 132, 1))
    for v in (repeated, odd):
        planned = planned_for("h200", x, x, v)
        assert planned["forward"] == (["k_desc", "q_desc"], (128, 128))
        assert planned["key_gradient"] == (["do_desc", "k_desc", "q_desc"], (32, 64))
    whole, wide = (ag.TensorSpec((*x.shape[:3], n), d) for n, d in ((128, F32), (256, x.dtype)))
    for gpu, spec in (("h200", whole), ("h200", wide), ("a100", x), ("b200", x)):
        assert not any(names for names, _ in planned_for(gpu, spec, spec, spec).values())


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 20), st.integers(1, 20)),
    gap=st.integers(0, 2),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_strides_of_axes_of_size_1_are_those_of_a_dense_tensor(
    shape: tuple[int, int, int, int], gap: int, dtype: torch.dtype
) -> None:
    """No stride is less than a row, and all are multiples of the copy engine's 16 bytes."""
    row = -(-shape[3] // 8) * 8 + 8 * gap
    strides = (shape[1] * shape[2] * row, shape[2] * row, row, 1)
    spec = ag.TensorSpec(shape, dtype, strides)
    tiles = Descriptor.tiles("q", spec, 64, 128)
    lone = [n == 1 for n in shape[:3]]
    assert all(s % 8 == 0 and s >= shape[3] for s in tiles.strides[:3])
    assert all(s == t for s, t, one in zip(tiles.strides, strides, lone, strict=False) if not one)
    assert tiles.strides == strides or (gap and any(lone))


@interpreted
@given(
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    rows=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    order=st.sampled_from(((0, 1, 2, 3), (0, 2, 1, 3))),
    mask=st.sampled_from((None, ag.Causal("bottom_right"), ag.Window(20, 3, "top_left"))),
    seed=seeds,
)
@settings(max_examples=max(3, settings().max_examples // 25))  # each runs eight kernels
def test_by_the_copy_engine_and_by_pointers_the_bits_are_the_same(
    dtype: torch.dtype,
    rows: tuple[int, int],
    order: tuple[int, ...],
    mask: ag.Mask | None,
    seed: int,
) -> None:
    """Tensors that begin off 16 bytes are read by pointers, whatever the plan knew."""
    shapes = (1, 4, rows[0], 24), (1, 2, rows[1], 24), (1, 2, rows[1], 16)
    specs = [TensorSpec(x, dtype, dense_strides(x, order)) for x in shapes]
    forward, backward = ag.vjp(ag.attention(*specs, mask=mask))
    with pytest.MonkeyPatch.context() as patch:  # parts of keys, which few queries have, have none
        patch.setattr(parts, "MOST_QUERIES", 0)
        planned = [Flash.plan(problem_of(graph), CPU) for graph in (forward, backward)]
    tiled = {x.kernel: sorted(x.descriptors) for flash in planned for x in flash.launches}
    for short in ("delta", "sum_parts", "merge_parts"):
        assert not tiled.pop(short, [])
    read = ["do_desc", "k_desc", "q_desc", "v_desc"]
    assert tiled == {"forward": read[1:], "query_gradient": read, "key_gradient": read}
    inputs = dict(zip("qkv", tensors_for(forward, seed), strict=True))
    cotangents = cotangents_for(forward, seed)
    results = [result_spec(forward, i) for i in forward.outputs]
    on, off = (bits_of(planned, inputs, results, cotangents, past) for past in (0, 1))
    assert on == off


def bits_of(
    planned: list[Flash], inputs: dict[str, torch.Tensor], results: list[TensorSpec],
    cotangents: Sequence[torch.Tensor], past: int,
) -> list[list[float]]:  # fmt: skip
    """o, lse and the gradients, of operands that begin `past` elements off 16 bytes."""
    named: dict[str, Any] = {n: moved(x, past) for n, x in inputs.items()}
    named |= {
        n: torch.empty(s.shape, dtype=s.dtype) for n, s in zip(("o", "lse"), results, strict=True)
    }
    forward, backward = planned
    named |= {n: torch.empty(b.shape, dtype=b.dtype) for n, b in forward.buffers.items()}
    for launch in forward.launches:
        launch({**named, **forward.tables})
    named["do"] = moved(cotangents[0], past)
    named |= {f"grad{n}": torch.empty_like(x) for n, x in enumerate(inputs.values())}
    named |= {n: torch.empty(b.shape, dtype=b.dtype) for n, b in backward.buffers.items()}
    for launch in backward.launches:
        launch({"dlse": None, "o.strides": named["o"].stride(), **named, **backward.tables})
    return [named[n].double().flatten().tolist() for n in ("o", "lse", "grad0", "grad1", "grad2")]


def moved(x: torch.Tensor, past: int) -> torch.Tensor:
    """x at an address so many elements past a multiple of 16 bytes."""
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    return torch.zeros(reach + past, dtype=x.dtype).as_strided(x.shape, x.stride(), past).copy_(x)
