"""vLLM on this library: an attention backend of its registry, found by vLLM as a plugin.

Set ATTN_GRAPH_VLLM=1 for CPUs, or choose the backend CUSTOM on GPUs; docs/guides/vllm.md has more.
This module imports nothing of vLLM: every process of every vLLM in the environment loads it.
"""

from __future__ import annotations

import os

SWITCH = "ATTN_GRAPH_VLLM"
BACKENDS = {  # by their places in vLLM's registry, which vLLM fills on CPUs without a choice
    "CPU_ATTN": "attn_graph.integrations.vllm.backend.CpuBackend",
    "CPU_MLA": "attn_graph.integrations.vllm.latent.LatentBackend",
    "AMX_MLA": "attn_graph.integrations.vllm.latent.LatentBackend",
}


def register() -> None:
    """Make the backends known to vLLM. It calls this once or more in each process.

    CUSTOM is a free place, and vLLM takes it only if it is chosen. On CPUs nothing can be chosen:
    with the switch set to 1, ours are in the places of vLLM's own.
    Raises ValueError for a switch other than 0 and 1.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "attn_graph.integrations.vllm.backend.GpuBackend")
    for place, path in BACKENDS.items() if is_on() else ():
        register_backend(AttentionBackendEnum[place], path)


def is_on() -> bool:
    """True if ATTN_GRAPH_VLLM is 1."""
    value = os.environ.get(SWITCH, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, and is {value!r}")
    return value == "1"
