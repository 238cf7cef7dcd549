"""Tests of attn_graph.planner."""
