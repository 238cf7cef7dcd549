"""Backends: their form, and each of them."""

if __name__ != "attn_graph.lowering":
    raise ImportError("import attn_graph.lowering, not lowering")
