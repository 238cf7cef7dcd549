"""What is computed on a GPU, as data: sizes, mask, and the goals of some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, final

import torch
from attrs import field, frozen

import attn_graph as ag
from attn_graph.spec import NAMES

Pass = Literal["forward", "backward"]
F16, BF16 = torch.float16, torch.bfloat16
# TFLOP/s of the kernel in Triton's tutorial by S: forward, full, D = 128, float16, on an H100.
# Published in pytorch/benchmark#2391.
TUTORIAL = {2048: 434, 16384: 477}
# Goals in TFLOP/s on an H200, bfloat16, D = 128, S from 4096 on.
GOALS = {("full", "forward"): 480, ("causal", "forward"): 430, ("full", "backward"): 320}
LONG = 4096


@final
@frozen
class Case:
    """One attention on random tensors."""

    sizes: tuple[int, int, int, int]  # B, H, M, D
    key_heads: int | None = field(default=None, kw_only=True)  # G, by default H
    keys: int | None = field(default=None, kw_only=True)  # N, by default M
    dtype: torch.dtype = field(default=BF16, kw_only=True)
    causal: bool = field(default=False, kw_only=True)
    window: int | None = field(default=None, kw_only=True)  # keys that a query sees, its own last
    soft_cap: float | None = field(default=None, kw_only=True)
    backward: bool = field(default=True, kw_only=True)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k and v."""
        B, H, M, D = self.sizes
        k = (B, self.key_heads or H, self.keys or M, D)
        return self.sizes, k, k

    @property
    def is_grouped(self) -> bool:
        """Whether query heads share key heads."""
        return self.shapes[0][1] != self.shapes[1][1]

    @property
    def kind(self) -> str:
        """How scores are masked and changed, in words."""
        words = {
            f"window {self.window}": self.window is not None,
            "causal": self.causal and self.window is None,
            "full": not self.causal and self.window is None,
            f"soft cap {self.soft_cap}": self.soft_cap is not None,
        }
        return ", ".join(word for word, holds in words.items() if holds)

    @property
    def title(self) -> str:
        """What its rows are called."""
        (B, H, M, D), (_, G, N, _), _ = self.shapes
        groups = f" over {G}" if G != H else ""
        keys = f" x {N}" if N != M else ""
        return f"{NAMES[self.dtype]} {self.kind} ({B}, {H}{groups}, {M}{keys}, {D})"

    def graph(self) -> ag.Graph:
        """The attention, for the library."""
        specs = [ag.TensorSpec(shape, self.dtype) for shape in self.shapes]
        mask: ag.Mask | None = ag.Causal() if self.causal or self.window else None
        if mask is not None and self.window:
            mask &= ag.Window(self.window - 1)
        return ag.attention(*specs, mask=mask, soft_cap=self.soft_cap)

    def keep(self) -> Callable[..., Any] | None:
        """The mask as FlexAttention takes it; None without one."""
        if self.window is not None:
            width = self.window
            return lambda b, h, i, j: (j <= i) & (j > i - width)
        return (lambda b, h, i, j: j <= i) if self.causal else None

    def change(self) -> Callable[..., Any] | None:
        """The modifier as FlexAttention takes it; None without one."""
        if (cap := self.soft_cap) is None:
            return None
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)

    def expectations(self, pass_: Pass) -> dict[str, float]:
        """The goal in TFLOP/s, and what was published, where there is one."""
        _, _, S, D = self.sizes
        plain = D == 128 and not self.is_grouped and self.dtype in (F16, BF16)
        goal = GOALS.get((self.kind, pass_)) if plain and S >= LONG else None
        published = TUTORIAL.get(S) if plain and (self.kind, pass_) == ("full", "forward") else None
        both = {"goal": goal, "tutorial, H100": published}
        return {name: figure for name, figure in both.items() if figure is not None}


def long_cases(D: int, lengths: tuple[int, ...]) -> Iterator[Case]:
    """16,384 tokens of 2,048 features, in sequences of each length: full and causal."""
    for S in lengths:
        for causal in (False, True):
            yield Case((max(1, 16384 // S), 2048 // D, S, D), causal=causal)


def smoke_case() -> Case:
    """The first thing to try: causal, grouped heads, head size 128, several tiles and a tail."""
    return Case((2, 8, 600, 128), key_heads=2, causal=True)


def checked_cases() -> Iterator[Case]:
    """A case of each kind, for a kernel that has yet to be seen right."""
    for D in (64, 128):
        sizes = (1, 4, 1024, D)
        yield Case(sizes)
        yield Case(sizes, causal=True)
        yield Case(sizes, window=256)
        yield Case(sizes, causal=True, soft_cap=30.0)


def tutorial_cases() -> Iterator[Case]:
    """The shapes that Triton's tutorial of fused attention times."""
    for S in (1024, 4096, 16384):
        for D in (64, 128):
            for causal in (False, True):
                yield Case((4, 32, S, D), dtype=F16, causal=causal)


def grouped_cases() -> Iterator[Case]:
    """Query heads that share key heads: one for all, one for four, one for eight."""
    yield Case((1, 8, 4096, 128), key_heads=1, causal=True)
    yield Case((1, 8, 8192, 128), key_heads=1)
    yield Case((1, 32, 4096, 128), key_heads=8, causal=True)
    yield Case((2, 64, 4096, 128), key_heads=8, causal=True)


def decode_cases() -> Iterator[Case]:
    """One query, or a few, against many keys."""
    for B, M, N in ((1, 1, 8192), (1, 1, 32768), (16, 1, 8192), (16, 4, 8192)):
        yield Case((B, 32, M, 128), key_heads=8, keys=N, backward=False)


def window_cases() -> Iterator[Case]:
    """Windows from narrow to wide."""
    for D in (64, 128):
        for window in (256, 1024):
            yield Case((4, 2048 // D, 4096, D), window=window)
    yield Case((1, 16, 16384, 128), window=4096)


def soft_cap_cases() -> Iterator[Case]:
    """Scores that are capped, as Gemma 2's are."""
    for D in (64, 128):
        yield Case((4, 2048 // D, 4096, D), causal=True, soft_cap=50.0)


def flex_cases() -> Iterator[Case]:
    """Those that FlexAttention compiles for, some seconds each."""
    for D in (64, 128):
        yield from long_cases(D, (4096,))
    yield Case((4, 16, 4096, 128), window=1024)
    yield Case((4, 16, 4096, 128), causal=True, soft_cap=50.0)
    yield Case((1, 32, 4096, 128), key_heads=8, causal=True)


def tile_cases() -> Iterator[Case]:
    """Where other tiles are tried."""
    for D in (64, 128):
        yield Case((4, 2048 // D, 4096, D), causal=True)


def raw_cases() -> Iterator[Case]:
    """Those of which cuDNN itself is timed beside plans of cuDNN."""
    for sizes in ((1, 1, 64, 64), (2, 16, 4096, 128), (1, 16, 16384, 128)):
        for causal in (False, True):
            yield Case(sizes, causal=causal)


def wide_cases() -> Iterator[Case]:
    """Head size 128."""
    return long_cases(128, (2048, 4096, 8192, 16384))


def narrow_cases() -> Iterator[Case]:
    """Head size 64."""
    return long_cases(64, (2048, 4096, 8192, 16384))


def stream_cases() -> Iterator[Case]:
    """Small enough that two fit on the GPU beside each other."""
    yield Case((1, 4, 1024, 128), causal=True)
