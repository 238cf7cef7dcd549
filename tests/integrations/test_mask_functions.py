"""Masks as transformers says them are read as data that means the same, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_graph.ir.parse import parse_mask
from attn_graph.masks.places import Block, Place

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

from transformers import masking_utils as hf  # noqa: E402

from attn_graph.integrations import transformers as integration  # noqa: E402

B = 2
MaskFunction = Callable[..., Any]
Draw = st.DrawFn


@frozen
class Call:
    """A call of the mask interface: of which tokens, by which function, with which padding."""

    M: int
    N: int
    q_offset: int
    kv_offset: int
    function: MaskFunction
    padding: Tensor | None
    on_device: bool = False  # whether q_offset is a tensor

    def arguments(self) -> dict[str, Any]:
        """Those of the interface."""
        return {
            "batch_size": B,
            "q_length": self.M,
            "kv_length": self.N,
            "q_offset": torch.tensor(self.q_offset) if self.on_device else self.q_offset,
            "kv_offset": self.kv_offset,
            "mask_function": self.function,
            "attention_mask": self.padding,
            "use_vmap": False,
            "device": "cpu",
        }


def numbers(draw: Draw, length: int, least: int = 0, most: int = 3) -> Tensor:
    """Integers [B, length]."""
    some = st.integers(least, most)
    rows = st.lists(some, min_size=B * length, max_size=B * length)
    return torch.tensor(draw(rows)).reshape(B, length)


@st.composite
def functions(draw: Draw, tokens: int, *, packs: bool) -> MaskFunction:
    """A mask function of transformers over so many tokens."""
    size = draw(st.integers(1, 5))
    banded = draw(
        st.sampled_from(
            [
                hf.causal_mask_function,
                hf.bidirectional_mask_function,
                hf.sliding_window_causal_mask_function(size),
                hf.sliding_window_bidirectional_mask_function(size),
                hf.or_masks(hf.causal_mask_function, lambda b, h, i, j: j < size),
                hf.and_masks(hf.causal_mask_function, lambda b, h, i, j: size <= j),
            ]
        )
    )
    chunked = hf.chunked_causal_mask_function(size, numbers(draw, 1)[:, 0])
    blockwise = hf.or_masks(banded, hf.blockwise_overlay(numbers(draw, tokens, -1, 2)))
    if not packs or draw(st.booleans()):
        return draw(st.sampled_from([banded, chunked, blockwise]))
    ends = numbers(draw, tokens, 0, 1).cumsum(1)
    positions = torch.stack([count_within(row) for row in ends])
    whole = hf.chunked_causal_mask_function(size, torch.zeros(B, dtype=torch.int64))
    windowed = hf.sliding_window_causal_mask_function(size)
    each = draw(st.sampled_from([hf.causal_mask_function, windowed, whole]))
    return hf.packed_sequence_compatibility_function(each, positions, ends)


def count_within(segments: Tensor) -> Tensor:
    """The place of each token within its segment."""
    first = torch.searchsorted(segments, segments)
    return torch.arange(len(segments)) - first


@st.composite
def calls(draw: Draw) -> Call:
    """Prefill, a part after others, a decode step, a cache that is full or longer than filled."""
    past, M = draw(st.integers(0, 6)), draw(st.integers(1, 7))
    kv_offset = draw(st.integers(0, past))
    rest = draw(st.sampled_from([0, 0, 3]))
    N = past + M - kv_offset + rest
    function = draw(functions(kv_offset + N, packs=past == rest == 0))
    padding = None
    if draw(st.booleans()):
        kind, lengths = draw(st.sampled_from(["first", "last", "any"])), numbers(draw, 1, 0, N)
        at = torch.arange(past + M)
        flags = {"first": at < lengths, "last": at >= lengths}
        padding = flags[kind] if kind in flags else numbers(draw, past + M, 0, 1).bool()
    return Call(M, N, past, kv_offset, function, padding, draw(st.booleans()))


def dense(described: integration.MaskDescription, M: int, N: int) -> Tensor:
    """What a description keeps [B,1,M,N]."""
    data = dict(described.tensors)
    if "segments" in data:
        data["q_segments"], data["kv_segments"] = data.pop("segments")
    whole = torch.ones(B, 1, M, N, dtype=torch.bool)
    text = " & ".join(
        [described.text or "Band()"]
        + ["Keep()"] * ("keep" in data)
        + ["KeyLengths()"] * ("kv_lengths" in data and "kv_lengths" not in described.text)
    )
    mask = parse_mask(text)
    block = Block(range(B), range(1), range(M), 1, M, N, data)
    return whole & mask.resolved(M, N, ()).keep(Place.of(block, range(N)))


@given(calls())
def test_a_mask_means_what_transformers_makes_of_it(call: Call) -> None:
    described = integration.describe_mask(**call.arguments())
    assert isinstance(described, integration.MaskDescription), described
    expected = hf.sdpa_mask(**call.arguments(), allow_is_causal_skip=False)
    assert torch.equal(dense(described, call.M, call.N), expected), described
    assert torch.equal(described.dense(), expected)
