"""vLLM on this library: an attention backend of its registry, found by vLLM as a plugin.

Set ATTN_GRAPH_VLLM=1 for CPUs, or choose the backend CUSTOM on GPUs; docs/guides/vllm.md has more.
This module imports nothing of vLLM: every process of every vLLM in the environment loads it.
"""

from __future__ import annotations

import os

SWITCH = "ATTN_GRAPH_VLLM"
BACKENDS = "attn_graph.integrations.vllm.backend"


def register() -> None:
    """Make the backends known to vLLM, which calls this once or more in each process.

    The place CUSTOM has ours: vLLM never takes it by itself. On CPUs vLLM has one backend for each
    kind of attention and no choice: with the switch set to 1, ours is in its place.
    Raises ValueError for a switch other than 0 and 1.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{BACKENDS}.GpuBackend")
    if is_on():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{BACKENDS}.CpuBackend")


def is_on() -> bool:
    """True if ATTN_GRAPH_VLLM is 1."""
    value = os.environ.get(SWITCH, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, and is {value!r}")
    return value == "1"
