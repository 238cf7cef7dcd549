"""Tests of attn_graph.nn."""
