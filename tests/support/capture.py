"""A step in a CUDA graph, replayed with other tensors in the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.device import capture_step

Step = Callable[[], tuple[torch.Tensor, ...]]


def replayed(step: Step, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a captured step gives when it is replayed after the leaves were filled anew."""
    graph, results = capture_step(step)
    for leaf in leaves:
        leaf.data.normal_()
    graph.replay()
    torch.cuda.synchronize()
    return tuple(x.clone() for x in results)  # theirs is the graph's memory
