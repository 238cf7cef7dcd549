"""xformers' masks are read by the names of their classes; stand-ins have the fields of theirs."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from attrs import define, field, make_class
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.errors import GraphError
from attn_graph.integrations.xformers import REACHES, from_xformers
from attn_graph.masks.places import Block, Place

BLOCKS = [name for name in REACHES if name.startswith("BlockDiagonal")]
PLAIN = [name for name in REACHES if name not in BLOCKS]


@define
class SeqLenInfo:
    """The fields of xformers' description of lengths; seqlen_py only with padding or gaps."""

    seqstart_py: list[int]
    seqstart: torch.Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.seqstart = torch.tensor(self.seqstart_py, dtype=torch.int32)


@define
class PaddedSeqLenInfo(SeqLenInfo):
    seqlen_py: list[int]


def stand_in(name: str, **fields: Any) -> Any:
    """A value of a class of this name with these fields."""
    return make_class(name, [*fields])(**{key.lstrip("_"): value for key, value in fields.items()})


def fields_of(name: str, window: int, right: int) -> dict[str, int]:
    """The fields that say how far a class of this name sees."""
    if "Local" in name and "Causal" not in name and "Triangular" not in name:
        return {"window_left": window, "window_right": right}
    return {"_window_size": window} if "Local" in name else {}


def block_of(name: str, M: int, N: int, window: int, right: int) -> torch.Tensor:
    """Which places of a block are kept, [M,N], by the words of the classes' names."""
    from_bottom = "BottomRight" in name or "WithOffset" in name or ("Padded" in name)
    i, j = torch.arange(M)[:, None] + (N - M) * from_bottom, torch.arange(N)
    if "Causal" in name or "Triangular" in name:
        return (j <= i) & ((i - j < window) | torch.tensor("Local" not in name))
    if "Local" in name:
        return (i - j <= window) & (j - i <= right)
    return torch.ones(M, N, dtype=torch.bool)


def keeps(mask: ag.Mask | None, M: int, N: int, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which places a mask keeps, [M,N]."""
    assert mask is not None
    at = Place.of(Block(range(1), range(1), range(M), 1, M, N, data), range(N))
    return torch.as_tensor(mask.resolved(M, N, ()).keep(at)).expand(1, 1, M, N)[0, 0]


@given(
    st.sampled_from(PLAIN),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_a_plain_mask_is_read_as_what_it_keeps(
    name: str, M: int, N: int, window: int, right: int
) -> None:
    mask, tensors = from_xformers(stand_in(name, **fields_of(name, window, right)))
    assert torch.equal(keeps(mask, M, N, tensors), block_of(name, M, N, window, right))


@st.composite
def lengths(draw: DrawFn, name: str) -> tuple[list[int], list[int], Any]:
    """Lengths of queries and keys of some blocks, and the description of the keys."""
    queries = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    same = draw(st.booleans())
    keys = queries if same else [draw(st.integers(0, 6)) for _ in queries]
    if "Padded" not in name and "Gappy" not in name:
        return queries, keys, SeqLenInfo(starts(keys))
    gaps = [6] * len(keys) if "Padded" in name else [n + draw(st.integers(0, 3)) for n in keys]
    return queries, keys, PaddedSeqLenInfo(starts(gaps), keys)


def starts(sizes: list[int]) -> list[int]:
    """Where each of so many begins, and where the last ends."""
    return [0, *accumulate(sizes)]


@given(st.data(), st.sampled_from(BLOCKS), st.integers(1, 5), st.integers(0, 3))
def test_blocks_are_read_as_documents(data: Any, name: str, window: int, right: int) -> None:
    queries, keys, k_seqinfo = data.draw(lengths(name))
    q_seqinfo = SeqLenInfo(starts(queries))
    bias = stand_in(
        name, q_seqinfo=q_seqinfo, k_seqinfo=k_seqinfo, **fields_of(name, window, right)
    )
    mask, tensors = from_xformers(bias)
    M, N = q_seqinfo.seqstart_py[-1], k_seqinfo.seqstart_py[-1]
    due = torch.zeros(M, N, dtype=torch.bool)
    for (q0, q1), k0, n in zip(pairwise(q_seqinfo.seqstart_py), k_seqinfo.seqstart_py, keys,
                               strict=False):  # fmt: skip
        due[q0:q1, k0 : k0 + n] = block_of(name, q1 - q0, n, window, right)
    assert mask is not None
    assert mask.needs.keys() == tensors.keys()
    assert torch.equal(keeps(mask, M, N, tensors), due)


def test_blocks_of_equal_lengths_have_closed_forms() -> None:
    info = SeqLenInfo([0, 3, 8])
    bias = stand_in("BlockDiagonalCausalMask", q_seqinfo=info, k_seqinfo=info)
    mask, tensors = from_xformers(bias)
    assert mask == ag.SameSegment() & ag.Causal("top_left")
    assert tensors["q_segments"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]


def test_a_tensor_is_a_bias_and_a_mask_may_have_one() -> None:
    table = torch.zeros(2, 2)
    assert from_xformers(table) == (None, {"bias": table})
    mask, tensors = from_xformers(stand_in("LowerTriangularMaskWithTensorBias", _bias=table))
    assert mask == ag.Causal("top_left")
    assert tensors["bias"] is table


@pytest.mark.parametrize("name", ["PagedBlockDiagonalPaddedKeysMask", "int"])
def test_a_class_that_is_not_known_is_an_error(name: str) -> None:
    with pytest.raises(GraphError, match=f"from_xformers: {name} is not known; known are Lower"):
        from_xformers(stand_in(name))
