"""The types of results and of options, for annotations."""

from attn_graph.lowering.request import Fallback
from attn_graph.machine.cache import CacheInfo
from attn_graph.machine.sizes import Memory
from attn_graph.machine.torch_switches import Precision
from attn_graph.masks.tiles import Tiles
from attn_graph.mesh.results import Outlook, ShardedPlan
from attn_graph.mesh.sharded import Sharded
from attn_graph.planner.cost import Cost, Work
from attn_graph.planner.explanation import Explanation, Refusal

__all__ = [
    "CacheInfo",
    "Cost",
    "Explanation",
    "Fallback",
    "Memory",
    "Outlook",
    "Precision",
    "Refusal",
    "Sharded",
    "ShardedPlan",
    "Tiles",
    "Work",
]
