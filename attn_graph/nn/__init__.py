"""Attention as PyTorch's users call it: with tensors, no spec and no plan to keep."""

from attn_graph.nn.modules import Attention, MultiheadAttention

__all__ = ["Attention", "MultiheadAttention"]
