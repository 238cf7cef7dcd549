"""Rows of large scores, computed inaccurately by PyTorch's fused CPU kernel.

It gives lse of a row, max + log(sum exp(s - max)), as one rounded number, and a large max swallows
the logarithm. Parts of a row are joined by lse, and the kernel's backward makes weights of it.
These calls run again on tiles of whole rows, with weights divided by their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from attrs import field, frozen

from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.kernels.products import reaches_far
from attn_graph.lowering.backend import Rooms
from attn_graph.lowering.cpu.product_passes import run_products
from attn_graph.lowering.cpu.product_tiles import ProductTiles
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.request import Options
from attn_graph.lowering.steps import Work, lease_rooms
from attn_graph.machine.cache import latest
from attn_graph.spec import TensorSpec


class FarRowsError(Exception):
    """A call has rows with an lse too coarse for their weights, as it was rounded once."""


def refuse_far_rows(node: Attention, lse: torch.Tensor) -> None:
    """Raises FarRowsError if an lse is too large. An lse of more keys than these is taken as it is:
    nothing here could tell it better."""
    if not node.part and reaches_far(lse):
        raise FarRowsError


def or_by_products(work: Work, again: ByProducts) -> Work:
    """The work, done by matrix products if it raises FarRowsError."""

    def call(
        device: torch.device, *operands: torch.Tensor, rooms: Rooms | None = None
    ) -> Sequence[torch.Tensor]:
        try:
            return work(device, *operands, rooms=rooms)
        except FarRowsError:
            return again(device, *operands, rooms=rooms)

    return call


@final
@frozen(eq=False)
class ByProducts:
    """An attention, or its gradient, on tiles of whole rows, planned when first needed."""

    op: Attention | AttentionGrad
    options: Options
    tiles: Callable[[tuple[TensorSpec, ...]], ProductTiles] = field(
        init=False, default=latest("plan", 64)
    )

    def plan(self, specs: tuple[TensorSpec, ...]) -> ProductTiles:
        problem = Problem.of(self.op, specs)
        return ProductTiles.plan(problem, problem.wide)

    def __call__(
        self, device: torch.device, *operands: torch.Tensor, rooms: Rooms | None = None
    ) -> Sequence[torch.Tensor]:
        tiles = self.tiles((*map(TensorSpec.like, operands),))
        leased = lease_rooms(partial(run_products, tiles), tiles.scratch, self.options.workspace)
        return leased(device, *operands, rooms=rooms)
