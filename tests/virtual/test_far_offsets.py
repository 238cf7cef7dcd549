"""Tensors of more than 2^31 elements on virtual GPUs: only pages in use are there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.testing.agreement import check_outputs, run_plan
from attn_graph.testing.gpu import Fault, virtual_gpu
from attn_graph.testing.gpu.regions import PAGE, mark_elements
from attn_graph.testing.rule import expect_outputs
from attn_graph.testing.tensors import tensors_for
from tests.support.ptx_programs import run_ptx
from tests.support.virtual_cases import CAUSAL, attention, machine

FAR = 2**31 + 64  # elements from one head to the next; a multiple of what the copy engine asks for


def lay_far(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory that is mapped where it is touched, heads more than 2^31 apart."""
    _, H, L, D = x.shape
    room = torch.empty(FAR * (H - 1) + L * D, dtype=x.dtype)
    return room.as_strided(x.shape, (FAR * H, FAR, D, 1)).copy_(x)


@pytest.mark.parametrize("sm", [80, 90])
def test_kernels_take_tensors_whose_offsets_pass_32_bits(sm: int) -> None:
    x = ag.TensorSpec((1, 2, 70, 64), torch.bfloat16)
    tensors = tuple(map(lay_far, tensors_for(ag.attention(x, x, x), 0)))
    graph = ag.attention(*map(ag.TensorSpec.like, tensors), mask=CAUSAL, stats=True)
    with virtual_gpu(machine(sm)) as device:
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        check_outputs(plan, graph, tensors)
    assert device.programs


def test_a_pool_may_have_more_elements_than_32_bits_count() -> None:
    P, D, n = 64, 64, 2**19 + 2  # rows of a page, pages of the pool
    whole = attention(M=5, N=3 * P, G=1, dtype=torch.bfloat16, stats=False)
    q, *few = tensors_for(whole, 0)
    used = torch.tensor([[n - 1, 0, 2**19]], dtype=torch.int32)
    pools = [torch.empty(n, P, 1, D, dtype=torch.bfloat16) for _ in few]
    for pool, x in zip(pools, few, strict=True):
        pool[used[0].long()] = x.reshape(3, P, 1, D)
    specs = [ag.TensorSpec.like(x) for x in (q, *pools)]
    graph = ag.attention(*specs, pages=ag.TensorSpec.like(used))
    with virtual_gpu("h100") as device:
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        (due,), (o,) = expect_outputs(whole, (q, *few)), run_plan(plan, (q, *pools), pages=used)
    due.check(o)


def test_an_element_far_into_a_tensor_is_found_and_its_neighbour_of_none_is_not() -> None:
    x = torch.empty(2**32)[::2]
    x[-1] = 3.0
    at = "mov.b64 %d1, 17179869176; add.s64 %d0, %d0, %d1; "
    run_ptx(at + "ld.global.b32 %r1, [%d0];", {"x": x})
    with pytest.raises(Fault, match="that belong to no element"):
        run_ptx(at + "ld.global.b32 %r1, [%d0+4];", {"x": x})


@given(data=st.data())
def test_pages_hold_the_elements_that_the_whole_storage_holds(data: st.DataObject) -> None:
    """Strides in any order, with gaps, of overlapping rows, and 0; pages of few bytes."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    strides = [data.draw(st.integers(0, 20)) for _ in shape]
    start = data.draw(st.integers(0, 9))
    unit, dtype = data.draw(
        st.sampled_from([(1, torch.float16), (2, torch.float16), (2, torch.float32)])
    )
    x = torch.zeros(start + 4 * 5 * 20, dtype=dtype).as_strided(shape, strides, start)
    page = data.draw(st.sampled_from([4, 32, 256, PAGE]))
    nbytes = x.untyped_storage().nbytes()
    valid = np.zeros(nbytes // unit, bool)
    for first in range(0, nbytes, page):
        before = valid.copy()
        mark_elements(valid, unit, x, first, min(first + page, nbytes))
        changed = np.flatnonzero(valid != before) * unit
        assert ((first <= changed) & (changed < first + page)).all()
    x.fill_(torch.nan)
    due = torch.empty(0, dtype=dtype).set_(x.untyped_storage()).isnan().numpy()
    assert (valid == due.repeat(dtype.itemsize // unit)).all()
