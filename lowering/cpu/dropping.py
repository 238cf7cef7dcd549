"""Dropped weights of a tile, drawn in its scratch memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from attn_graph.ir.philox import ALWAYS, ROOMS, WORDS, Compare, counters, draw_
from attn_graph.machine.workspace import Buffer


def needed_to_draw(rows: int, keys: int, dtype: torch.dtype) -> dict[str, Buffer]:
    """The scratch buffers of the draws, for `rows` rows of at most `keys` scores."""
    words = rows * (keys // WORDS + 2)
    rooms = {f"word{i}": Buffer((words,), torch.int64) for i in range(ROOMS)}
    return {"drawn": Buffer((WORDS * words,), dtype), **rooms}


def draw(
    rate: float, seed: tuple[int, int], ranges: Sequence[range], H: int,
    scratch: Mapping[str, torch.Tensor], compare: Compare, period: int = ALWAYS,
) -> torch.Tensor:  # fmt: skip
    """The draws for the places `ranges`, as `draw_` gives them. seed: the seed and the offset."""
    shape = (*map(len, ranges[:3]), len(counters(ranges[3])))
    count = prod(shape)
    rooms = [scratch[f"word{i}"][:count].view(shape) for i in range(ROOMS)]
    out = scratch["drawn"][: WORDS * count].view(*shape[:3], -1)
    return draw_(out, rate, *seed, ranges, H, rooms, period, compare)
