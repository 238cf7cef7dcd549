"""Recognises dense masks that equal a band, a prefix, documents or a padding at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import final

import torch
from attrs import define, field, frozen
from torch import Tensor

from attn_graph.machine.likeness import look_at
from attn_graph.masks import Causal, Mask, Prefix, SameSegment, Window

MOST_HELD = 4  # masks: a model passes one, or one for each kind of its layers


@final
@frozen(eq=False)
class Recognition:
    """The equivalent of a dense mask [B,1,M,N]: `mask`, before the ends `kv_lengths` [B].

    None: all places, all keys. segments [B,N]: the documents, of queries and keys, that `mask`
    tells apart.
    """

    mask: Mask | None = None
    kv_lengths: Tensor | None = None
    segments: Tensor | None = None

    def __str__(self) -> str:
        parts = [] if self.mask is None else [str(self.mask)]
        parts += [] if self.kv_lengths is None else ["kv_lengths"]
        return " & ".join(parts) or "all places"


@final
@define(eq=False)
class Readings:
    """The last masks read, with a copy of each: one with other values is read again."""

    held: dict[object, tuple[Tensor, Recognition | None]] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def recognize(self, mask: Tensor) -> Recognition | None:
        """`recognize`, cached. A held mask is compared with its copy, in one operation.

        So a write by NumPy or in another thread is noticed.
        """
        if mask.requires_grad or not 2 <= mask.ndim <= 4 or not mask.numel():
            return None
        key = mask.data_ptr(), look_at(mask)
        own = mask[tuple(slice(None if step else 1) for step in mask.stride())]  # not expanded
        with self.lock, torch.inference_mode(False), torch.no_grad():
            known = self.held.pop(key, None)
            if known is None or not torch.equal(known[0], own):
                copy = own.clone()
                known = copy, read_places(copy.expand(mask.shape))
            self.held[key] = known
            if len(self.held) > MOST_HELD:
                del self.held[next(iter(self.held))]
        return known[1]


def recognize(mask: Tensor) -> Recognition | None:
    """A mask [...,M,N] of 2 to 4 axes as data; None if it is neither band, prefix,
    documents nor padding.

    Its values are booleans; or numbers, 0 and -inf, or the lowest of their dtype in rows that keep
    a key, since other weights are 0 there. All of it is read, and the host waits.
    """
    return Readings().recognize(mask)


def read_places(mask: Tensor) -> Recognition | None:
    """`recognize` for a mask of a fitting shape."""
    keep = as_booleans(mask)
    if keep is None:
        return None
    keep = keep[(None,) * (4 - keep.ndim)]
    if not torch.equal(keep, keep[:, :1].expand_as(keep)):  # heads differ
        return None
    keep = keep[:, 0]
    kept, j = keep.any(1), torch.arange(keep.shape[-1], device=keep.device)
    ends = kept.sum(-1)
    if not torch.equal(kept, j < ends[:, None]):
        return None
    before = j < ends[:, None, None]
    for leaf, places in list_candidates(keep[int(ends.argmax())], int(ends.max())):
        if torch.equal(keep, places.expand_as(keep)):
            return Recognition(leaf)
        if torch.equal(keep, places & before):
            first = int(ends[0])
            if bool((ends != first).any()):
                return Recognition(leaf, ends.to(torch.int32))
            return Recognition(Prefix(first) if leaf is None else leaf & Prefix(first))
    return read_documents(keep)


def as_booleans(mask: Tensor) -> Tensor | None:
    """True for kept places; None for numbers other than 0, -inf and the lowest of their dtype, and
    for a row of them without 0: its weights are all alike."""
    if mask.dtype == torch.bool:
        return mask
    keep, lowest = mask == 0, mask == torch.finfo(mask.dtype).min
    if not bool((keep | lowest | (mask == -torch.inf)).all()):
        return None
    return keep if bool((keep.any(-1) | ~lowest.any(-1)).all()) else None


def read_documents(keep: Tensor) -> Recognition | None:
    """Documents side by side, causal or whole, in places keep [B,N,N]; None for others."""
    if keep.shape[1] != keep.shape[2]:
        return None
    begins = ~keep.diagonal(-1, 1, 2)
    first = begins.new_zeros(len(begins), 1)
    documents = torch.cat([first, begins], 1).cumsum(1, dtype=torch.int32)
    places = documents[:, :, None] == documents[:, None]
    causal = not bool(keep.triu(1).any())
    if not torch.equal(keep, places.tril() if causal else places):
        return None
    mask = Causal("top_left") & SameSegment() if causal else SameSegment()
    return Recognition(mask, segments=documents)


def list_candidates(keep: Tensor, end: int) -> Iterator[tuple[Mask | None, Tensor]]:
    """Masks of positions that keep [M,N] may equal, with the kept places of each.

    end: only keys before it are compared; after it all may be padding.
    """
    M, N = keep.shape
    i, j = (torch.arange(n, device=keep.device) for n in (M, N))
    distance = j - i[:, None]
    yield None, torch.ones_like(keep)
    among = distance[:, :end][keep[:, :end]]
    if not among.numel():
        return
    low, high = int(among.min()), int(among.max())
    left = None if low == 1 - M else -low
    right = None if high == end - 1 else high
    if (left, right) != (None, None):
        yield band(left, right), (distance >= low) & ((distance <= high) | (right is None))
    first = int(keep[0].sum())
    for offset in {0, N - M}:
        yield band(None, offset) | Prefix(first), (distance <= offset) | (j < first)


def band(left: int | None, right: int | None) -> Mask:
    """The mask of these distances from i. Aligned by the corner, it does not move with lengths."""
    if left is None and right == 0:
        return Causal("top_left")
    return Window(left, right, align="top_left")
