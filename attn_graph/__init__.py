"""Attention as an immutable graph: declare it, see its backend and the reasons, then run it.

One alphabet, in docstrings and code alike: B batch, H query heads, G key/value heads (H = r G;
query head h reads key/value head h // r), M queries, N keys, D head size of q and k, E head size of
v; i a query's position, j a key's. Tensors by role: q k v o lse, scores s, weights p, and gradients
dq dk dv do ds dp. Shapes are logical, [B,H,M,D]; memory order is the strides' business.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING


@contextmanager
def paused_collector() -> Iterator[None]:
    """No garbage is collected within this block: nearly all of its objects stay.

    One full collection, of all objects made by PyTorch before, would take longer than this import.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


with paused_collector():
    from attn_graph import nn as nn  # registers the operators for plans in traced code
    from attn_graph.compiler import avoid, cache_info, clear_cache, compile, explain, prefer
    from attn_graph.errors import (
        FallbackWarning,
        GraphError,
        NoBackendError,
        PlanMismatchError,
        PlanTargetError,
        SelfCheckWarning,
        TensorError,
    )
    from attn_graph.ir.builder import Value, attention, graph, scores
    from attn_graph.ir.graph import Graph
    from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
    from attn_graph.ir.terms.relative import RelativeBias
    from attn_graph.ir.transforms.jvp import jvp
    from attn_graph.ir.transforms.parse import parse
    from attn_graph.ir.transforms.vjp import lay_out, vjp
    from attn_graph.machine.target import Target
    from attn_graph.machine.workspace import Workspace, default_workspace
    from attn_graph.masks import (
        Band,
        Causal,
        Data,
        Keep,
        KeepBlocks,
        KeyLengths,
        Mask,
        Prefix,
        QueryLengths,
        SameSegment,
        Window,
    )
    from attn_graph.plan import Plan
    from attn_graph.rings import find, load
    from attn_graph.spec import TensorSpec
    from attn_graph.spec.dims import Dim, doubling

if TYPE_CHECKING:
    from attn_graph import extend as extend
    from attn_graph import types as types
    from attn_graph.integrations.flex import from_flex, from_flex_score
    from attn_graph.integrations.onnx import decompositions
    from attn_graph.integrations.xformers import from_xformers
    from attn_graph.ir.reference import evaluate
    from attn_graph.ir.terms.addends import Addend, Factor
    from attn_graph.ir.terms.formulas import Formula
    from attn_graph.ir.transforms.vmap import vmap
    from attn_graph.layers.replace import replace_sdpa
    from attn_graph.mesh.layout import Mesh
    from attn_graph.mesh.sharding import shard
    from attn_graph.sparsity.tables import select_blocks
    from attn_graph.sparsity.tiles import tiles

__version__ = "0.3.0"
__all__ = [
    "Addend",
    "Alibi",
    "Band",
    "Bias",
    "Causal",
    "Data",
    "Dim",
    "Factor",
    "FallbackWarning",
    "Formula",
    "Graph",
    "GraphError",
    "Keep",
    "KeepBlocks",
    "KeyLengths",
    "Mask",
    "Mesh",
    "Modifier",
    "NoBackendError",
    "Plan",
    "PlanMismatchError",
    "PlanTargetError",
    "Prefix",
    "QueryLengths",
    "RelativeBias",
    "SameSegment",
    "SelfCheckWarning",
    "SoftCap",
    "Target",
    "TensorError",
    "TensorSpec",
    "Value",
    "Window",
    "Workspace",
    "attention",
    "avoid",
    "cache_info",
    "clear_cache",
    "compile",
    "decompositions",
    "default_workspace",
    "doubling",
    "evaluate",
    "explain",
    "from_flex",
    "from_flex_score",
    "from_xformers",
    "graph",
    "jvp",
    "lay_out",
    "parse",
    "prefer",
    "replace_sdpa",
    "scores",
    "select_blocks",
    "shard",
    "tiles",
    "vjp",
    "vmap",
]
PARTS = ("extend", "testing", "types")  # imported at first use, as many names of __all__ are


def __getattr__(name: str) -> object:
    """A public name that waits for its first use, or a module of PARTS.

    Raises AttributeError for any other, with the new place of names in `extend` and `types`, and
    ModuleNotFoundError for a name of a ring that is not in this build.
    """
    if name in PARTS:
        return load(name)
    if name in __all__:
        return find(name)
    text = f"{__name__} has no attribute {name!r}"
    for part in () if name.startswith("_") else ("extend", "types"):
        if name in load(part).__all__:
            text += f"; it is {__name__}.{part}.{name}"
    raise AttributeError(text)


def __dir__() -> list[str]:
    """The public names alone, for completion."""
    return [*__all__, "__version__"]
