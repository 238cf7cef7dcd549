"""Tests of attn_graph.lowering and attn_graph.kernels."""
