"""Masks as transformers says them are read as data that means the same, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_graph.masks import Band, Keep, KeyLengths
from attn_graph.masks.places import Block, Place

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

from transformers import masking_utils as hf

from attn_graph.integrations import transformers as integration
from attn_graph.integrations.mask_functions import (
    Frame,
    UnreadableMaskError,
    read_mask_function,
)

B = 2
TABLE = torch.tensor([[0, 0, 1, 1], [2, 0, 1, 1]])
MaskFunction = Any  # of b, h, i and j
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
                lambda b, h, i, j: (i != j) & (abs(j - i) > size - 2),
                lambda b, h, i, j: (abs(j - i + 1) <= size) | ((i - j) - size == 1),
                lambda b, h, i, j: (i == j - size) | (j == size) | (size - 2 > i - j),
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
    mask = described.mask or Band()
    if "keep" in data:
        mask &= Keep()
    if "kv_lengths" in data and "kv_lengths" not in mask.needs:
        mask &= KeyLengths()
    block = Block(range(B), range(1), range(M), 1, M, N, data)
    keep: Tensor = mask.resolved(M, N, ()).keep(Place.of(block, range(N)))
    return torch.ones(B, 1, M, N, dtype=torch.bool) & keep


def transformers_mask(arguments: dict[str, Any]) -> Any:  # Any: a tensor, None if it is skipped
    """What transformers makes for SDPA."""
    return hf.sdpa_mask(**arguments, allow_is_causal_skip=False)


@given(calls())
def test_a_mask_means_what_transformers_makes_of_it(call: Call) -> None:
    described = integration.decode_mask(**call.arguments())
    assert isinstance(described, integration.MaskDescription), described
    expected = transformers_mask(call.arguments())
    assert torch.equal(dense(described, call.M, call.N), expected), described
    assert torch.equal(described.dense(), expected)


def describe(function: MaskFunction, **changes: Any) -> Any:  # Any: as `decode_mask`
    call = Call(4, 4, 0, 0, function, None)
    return integration.decode_mask(**{**call.arguments(), **changes})


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda b, h, i, j: i % 2 == j % 2, "does more than compare positions"),
        (lambda b, h, i, j: TABLE[b, j] <= TABLE[b, i], "puts the numbers of a tensor in order"),
        (lambda b, h, i, j: (TABLE[b, i] > 0) & (j <= i), "selects queries by a tensor"),
        (lambda b, h, i, j: TABLE[b, j] > 0, "selects queries or keys by their numbers"),
        (lambda b, h, i, j: j <= TABLE[b, i], "puts the numbers of a tensor in order"),
        (lambda b, h, i, j: abs(i - j) == 2, "compares a distance with what is no bound of it"),
        (lambda b, h, i, j: abs(i) // 2 <= j, "does more than compare positions"),
        (lambda b, h, i, j: torch.where(j <= i, True, False), "calls where on a position"),
        (lambda b, h, i, j: h == 0, "compares what is no position"),
        (lambda b, h, i, j: j - i < TABLE[b, j], "compares what is no position"),
        (lambda b, h, i, j: j <= 0.5 * TABLE[0, 0], "compares what is no position"),
    ],
)
def test_what_no_mask_says_is_a_tensor_and_the_log_says_why_once(
    function: MaskFunction, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    integration.log_once.cache_clear()
    masks = [describe(function, use_vmap=True) for _ in range(2)]
    arguments = describe(hf.causal_mask_function).arguments | {"mask_function": function}
    assert torch.equal(masks[1], transformers_mask(arguments))
    (record,) = caplog.records
    assert f"since a mask function {reason}" in record.message


def test_a_function_that_branches_is_not_read() -> None:
    frame = Frame(4, 4, 0, 0, "cpu", trusts=False)
    for function in (lambda b, h, i, j: j <= i or j < 2, lambda b, h, i, j: {i: j}[j] <= i):
        with pytest.raises(UnreadableMaskError):
            read_mask_function(function, frame)


def test_a_model_that_computes_with_a_mask_gets_the_tensor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    integration.log_once.cache_clear()
    described, expected = describe(hf.causal_mask_function), torch.ones(4, 4).tril().bool()
    assert described.shape == (B, 1, 4, 4)
    assert described.contiguous() is described
    assert torch.equal(described[0, 0], expected)
    assert torch.equal(described.float()[1, 0], expected.float())
    assert torch.equal(torch.zeros(4, 4) + described, expected.float().expand(B, 1, 4, 4))
    assert torch.equal(torch.where(described, 1, 0), expected.long().expand(B, 1, 4, 4))
    (record,) = caplog.records
    assert "since a model computes with the mask of a layer itself" in record.message


def test_a_description_is_made_once() -> None:
    described = describe(hf.causal_mask_function)
    assert describe(hf.causal_mask_function, attention_mask=described) is described
    padded = describe(hf.causal_mask_function, attention_mask=torch.eye(B, 4).bool())
    assert padded.to("meta").tensors["keep"].is_meta


def test_nothing_is_read_from_a_device_while_it_decodes() -> None:
    """Tensors without numbers, which can't be read."""
    described = describe(
        hf.sliding_window_causal_mask_function(2),
        q_length=1,
        q_offset=torch.tensor(3, device="meta"),
        attention_mask=torch.ones(B, 4, dtype=torch.bool, device="meta"),
        device="meta",
    )
    assert {n: t.shape for n, t in described.tensors.items()} == {
        "kv_lengths": (B,),
        "keep": (B, 1, 1, 4),
    }


@pytest.mark.parametrize(
    ("flags", "names"),
    [([1, 1, 1, 1], set()), ([1, 1, 0, 0], {"kv_lengths"}), ([0, 1, 1, 1], {"keep"})],
)
def test_padding_is_what_it_takes_to_say_it(flags: list[int], names: set[str]) -> None:
    padding = torch.tensor([flags, [1, 1, 1, 1]]).bool()
    assert describe(hf.causal_mask_function, attention_mask=padding).tensors.keys() == names
