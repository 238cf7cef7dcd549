"""Products on tensor cores of numbers of 4 and 8 bits, by scales that lie in tensor memory."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_graph.testing.gpu import Fault, virtual_gpu
from attn_graph.testing.gpu.device import LOADED

PROBES: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
FLOAT4 = torch.cat([FLOAT4, -FLOAT4])
EIGHTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMS = [("e2m1", "e2m1", 32), ("e2m1", "e2m1", 16)]
FORMS += [(a, b, 32) for a in EIGHTS for b in EIGHTS]
FORMS += [("e4m3", "e2m1", 32), ("e2m1", "e5m2", 32)]
few = settings(max_examples=max(2, settings().max_examples // 50))


def numbers(rows: int, K: int, kind: str, drawn: torch.Generator) -> torch.Tensor:
    if kind == "e2m1":
        return torch.randint(0, 256, (rows, K // 2), dtype=torch.uint8, generator=drawn)
    return torch.randn(rows, K, generator=drawn).to(EIGHTS[kind])


def scales(rows: int, K: int, vector: int, drawn: torch.Generator) -> torch.Tensor:
    """Powers of two by their exponent; or for 16 numbers in 8 bits."""
    shape = rows, K // vector
    if vector == 32:
        return torch.randint(120, 134, shape, dtype=torch.uint8, generator=drawn)
    return torch.rand(shape, generator=drawn).to(torch.float8_e4m3fn)


def plain(x: torch.Tensor, scale: torch.Tensor, kind: str, vector: int) -> torch.Tensor:
    """The numbers in float64."""
    parts = [FLOAT4[(x & 15).long()], FLOAT4[(x >> 4).long()]] if kind == "e2m1" else [x.double()]
    by = torch.exp2(scale.double() - 127) if vector == 32 else scale.double()
    return torch.stack(parts, -1).flatten(1) * by.repeat_interleave(vector, 1)


def same(b: torch.Tensor) -> torch.Tensor:
    return b


def describe(b: torch.Tensor, columns: int | None = None) -> object:
    """A descriptor of a matrix, or of its first columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape = [len(b), columns or b.shape[1]]
    return TensorDescriptor(b, shape, [*b.stride()], [*b.shape])


def multiply(
    a_kind: str,
    b_kind: str,
    vector: int,
    N: int,
    K: int,
    seed: int,
    padded: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """How far a product on a virtual B200 is from that in float64, for its size without signs.

    padded: of the right operand, if the copy engine pads it: the argument for the kernel.
    """
    drawn = torch.Generator().manual_seed(seed)
    out = torch.empty(128, N)
    a, b = numbers(128, K, a_kind, drawn), numbers(N, K, b_kind, drawn)
    a_scales, b_scales = scales(128, K, vector, drawn), scales(N, K, vector, drawn)
    packed = (2 if kind == "e2m1" else 1 for kind in (a_kind, b_kind))
    given = (N, K, *packed, a_kind, b_kind, vector)
    if padded is None:
        PROBES.multiply_scaled[(1,)](a, a_scales, b, b_scales, out, *given)
    else:
        PROBES.multiply_padded[(1,)](a, a_scales, padded(b), b_scales, out, N, K, padded is same)
    left, right = plain(a, a_scales, a_kind, vector), plain(b, b_scales, b_kind, vector)
    return ((out - left @ right.T).abs() / (left.abs() @ right.abs().T + 1e-30)).max()


@pytest.mark.parametrize(("a_kind", "b_kind", "vector"), FORMS)
@few
@given(N=st.sampled_from([16, 64, 256]), K=st.sampled_from([128, 256]), seed=st.integers(0, 99))
def test_a_product_by_scales_is_that_of_scaled_numbers(
    a_kind: str, b_kind: str, vector: int, N: int, K: int, seed: int
) -> None:
    with virtual_gpu("b200") as device:
        error = multiply(a_kind, b_kind, vector, N, K, seed)
    assert error <= K * 2.0**-24  # sums of K numbers in float32
    assert device.programs == 1


def test_scales_that_nothing_wrote_are_reported() -> None:
    PROBES.multiply_scaled.device_caches.clear()
    before = {*LOADED}
    with virtual_gpu("b200"):
        multiply("e2m1", "e2m1", 32, 64, 128, 0)
        (function,) = {*LOADED} - before
        store = r"@\S+ tcgen05\.st\.sync\.aligned\.32x32b\.x4\.b32.*"
        LOADED[function], count = re.subn(store, "", LOADED[function])
        assert count
        with pytest.raises(Fault, match=r"tcgen05\.mma of tensor memory.* nothing was written"):
            multiply("e2m1", "e2m1", 32, 64, 128, 0)
    PROBES.multiply_scaled.device_caches.clear()


@pytest.mark.parametrize("padded", [same, describe])
@few
@given(N=st.sampled_from([16, 64, 256]), K=st.sampled_from([128, 256]), seed=st.integers(0, 99))
def test_numbers_of_4_bits_are_padded_by_the_copy_engine(
    padded: Callable[[torch.Tensor], object], N: int, K: int, seed: int
) -> None:
    with virtual_gpu("b200"):
        assert multiply("e4m3", "e2m1", 32, N, K, seed, padded) <= K * 2.0**-24


def test_a_copy_of_4_bits_takes_rows_of_128_numbers() -> None:
    with virtual_gpu("b200"), pytest.raises(RuntimeError, match="off a multiple of 128: 64"):
        multiply("e4m3", "e2m1", 32, 64, 128, 0, lambda b: describe(b, 32))
