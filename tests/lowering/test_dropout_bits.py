"""Dropout in Triton's kernels, under the interpreter: the bits of `math`, of parts too."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir import ops
from attn_graph.machine.philox import flat_origin, threshold
from attn_graph.masks.places import Block, Place
from attn_graph.spec import TensorSpec
from attn_graph.testing.agreement import check_gradients, check_outputs, run_plan
from attn_graph.testing.tensors import tensors_for

pytestmark = pytest.mark.skipif(
    not ag.Target.of("cpu").interprets,
    reason="needs TRITON_INTERPRET=1 before Python starts, as in `make test`",
)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(-(2**63), 2**63 - 1),
    rate=st.sampled_from((0.1, 0.5, 0.9)),
    at=st.tuples(*map(st.integers, (0,) * 4, (2, 3, 5, 9))),
    origin=st.sampled_from(
        [(), (1, 2, 3, 8, 9), (0, 0, 1, 4, 4), (3, 1, 0, 0, 5), (0, 0, 0, 0, 4, 2)]
    ),
)
def test_dropout_draws_the_bits_of_math(
    seed: int,
    offset: int,
    rate: float,
    at: tuple[int, int, int, int],
    origin: tuple[int, ...],
) -> None:
    b, h, row, column = at
    out = torch.empty(32, 32, dtype=torch.int8)
    numbers = (torch.tensor(x) for x in (seed, offset))
    where = threshold(rate), flat_origin(origin)
    probes: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
    probes.dropout_bits[(1,)](out, *numbers, b, h, 4, row * 32, column * 32, *where, BLOCK=32)
    rows, keys = range(row * 32, row * 32 + 32), range(column * 32, column * 32 + 32)
    place = Place.of(Block(range(b, b + 1), range(h, h + 1), rows, 4, 192, 320), keys)
    assert torch.equal(out.bool(), ops.dropout_keeps(place, rate, seed, offset, origin)[0, 0])


def attend_part(origin: tuple[int, ...]) -> ag.Graph:
    """Attention with dropout, of a part of a whole."""

    def attend(q: Any, k: Any, v: Any, seed: Any, offset: Any) -> Any:
        p, lse = ag.scores(q, k).mask(ag.Causal()).softmax()
        return p.dropout(0.5, seed, offset, origin=origin).weigh(v), lse

    x, number = TensorSpec((2, 2, 33, 8), torch.float32), TensorSpec((), torch.int64)
    return ag.graph(attend, q=x, k=x, v=x, seed=number, offset=number)


def test_dropout_of_mapped_entries_is_that_of_each_alone() -> None:
    x = TensorSpec((2, 2, 33, 8), torch.float32)
    mapped = ag.vmap(ag.attention(x, x, x, dropout=0.5), {"q": 0, "k": 0, "v": 0}, size=2)
    tensors = tensors_for(mapped, 0)
    o, due = (run_plan(ag.compile(mapped, backends=(b,)), tensors)[0] for b in ("triton", "math"))
    torch.testing.assert_close(o, due, rtol=1e-5, atol=1e-5)


def test_dropout_of_a_part_is_that_of_its_places_in_the_whole() -> None:
    odd, even = attend_part((1, 2, 5, 7, 7)), attend_part((1, 2, 5, 8, 7))
    for graph, name in ((odd, "math"), (even, "math"), (even, "triton")):
        plan, tensors = ag.compile(graph, backends=(name,)), tensors_for(graph, 0)
        check_outputs(plan, graph, tensors)
        check_gradients(plan, graph, tensors, 0)
    with pytest.raises(ag.NoBackendError, match="at a multiple of 4 keys, and this one begins"):
        ag.compile(odd, backends=("triton",))
