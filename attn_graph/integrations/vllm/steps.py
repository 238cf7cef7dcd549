"""A step of serving: what all layers with one cache spec read, and what they have prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from attrs import Factory, field, frozen
from torch import Tensor

from attn_graph.integrations.vllm.cells import Cells

Call = Callable[..., Any]


@final
@frozen(eq=False)
class ServingStep:
    """tokens: new ones, of all sequences. starts [B+1], lengths [B]: of the sequences, whose table
    [B,count] has their pages; None without a cache. cells: for the new tokens. causal: False if
    queries see later keys. calls: plans with these inputs, made by the first layer of a kind."""

    tokens: int
    starts: Tensor
    lengths: Tensor
    table: Tensor | None
    cells: Cells | None
    causal: bool
    calls: dict[tuple[object, ...], Call] = field(init=False, default=Factory(dict))


@final
@frozen
class Capacity:
    """The most new tokens of a step, and sequences."""

    tokens: int
    sequences: int
