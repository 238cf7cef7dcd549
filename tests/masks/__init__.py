"""Tests of attn_graph.masks."""
