"""The types of results and of options, for annotations."""

from typing import TYPE_CHECKING

from attn_graph.lowering.request import Fallback
from attn_graph.machine.cache import CacheInfo
from attn_graph.machine.sizes import Memory
from attn_graph.machine.torch_switches import Precision
from attn_graph.rings import find

if TYPE_CHECKING:
    from attn_graph.instruments.explanation import Explanation, Refusal
    from attn_graph.mesh.results import Outlook, ShardedPlan
    from attn_graph.mesh.sharded import Sharded
    from attn_graph.planner.cost import Cost, Work
    from attn_graph.sparsity.tiles import Tiles

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


def __getattr__(name: str) -> object:
    """A type that waits for its first use. Raises AttributeError for any other name, and
    ModuleNotFoundError for a type of a ring that is not in this build."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find(name)
