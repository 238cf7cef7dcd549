"""Attention as PyTorch's users call it: with tensors, no spec and no plan to keep."""

from attn_graph.nn import functional, ops

__all__ = ["functional", "ops"]
