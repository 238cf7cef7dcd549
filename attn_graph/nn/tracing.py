"""What torch.compile makes of masks and plans: constants of the code that it traces."""

from __future__ import annotations

from collections.abc import Callable

from torch._library import opaque_object

from attn_graph.masks import Mask

# Whether it takes masks, of any class, and plans for constants: from torch 2.12 on.
KEEPS_CONSTANTS = hasattr(opaque_object, "_resolve_opaque_type_info")
# Of masks, that compiled code may call:
METHODS: tuple[str, ...] = ("__and__", "__or__", "__invert__", "aligned")
UNTRACED = ("attn_graph", "attn_graph.lowering", "attn_graph.kernels")  # each a folder of its own


def register_masks() -> None:
    """Let masks be written inside of compiled code: they are made while it is traced.

    Where torch.compile can't, it leaves out the library, and compiles the code around calls.
    """
    if KEEPS_CONSTANTS:
        register, kind = registration()
        register(Mask, typ=kind, members=dict.fromkeys(METHODS, opaque_object.MemberType.USE_REAL))
    else:
        leave_untraced()


def registration() -> tuple[Callable[..., None], str]:
    """PyTorch's function that registers a class, and its word for constants. In 2.15 both have
    other names than before, and those of before are deprecated."""
    if register := getattr(opaque_object, "register_custom_class", None):
        return register, "constant"
    return opaque_object.register_opaque_type, "value"


def leave_untraced() -> None:
    """Let torch.compile run the library's functions as they are, between what it compiles."""
    from torch._dynamo import trace_rules

    for package in UNTRACED:
        trace_rules.add(package)
