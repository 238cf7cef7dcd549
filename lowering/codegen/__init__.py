"""Functions and lists for kernels of any backend: traced, bounded, printed, compiled."""
