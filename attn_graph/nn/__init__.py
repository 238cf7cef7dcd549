"""Attention as PyTorch's users call it: with tensors, no spec and no plan to keep."""
