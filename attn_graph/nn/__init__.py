"""Attention for PyTorch's users: calls on tensors, without specs and plans."""

from typing import TYPE_CHECKING

from attn_graph.nn import decomposition as decomposition  # registers it with PyTorch
from attn_graph.nn import functional, ops
from attn_graph.nn.appending import append_to_pages  # an operator, which exported programs name
from attn_graph.rings import find

if TYPE_CHECKING:
    from attn_graph.layers.modules import Attention, MultiheadAttention
    from attn_graph.nn.varlen import varlen_attn, varlen_attn_out

LATER = ("Attention", "MultiheadAttention", "varlen_attn", "varlen_attn_out")  # at first use
__all__ = [
    "Attention",
    "MultiheadAttention",
    "append_to_pages",
    "functional",
    "ops",
    "varlen_attn",
    "varlen_attn_out",
]


def __getattr__(name: str) -> object:
    """Import one of LATER. Raises AttributeError for any other name."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find(name)
