"""The mods of PyTorch's collection, attention-gym, and of papers: which are read, and as what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

import attn_graph as ag
from attn_graph.integrations.flex import from_flex, from_flex_score
from tests.integrations.test_flex import B, H, M, each_place, keeps

Mod = Callable[..., Any]  # Any: what FlexAttention calls
N = M  # queries and keys of one text
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2])
STARTS = torch.tensor([0, 3, 5])
PREFIXES = torch.tensor([2, 4])
SPANS = [(1, 3), (5, 2)]  # offset and length of each image in a text
IMAGES = torch.tensor([[0, 2], [2, 7], [0, 0]])  # the texts that each image of 3 tokens is for


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def sliding_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv <= 2) & (q - kv >= 0)


def dilated_sliding_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    gap = torch.abs(q - kv)
    return (gap <= 4) & (gap % 2 == 0) & (q >= kv)


def prefix_lm(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv < PREFIXES[b]


def document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Causal within each document, by positions that count within it."""
    own = causal(b, h, q - STARTS[DOCUMENTS[q]], kv - STARTS[DOCUMENTS[kv]])
    return (DOCUMENTS[q] == DOCUMENTS[kv]) & own


def natten(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A window of 3 x 1 around each query of a canvas of 3 columns, moved inside at its edges."""
    column, row = (q % 3).clamp(1, 1), (q // 3).clamp(0, 2)
    return ((column - kv % 3).abs() <= 1) & ((row - kv // 3).abs() <= 0)


def span(offset: int, length: int) -> Mod:
    return lambda b, h, q, kv: (q >= offset) & (kv < offset + length)


transfusion = or_masks(causal, *(span(*each) for each in SPANS))


def flamingo(b: Any, h: Any, q: Any, kv: Any) -> Any:
    texts = IMAGES[kv // 3]
    return (q >= texts[0]) & (q < texts[1])


MASKS: dict[str, tuple[Mod, str]] = {
    "causal": (causal, "Causal(align='top_left')"),
    "sliding window": (
        sliding_window,
        "(Window(left=2, right=None, align='top_left') & Causal(align='top_left'))",
    ),
    "dilated sliding window": (
        dilated_sliding_window,
        "(Window(left=4, right=4, align='top_left') & Formula(text='abs(i - j) % 2 == 0') & "
        "Causal(align='top_left'))",
    ),
    "prefix LM": (or_masks(prefix_lm, causal), "(KeyLengths() | Causal(align='top_left'))"),
    "document": (
        document,
        "(SameSegment() & Formula(text='i - tensor_i >= j - tensor_j', "
        "elements=(('tensor_i', 'i'), ('tensor_j', 'j'))))",
    ),
    "document and window": (
        and_masks(document, sliding_window),
        "(SameSegment() & Formula(text='i - tensor_i >= j - tensor_j', "
        "elements=(('tensor_i', 'i'), ('tensor_j', 'j'))) & "
        "Window(left=2, right=None, align='top_left') & Causal(align='top_left'))",
    ),
    "NATTEN": (natten, ""),
    "transfusion": (
        transfusion,
        "(Causal(align='top_left') | (Formula(text='i >= 1') & Prefix(length=4)) | "
        "(Formula(text='i >= 5') & Prefix(length=7)))",
    ),
    "flamingo": (
        flamingo,
        "(Formula(text='i >= tensor_j', elements=(('tensor_j', 'j'),)) & "
        "Formula(text='i < tensor_j_2', elements=(('tensor_j_2', 'j'),)))",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_known_mask_is_read(name: str) -> None:
    mod, text = MASKS[name]
    mask, tensors = from_flex(mod, sizes=(B, H, M, N))
    assert str(mask) == text or not text
    assert torch.equal(keeps(mask, tensors, N), create_mask(mod, B, H, M, N, device="cpu"))


def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / H))


def soft_cap(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.tanh(score / 20) * 20


def relative(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + (q - kv)


def causal_score(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(q >= kv, score, -float("inf"))


SCORES: dict[str, tuple[Mod, str]] = {
    "ALiBi": (alibi, "Addend(text='real(j - i) * exp2(-(real(h + 1) * 8.0 / 3.0))')"),
    "soft cap": (soft_cap, "SoftCap(cap=20.0)"),
    "relative position": (relative, "Addend(text='real(i - j)')"),
    "causal": (causal_score, "Causal(align='top_left')"),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_known_score_mod_is_read_and_attention_by_it_is_flex_attention(name: str) -> None:
    mod, text = SCORES[name]
    steps, tensors = from_flex_score(mod)
    assert (" ".join(map(str, steps)), tensors) == (text, {})
    q, k, v = torch.randn(3, B, H, M, 8).unbind()
    s = each_place(mod)(q @ k.mT / 8**0.5, *map(torch.arange, (B, H, M, M)))
    o = ag.nn.functional.attention(q, k, v, modifiers=steps)
    assert isinstance(o, torch.Tensor)
    torch.testing.assert_close(o, s.softmax(-1) @ v)
