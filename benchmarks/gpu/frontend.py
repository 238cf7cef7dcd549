"""A call of cuDNN's frontend alone, with everything that it needs made beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import attn_graph as ag
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.builder import build_graph
from attn_graph.lowering.cudnn.run import Run, handle
from attn_graph.lowering.request import Request


def frontend_call(
    graph: ag.Graph, target: ag.Target, tensors: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """What cudnn.pygraph runs for the graph, on these tensors."""
    import cudnn

    case, call = describe_problem(Request(graph, target, ag.extend.Options()))
    device = tensors[0].device
    its = handle(device)
    plan = build_graph(call.plain, handle=its)
    packs: list[Any] = []  # Any: pointers by name
    run = Run.of(
        case, call, graph, ag.Workspace(), 0, lambda *arguments: packs.append(arguments[0])
    )
    run(*tensors)
    workspace = torch.empty(plan.get_workspace_size(), dtype=torch.uint8, device=device)

    def execute() -> None:
        cudnn.set_stream(handle=its, stream=torch.cuda.current_stream().cuda_stream)
        plan.execute(packs[0], workspace, handle=its)

    return execute
