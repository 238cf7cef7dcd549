"""A backend of your own: a name, its reasons against a graph, and how it runs the others."""

from collections.abc import Iterator, Sequence

import torch

import attn_graph as ag
from attn_graph.extend import Backend, Executable, Request, sole

Tensors = Sequence[torch.Tensor]


def why_not(request: Request) -> Iterator[str]:
    """What it has no code for. A gradient is not for it: o and lse are all that one needs."""
    problem = sole(request.graph)
    if problem is None or problem.grad is not None:
        yield "computes one attention forward, and the graph is something else"
        return
    if not problem.is_plain:
        yield f"knows plain attention, without mask or modifiers, and this is {problem.node}"
    if problem.M != 1 or problem.is_empty:
        yield f"takes one query and at least one key, and M = {problem.M}, N = {problem.N}"
    if problem.dtype != torch.float32:
        yield f"computes in float32, and q is {problem.dtype}"


def lower(request: Request) -> Executable:
    graph = request.graph
    problem, (eqn,), inputs = sole(graph), graph.eqns, len(graph.inputs)
    assert problem is not None  # why_not said so

    def run(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The query heads that share a key/value head are the rows of one product."""
        q, k, v = (tensors[i] for i in eqn.args)
        s = q.reshape(problem.B, problem.G, -1, problem.D) @ k.mT * problem.node.scale
        lse = s.logsumexp(-1, keepdim=True)
        o = problem.new_o(q.device)
        o.copy_((torch.exp(s - lse) @ v).view(o.shape))
        saved = o, lse.view(o.shape[:3])
        return [saved[i - inputs] for i in graph.outputs], saved

    return Executable(run, notes=("two batched products; keys and values are read once",))


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(4, 32, 1, 64, requires_grad=True)  # one new token
    k, v = torch.randn(2, 4, 8, 2048, 64).unbind()  # and all tokens so far
    like = ag.TensorSpec.like
    graph = ag.attention(like(q), like(k), like(v), mask=ag.Causal("bottom_right"), stats=True)
    plan = ag.compile(graph, backends=(Backend("decode", why_not, lower), "torch_sdpa", "math"))
    o, _ = plan(q, k, v)
    o.sum().backward()  # decode refuses the gradient, torch_sdpa takes it
    print(plan.explain(), plan.verify(q, k, v), sep="\n")


if __name__ == "__main__":
    main()
