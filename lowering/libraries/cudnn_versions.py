"""The versions of cuDNN and of its frontend on a target."""

from __future__ import annotations

import re
from functools import lru_cache

from attn_graph.machine.target import CUDNN, SYSTEM_CUDNN, Target

FRONTEND = "nvidia-cudnn-frontend"
# Assumed versions of missing libraries, for finding the graph's own reasons as well.
ASSUMED = ((9, 20, 0), (1, 28, 0))


@lru_cache(64)  # every question about a graph asks
def versions(target: Target) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]:
    """The versions of cuDNN and of its frontend; None for a missing library."""
    numbers = (version(target, name) for name in (*CUDNN, SYSTEM_CUDNN))
    return next(filter(None, numbers), None), version(target, FRONTEND)


def version(target: Target, library: str) -> tuple[int, int, int] | None:
    """Major, minor and patch of a library of the target; None if it is missing."""
    numbers = re.findall(r"\d+", dict(target.libraries).get(library, ""))[:3]
    major, minor, patch = (*map(int, numbers), 0, 0, 0)[:3]
    return (major, minor, patch) if numbers else None
