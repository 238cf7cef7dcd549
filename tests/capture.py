"""A step in a CUDA graph, replayed with other tensors in the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Step = Callable[[], tuple[torch.Tensor, ...]]


def replayed(step: Step, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a captured step gives when it is replayed after the leaves were filled anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which fills the tensors
    with torch.cuda.stream(side):
        step()  # warms up: all is compiled or loaded, and the workspace is there
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=side):
            results = step()
    torch.cuda.synchronize()
    for leaf in leaves:
        leaf.data.normal_()
    captured.replay()
    torch.cuda.synchronize()
    return tuple(x.clone() for x in results)  # theirs is the graph's memory
