"""Attention by PyTorch's own operations: its fused CPU kernel, and tiles on any device."""
