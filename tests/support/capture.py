"""A step in a CUDA graph, replayed with other tensors in the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Step = Callable[[], tuple[torch.Tensor, ...]]


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """A step as a CUDA graph, and the tensors that hold its results after each replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which fills the tensors
    with torch.cuda.stream(side):
        step()  # warms up: all is compiled or loaded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = step()
    torch.cuda.synchronize()
    return graph, results


def replayed(step: Step, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a captured step gives when it is replayed after the leaves were filled anew."""
    graph, results = captured(step)
    for leaf in leaves:
        leaf.data.normal_()
    graph.replay()
    torch.cuda.synchronize()
    return tuple(x.clone() for x in results)  # theirs is the graph's memory
