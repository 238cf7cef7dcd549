"""What tests that change limits of planning need."""

import attn_graph as ag
from attn_graph.lowering.cpu.math import tile_equations


def forget_plans() -> None:
    """Graphs that come again are planned again, by the limits of then."""
    ag.clear_cache()
    tile_equations.cache_clear()
