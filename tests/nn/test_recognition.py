"""Dense masks that are read as masks of positions and lengths."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.layers import recognition
from attn_graph.layers.recognition import recognize
from attn_graph.masks import Causal, Prefix, Window

sizes = st.integers(1, 9)


def distances(M: int, N: int) -> torch.Tensor:
    return torch.arange(N) - torch.arange(M)[:, None]


def dense(r: recognition.Recognition, B: int, M: int, N: int) -> torch.Tensor:
    """All places of a recognition, [B,1,M,N], by the formula of attention itself."""
    q, k, v = torch.zeros(B, 1, M, 1), torch.zeros(B, 1, N, 1), torch.eye(N).expand(B, 1, N, N)
    lengths: dict[str, Any] = {} if r.kv_lengths is None else {"kv_lengths": r.kv_lengths.expand(B)}
    if r.segments is not None:
        lengths["segments"] = (r.segments.expand(B, -1),) * 2
    from attn_graph.nn.functional import attention

    o = attention(q, k, v, mask=r.mask, backends=("math",), **lengths)
    assert isinstance(o, torch.Tensor)
    return o > 0


@given(M=sizes, N=sizes, low=st.integers(-9, 9), width=st.integers(0, 9), data=st.data())
def test_bands_with_padding_are_recognised_and_mean_the_same(
    M: int, N: int, low: int, width: int, data: st.DataObject
) -> None:
    d = distances(M, N)
    keep = (d >= low) & (d <= low + width)
    ends = torch.tensor(data.draw(st.lists(st.integers(0, N), min_size=1, max_size=3)))
    mask = (keep & (torch.arange(N) < ends[:, None, None]))[:, None]
    r = recognize(mask)
    if r is not None:
        assert torch.equal(dense(r, len(ends), M, N), mask)
    else:  # keys at the start that nobody sees are not padding, nor is what a window cuts off
        assert not keep.any(0).all() or not keep.all()


@given(bits=st.lists(st.booleans(), min_size=1, max_size=24), N=st.integers(1, 5))
def test_what_is_recognised_means_the_same(bits: list[bool], N: int) -> None:
    M = max(1, len(bits) // N)
    mask = torch.tensor((bits * N)[: M * N]).view(M, N)
    r = recognize(mask)
    assert r is None or torch.equal(dense(r, 1, M, N)[0, 0], mask)


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=3, max_size=3), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([torch.bool, torch.float32, torch.float16]),
)
def test_documents_side_by_side_are_recognised_and_mean_the_same(
    counts: list[list[int]], causal: bool, dtype: torch.dtype
) -> None:
    N = max(map(sum, counts))
    rows = [[*x, N - sum(x)] for x in counts]
    ids = torch.stack([torch.arange(4).repeat_interleave(torch.tensor(x)) for x in rows])
    keep = (ids[:, :, None] == ids[:, None])[:, None]
    keep = keep.tril() if causal else keep
    mask = keep if dtype == torch.bool else lowest(keep, dtype)
    r = recognize(mask)
    assert r is not None
    assert torch.equal(dense(r, len(counts), N, N), keep)


def lowest(keep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask with the lowest number of its dtype, as Hugging Face makes them."""
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)


def test_the_lowest_number_hides_only_where_a_row_keeps_a_key() -> None:
    keep = distances(8, 8) <= 0
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        r = recognize(lowest(keep, dtype))
        assert r is not None
        assert r.mask == Causal("top_left")
        blind = keep & (torch.arange(8) > 0)[:, None]
        assert recognize(lowest(blind, dtype)) is None  # such a row weighs all keys alike
        padded = KNOWN["padding"][0]  # the last entry has no key
        assert recognize(padded) is not None
        assert recognize(lowest(padded, dtype)) is None
        assert recognize(lowest(padded[:2], dtype)) is not None


def test_documents_run_as_documents_and_the_report_says_so() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 3]])
    keep = (ids[:, :, None] == ids[:, None]).tril()[:, None]
    q = torch.randn(2, 3, 8, 4)
    for mask in (keep, lowest(keep, torch.float32), keep[:1], lowest(keep, torch.float32)[1:]):
        due = F.scaled_dot_product_attention(q, q, q, mask)
        with ag.replace_sdpa(recognize_masks=True, report=True) as report:
            o = F.scaled_dot_product_attention(q, q, q, mask)
        torch.testing.assert_close(o, due)
        assert report is not None
        assert "SameSegment" in report.rows[0].usage.mask


