"""Which keys each batch entry reads, where data hide others of it from all its queries."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen


@final
@frozen(eq=False)
class KeySpan:
    """The keys of a batch entry from the first that counts, `start`, to behind the last, `stop`;
    one, which is hidden, where none counts. caps: the largest that their scores may be, which
    broadcasts; None where all of them count.
    """

    start: int
    stop: int
    caps: torch.Tensor | None

    def hide(self, s: torch.Tensor) -> None:
        """Hide places of s [n,L,stop - start]."""
        if self.caps is not None:
            s.clamp_(max=self.caps)


def find_spans(keep: torch.Tensor, caps: torch.Tensor, B: int, N: int) -> tuple[KeySpan, ...]:
    """The keys of each of B batch entries. keep: which of N count. caps: the largest that scores
    may be. Both broadcast to [B,1,1,N]."""
    keep, caps = (x.expand(B, 1, 1, N).flatten(0, 2) for x in (keep, caps))
    counts, first = keep.sum(-1), keep.view(torch.uint8).argmax(-1)
    behind = N - keep.flip(-1).view(torch.uint8).argmax(-1)
    return tuple(map(cut_span, first.tolist(), behind.tolist(), counts.tolist(), caps))


def cut_span(start: int, stop: int, count: int, caps: torch.Tensor) -> KeySpan:
    """The keys of a batch entry. count: how many of them count."""
    stop = stop if count else 1
    return KeySpan(start, stop, None if count == stop - start else caps[start:stop])
