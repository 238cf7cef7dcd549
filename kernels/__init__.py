"""Kernels: code that computes one piece of attention and knows nothing of graphs."""

if __name__ != "attn_graph.kernels":
    raise ImportError("import attn_graph.kernels, not kernels")
