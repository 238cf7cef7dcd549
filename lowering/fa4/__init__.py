"""FlashAttention 4's kernels as a backend."""
