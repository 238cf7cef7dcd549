"""Attention by PyTorch's own fused kernels for GPUs: flash, efficient and cuDNN."""