d = distances(8, 8)
lengths = torch.tensor([8, 5, 0])[:, None, None, None]
KNOWN: dict[str, tuple[torch.Tensor, object, list[int] | None]] = {
    "all": (torch.ones(8, 8).bool(), None, None),
    "causal": (d <= 0, Causal("top_left"), None),
    "numbers": (torch.zeros(8, 8).masked_fill(d > 0, -torch.inf), Causal("top_left"), None),
    "bottom right": (distances(3, 8) <= 5, Window(None, 5, "top_left"), None),
    "window": ((d <= 0) & (d >= -2), Window(2, 0, "top_left"), None),
    "prefix": (torch.arange(8).expand(8, 8) < 3, Prefix(3), None),
    "prefix and causal": ((d <= 0) | (torch.arange(8) < 3), Causal("top_left") | Prefix(3), None),
    "padding": ((torch.arange(8) < lengths).expand(3, 1, 8, 8), None, [8, 5, 0]),
    "padded causal": ((d <= 0) & (torch.arange(8) < lengths), Causal("top_left"), [8, 5, 0]),
    "heads": (torch.stack([d <= 0, d <= 0]), Causal("top_left"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_usual_masks_are_recognised(name: str) -> None:
    mask, leaf, ends = KNOWN[name]
    r = recognize(mask)
    assert r is not None
    assert r.mask == leaf
    assert (None if r.kv_lengths is None else r.kv_lengths.tolist()) == ends


def test_other_masks_stay_as_they_are() -> None:
    odd = (d <= 0).clone()
    odd[3, 1] = False
    finite = torch.zeros(8, 8).masked_fill(d > 0, -1e9)
    left = (torch.arange(8) >= lengths // 2).expand(3, 1, 8, 8)
    heads = torch.stack([d <= 0, d >= 0])
    for mask in (odd, finite, left, heads, finite.clone().requires_grad_(), torch.ones(0, 8)):
        assert recognize(mask) is None


WRITERS: dict[str, Callable[[torch.Tensor], object]] = {
    "PyTorch": lambda m: m[3].fill_(False),
    "data": lambda m: m.data[3].fill_(False),
    "a detached view": lambda m: m.detach()[3].fill_(False),
    "NumPy": lambda m: m.numpy()[3].fill(False),
    "DLPack": lambda m: np.from_dlpack(m)[3].fill(False),
    "the storage": lambda m: m.untyped_storage().copy_(torch.zeros_like(m).untyped_storage()),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_mask_that_was_written_is_read_again_whoever_wrote_it(
    writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = recognition.read_places
    monkeypatch.setattr(recognition, "read_places", lambda m: (reads.append(1), read(m))[1])  # type: ignore[func-returns-value]  # counts
    mask, held = (d <= 0).clone(), recognition.Readings()
    for _ in range(2):
        assert held.recognize(mask) is not None
        assert held.recognize(mask[None].expand(2, 8, 8)) is not None
    assert len(reads) == 2
    WRITERS[writer](mask)
    r = held.recognize(mask)
    assert r is None or torch.equal(dense(r, 1, 8, 8)[0, 0], mask)
    assert len(reads) == 3


def test_a_mask_that_is_written_while_it_is_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call beside a write has the mask as it was copied; the next one has it as it is."""
    mask, held, read = (d <= 0).clone(), recognition.Readings(), recognition.read_places

    def write_and_read(places: torch.Tensor) -> recognition.Recognition | None:
        writer = threading.Thread(target=mask.fill_, args=(True,))
        writer.start()
        writer.join()
        return read(places)

    monkeypatch.setattr(recognition, "read_places", write_and_read)
    for due in (Causal("top_left"), None):
        r = held.recognize(mask)
        assert r is not None
        assert r.mask == due


def test_the_last_masks_are_held_and_no_more() -> None:
    held = recognition.Readings()
    masks = [(d <= n).clone() for n in range(2 * recognition.MOST_HELD)]
    for mask in (*masks, *masks):
        r = held.recognize(mask)
        assert r is not None
        assert torch.equal(dense(r, 1, 8, 8)[0, 0], mask)
    views = (masks[0][:n] for n in range(1, 8))
    assert all(map(held.recognize, views))
    assert len(held.held) == recognition.MOST_HELD


def test_what_inference_mode_read_serves_training_too() -> None:
    mask, q = KNOWN["padding"][0], torch.randn(3, 2, 8, 4)
    with ag.replace_sdpa(recognize_masks=True):
        with torch.inference_mode():
            due = F.scaled_dot_product_attention(q, q, q, mask)
        x = q.clone().requires_grad_()
        o = F.scaled_dot_product_attention(x, x, x, mask)
        o.sum().backward()
    torch.testing.assert_close(o.detach(), due.clone())
    assert x.grad is not None


def weigh(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = q @ q.mT / 2  # sqrt(D), D = 4
    return scores.masked_fill(~mask, -torch.inf)


def test_a_mask_that_numpy_writes_between_calls_counts_as_it_is() -> None:
    mask, q = (d <= 0).clone(), torch.randn(1, 2, 8, 4)
    with ag.replace_sdpa(recognize_masks=True):
        for last in range(8):
            mask.numpy()[:] = (d <= last).numpy()
            o = F.scaled_dot_product_attention(q, q, q, mask)
            torch.testing.assert_close(o, torch.softmax(weigh(q, mask), -1) @ q)


@pytest.mark.parametrize("name", KNOWN)
def test_the_result_is_that_of_the_dense_mask_and_the_report_says_so(name: str) -> None:
    mask = KNOWN[name][0]
    M, N = mask.shape[-2:]
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 2, M, 4, generator=g), torch.randn(3, 2, N, 4, generator=g)
    due = F.scaled_dot_product_attention(q, k, k, mask)
    for recognizes in (True, False):
        with ag.replace_sdpa(recognize_masks=recognizes, report=True) as report:
            o = F.scaled_dot_product_attention(q, k, k, mask)
        torch.testing.assert_close(o, due)
        assert report is not None
        assert ("recognised as" in report.rows[0].usage.mask) == recognizes
