"""All instructions: importing their modules fills the table of rules."""

from functools import lru_cache

from attn_graph.testing.gpu import (  # noqa: F401  # for their rules
    arithmetic,
    atomics,
    barriers,
    calls,
    copies,
    floats,
    lanes,
    maps,
    memory,
    products,
    shared,
    tensor_memory,
)
from attn_graph.testing.gpu.ptx import parse
from attn_graph.testing.gpu.translate import Translation, translate_kernel


@lru_cache(maxsize=512)
def translate(text: str) -> Translation:
    """Translate the kernel of a PTX module. Raises UnknownInstructionError."""
    return translate_kernel(parse(text))
