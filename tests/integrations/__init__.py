"""Tests of attn_graph.integrations."""
