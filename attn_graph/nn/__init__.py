"""Attention as PyTorch's users call it: with tensors, no spec and no plan to keep."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_graph.nn.modules import Attention, MultiheadAttention

__all__ = ["Attention", "MultiheadAttention"]


def __getattr__(name: str) -> object:
    """A public name or `functional`, imported at first use. Raises AttributeError for others."""
    if name == "functional":
        return import_module(f"{__name__}.functional")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.modules"), name)
