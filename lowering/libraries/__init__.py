"""What cuDNN and FlashAttention 4 support, as tables: their backends and PyTorch's calls ask."""
