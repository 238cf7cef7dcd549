"""Names for authors of masks, modifiers and backends, beside `Mask`, `Modifier` and `graph`."""

from attn_graph.errors import Reason
from attn_graph.lowering.backend import Backend, DeviceTest, Executable, Price, RefusedError
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.store import Store, default_store
from attn_graph.machine.torch_switches import Switches
from attn_graph.masks.places import Block, Keys, Place
from attn_graph.planner.choose import BACKENDS

__all__ = [
    "BACKENDS",
    "Backend",
    "Block",
    "DeviceTest",
    "Executable",
    "Keys",
    "Options",
    "Place",
    "Price",
    "Problem",
    "Reason",
    "RefusedError",
    "Request",
    "Store",
    "Switches",
    "default_store",
    "sole",
]
