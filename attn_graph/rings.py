"""What loads at its first use: names of rings, for the core, and those of the core it can wait for.

A ring is a part of the library that a build may leave out. The core imports none: it looks names up
here, and so do the package and its faces for their users. What is missing is one clear error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from attn_graph.machine.imports import load_modules

PACKAGE = __name__.partition(".")[0]
RINGS: Mapping[str, tuple[str, ...]] = {  # modules and packages, below `attn_graph`
    "cpu": ("lowering.cpu",),
    "triton": ("lowering.triton",),
    "cudnn": ("lowering.cudnn",),
    "fa4": ("lowering.fa4",),
    "torch_cuda": ("lowering.torch_cuda",),
    "layers": ("layers",),
    "vmap": ("ir.transforms.vmap", "nn.batching"),
    "mesh": ("mesh",),
    "integrations": ("integrations",),
    "testing": ("testing",),
    "testing.gpu": ("testing.gpu",),
    "instruments": ("instruments", "plan.extras.explained"),
    "measuring": ("measuring",),
    "cli": ("cli", "__main__"),
}
BACKENDS = {  # by name, PyTorch's own kernels in PyTorch's own order of preference
    "cudnn": ("lowering.cudnn.backend", "BACKEND"),
    "triton": ("lowering.triton.backend", "BACKEND"),
    "fa4": ("lowering.fa4.backend", "BACKEND"),
    "torch_sdpa": ("lowering.cpu.sdpa", "BACKEND"),
    "torch_flash": ("lowering.torch_cuda.packed", "BACKEND"),
    "torch_efficient": ("lowering.torch_cuda.dense", "EFFICIENT"),
    "torch_cudnn": ("lowering.torch_cuda.dense", "CUDNN"),
    "math": ("lowering.cpu.math", "BACKEND"),
}
HOMES = {  # by name
    # for users, of rings
    **dict.fromkeys(("Attention", "MultiheadAttention"), "layers.modules"),
    **dict.fromkeys(("from_flex", "from_flex_score"), "integrations.flex"),
    "decompositions": "integrations.onnx",
    "from_xformers": "integrations.xformers",
    "Mesh": "mesh.layout",
    **dict.fromkeys(("Outlook", "ShardedPlan"), "mesh.results"),
    "Sharded": "mesh.sharded",
    "shard": "mesh.sharding",
    "replace_sdpa": "layers.replace",
    "vmap": "ir.transforms.vmap",
    **dict.fromkeys(("Explanation", "Refusal"), "instruments.explanation"),
    # for users, of the core
    **dict.fromkeys(("varlen_attn", "varlen_attn_out"), "nn.varlen"),
    **dict.fromkeys(("Addend", "Factor"), "ir.terms.addends"),
    **dict.fromkeys(("Cost", "Work"), "planner.cost"),
    "Formula": "ir.terms.formulas",
    "evaluate": "ir.reference",
    "select_blocks": "sparsity.tables",
    **dict.fromkeys(("Tiles", "tiles"), "sparsity.tiles"),
    # for rings, of others
    "virtual_gpu": "testing.gpu.device",
    # for the core, of rings
    **dict.fromkeys(("explain_graph", "explain_refusals"), "instruments.explain"),
    **dict.fromkeys(("explain_plan", "show_plan"), "plan.extras.explained"),
    **dict.fromkeys(
        ("picture", "picture_html", "picture_masks", "telling_size"), "instruments.pictures"
    ),
    **dict.fromkeys(("failed_checks", "lower_checked", "check_notes"), "measuring.self_check"),
    "choose_fastest": "measuring.tuning",
    "record_weights": "lowering.cpu.math",
    # for the core, of the core: planning, which nothing needs before the first plan
    **dict.fromkeys(("plan_graph", "plan_simplified"), "plan.building"),
    **dict.fromkeys(("write_gradient", "write_tangents"), "nn.derivatives"),
    "DEFAULTS": "planner.arguments",
    **dict.fromkeys(("BACKENDS", "resolve_backends"), "planner.choose"),
}


def find(name: str) -> Any:  # Any: whatever has the name
    """What HOMES calls by this name. Raises ModuleNotFoundError if the build lacks its ring."""
    return getattr(load(HOMES[name], name), name)


def load(module: str, name: str = "") -> ModuleType:
    """A module below `attn_graph`, imported at first use. name: what needs it, for the error.

    Raises ModuleNotFoundError, which names the ring, if it or a module that it imports is missing.
    """
    try:
        return load_modules(f"{PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        ring = ring_of(error.name or "")
        if not ring:
            raise
        raise ModuleNotFoundError(
            f"this build of {PACKAGE} has no {ring}, and {name or module} needs it: "
            f"{error.name} is missing; install {PACKAGE} whole",
            name=error.name,
        ) from error


def ring_of(module: str) -> str:
    """The ring of a module of ours; "" for one of the core, and for any other."""
    inner = module.removeprefix(f"{PACKAGE}.")
    if inner == module:
        return ""
    rings = [
        (len(part), ring)
        for ring, parts in RINGS.items()
        for part in parts
        if f"{inner}.".startswith(f"{part}.")
    ]
    return max(rings, default=(0, ""))[1]


def load_present(*modules: str) -> list[ModuleType]:
    """Import those of these modules whose rings are in this build."""
    present = []
    for module in modules:
        try:
            present.append(load(module))
        except ModuleNotFoundError as error:
            if not ring_of(error.name or ""):
                raise
    return present


def present_backends() -> Iterator[Any]:  # Any: a Backend, of a module above
    """The records of the backends in this build, in the order of BACKENDS."""
    for home, name in BACKENDS.values():
        yield from (getattr(module, name) for module in load_present(home))
