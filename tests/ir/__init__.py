"""Tests of attn_graph.ir."""
