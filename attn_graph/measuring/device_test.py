"""Runs a self-check: small graphs, sent as text to a process of their own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module

import torch
from attrs import evolve

from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.graph import Graph
from attn_graph.ir.reference import compare
from attn_graph.ir.transforms.parse import parse
from attn_graph.lowering.backend import Backend, DeviceTest, RefusedError
from attn_graph.lowering.problem import PREPARING, read_operands
from attn_graph.lowering.processes import run_apart
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import Target
from attn_graph.measuring.self_check import Proof
from attn_graph.measuring.tuning import examples

PROGRAM = "from attn_graph.measuring.device_test import run_request; run_request()"


def try_graphs(test: DeviceTest, target: Target) -> Proof:
    """Run the test's graphs on a device of this machine, in a new process; its outcome."""
    request = {
        "home": test.home,
        "graphs": [*map(str, test.graphs)],
        "way": test.way,
        "precision": test.precision,
        "device": str(target.device),
    }
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = (sys.executable, "-P", "-c", PROGRAM)
    start = time.monotonic()
    failure, output = run_apart(program, json.dumps(request), seconds=test.seconds, env=env)
    shares = () if failure else tuple(json.loads(output.splitlines()[-1]))
    if not failure and not all(share <= 1 for share in shares):
        worst = max(shares)
        failure = f"is wrong: an error is {worst:.3g} times what the accuracy rule allows"
    return Proof(failure, shares, time.monotonic() - start)


# In the new process.


def run_request() -> None:
    """Read a request, run its graphs and print the largest share of each."""
    request = json.load(sys.stdin)
    module, _, name = request["home"].partition(":")
    backend, device = getattr(import_module(module), name), torch.device(request["device"])
    target = Target.here(device)
    with target.current(), torch.no_grad():
        options = Options(variant=request["way"], precision=request["precision"])
        graphs = map(parse, request["graphs"])
        shares = [
            max(try_graph(backend, Request(graph, target, options), device)) for graph in graphs
        ]
    print(json.dumps(shares))


def try_graph(backend: Backend, request: Request, device: torch.device) -> Iterator[float]:
    """The errors of each run, as shares of the allowance. Raises RefusedError on refusal."""
    if against := backend.reasons(request):
        raise RefusedError(*against)
    executable = backend.lowered(request)
    host = tensors_of(request.graph)
    tensors = [tensor.to(device) for tensor in host]
    for run in (executable.run, executable.infer, executable.run):  # races need not show at once
        outputs, _ = run(*tensors)
        verification = compare(
            request.graph, host, [output.cpu() for output in outputs], request.options.precision
        )
        for error, allowed in zip(verification.errors, verification.allowed, strict=True):
            yield error / allowed if allowed else float(error > 0) * float("inf") if error else 0.0


def tensors_of(graph: Graph) -> list[torch.Tensor]:
    """Drawn `examples`, with the o and lse of the graph's attention for its gradient.

    Any other lse makes weights exp(s - lse) of hundreds. The rule's allowance follows the largest
    gradients: it would be as large as most errors, and wrong results would pass.
    """
    tensors = examples(graph, torch.device("cpu"), drawn=True)
    if not graph.eqns or not all(isinstance(eqn.op, PREPARING) for eqn in graph.eqns[:-1]):
        return tensors
    op = graph.eqns[-1].op
    grad: AttentionGrad | None = op.grad
    if grad is None or op.jvp:
        return tensors
    operands, count = read_operands(graph, tensors), len(grad.ranks)
    given, where = grad.split(operands[:count]), operands[count:]
    own = [x.double() if x.is_floating_point() else x for x in given.own]
    forward = evolve(op.packed, op=grad.attention) if op.packed else grad.attention
    for saved, exact in zip((given.o, given.lse), forward.run(*own, *where), strict=True):
        saved.copy_(exact)
    return tensors
