"""Tests of attn_graph.machine."""
