"""A graph timed by every backend that takes it on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from attrs import asdict, frozen

import attn_graph as ag
from attn_graph.cost import attention_of, cost, masks_inputs
from attn_graph.plan import Plan
from attn_graph.spec import TensorSpec
from attn_graph.timing import Job, medians

Pass = Literal["forward", "backward"]
Tensors = tuple[torch.Tensor, ...]
SEGMENTS = 4  # of a sequence
DENSITY = 0.9  # of flags that are set


@final
@frozen
class Figure:
    """What a pass took by a backend, in seconds, and what it had to do at least."""

    backend: str
    pass_: Pass
    seconds: float
    work: ag.Work

    @property
    def rate(self) -> float:
        """flop/s, of the flops that the mask leaves."""
        return self.work.flops / self.seconds

    @property
    def achieved(self) -> float | None:
        """The fraction of what the machine's rates allow; None where they are not known."""
        return self.work.achieved(self.seconds)

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        return {
            "backend": self.backend,
            "pass": self.pass_,
            "seconds": self.seconds,
            **asdict(self.work),
            "flops_per_second": self.rate,
            "achieved": self.achieved,
        }


@final
@frozen
class Refused:
    """A backend that takes a pass not, with every reason."""

    backend: str
    pass_: Pass
    reasons: tuple[str, ...]


@final
@frozen
class Bench:
    """Figures of every backend that took the graph, and the others' reasons."""

    graph: ag.Graph
    target: ag.Target
    figures: tuple[Figure, ...]
    refusals: tuple[Refused, ...]

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        return {
            "graph": str(self.graph),
            "target": str(self.target),
            "libraries": dict(self.target.libraries),
            "threads": torch.get_num_threads(),
            "results": [each.to_dict() for each in self.figures],
            "refusals": [asdict(each) for each in self.refusals],
        }


def measured(
    graph: ag.Graph,
    target: ag.Target,
    backends: Sequence[str],
    *,
    rates: ag.Target | None = None,
    deterministic: bool = False,
    backward: bool = True,
    seconds: float = 0.5,
    progress: Callable[[str], None] | None = None,
) -> Bench:
    """Time a graph by each backend that takes it, all passes of all of them in turn.

    target: this machine. rates: the same with other rates, of which fractions are told.
    """
    jobs: dict[tuple[str, Pass], Job] = {}
    refusals: list[Refused] = []
    due: ag.Cost | None = None
    for name in backends:
        pass_: Pass = "forward"
        try:
            plan = ag.compile(graph, target=target, backends=(name,), deterministic=deterministic)
            tensors = filled(plan.graph, target.device)
            due = due or costs(plan, rates or target, tensors)
            jobs[name, pass_] = forward_job(plan, tensors)
            pass_ = "backward"
            if backward and plan.has_gradient and plan.vjp:
                jobs[name, pass_] = backward_job(plan, tensors)
        except ag.NoBackendError as error:
            refusals += [Refused(name, pass_, reasons) for _, reasons in error.refusals]
    told = {f"{name} {pass_}": job for (name, pass_), job in jobs.items()}
    took = medians(told, seconds=seconds, device=target.device, progress=progress)
    return Bench(
        graph, rates or target, tuple(figures(jobs, took, due)) if due else (), tuple(refusals)
    )


def figures(
    jobs: Mapping[tuple[str, Pass], Job], took: Mapping[str, float], cost: ag.Cost
) -> Iterator[Figure]:
    works = {"forward": cost.forward, "backward": cost.backward}
    for name, pass_ in jobs:
        if work := works[pass_]:
            yield Figure(name, pass_, took[f"{name} {pass_}"], work)


def costs(plan: Plan, rates: ag.Target, tensors: Tensors) -> ag.Cost:
    """What the graph costs with these very tensors."""
    read = {i for eqn in plan.graph.eqns for i in masks_inputs(plan.graph, eqn).values()}
    data = {plan.graph.inputs[i].name: tensors[i] for i in read}
    return cost(plan.graph, rates, data)


def forward_job(plan: Plan, tensors: Tensors) -> Job:
    return lambda: plan(*tensors)


def backward_job(plan: Plan, tensors: Tensors) -> Job:
    """The gradient by all floating inputs, by PyTorch's autograd; the forward has run once."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    found = plan(*leaves)
    outputs = [found] if isinstance(found, torch.Tensor) else [*found]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = [torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)


def filled(graph: ag.Graph, device: torch.device) -> Tensors:
    """A tensor for each input of a simplified graph: random, and the same every time."""
    random = torch.Generator().manual_seed(0)
    most = dict(lengths(graph))
    return tuple(
        laid_out(i.spec, most.get(n, 0), random).to(device) for n, i in enumerate(graph.inputs)
    )


def lengths(graph: ag.Graph) -> Iterator[tuple[int, int]]:
    """Which inputs are lengths, and the most that they can be."""
    for eqn in graph.eqns:
        if node := attention_of(eqn):
            M, N = (graph.types[i].shape[2] for i in eqn.args[:2])
            for role, i in zip(node.roles, eqn.args, strict=False):
                most = {"q_lengths": M, "kv_lengths": N}.get(role.rstrip("0123456789"))
                if most is not None:
                    yield i, most


def laid_out(spec: TensorSpec, most: int, random: torch.Generator) -> torch.Tensor:
    """A tensor that meets a spec; along axes of stride 0 it is expanded."""
    pairs = [*zip(spec.shape, spec.strides, strict=True)]
    shape = [n if stride or n == 0 else 1 for n, stride in pairs]
    held = torch.empty_strided(shape, spec.strides, dtype=spec.dtype)
    return held.copy_(values(shape, spec.dtype, most, random)).expand(spec.shape)


def values(
    shape: Sequence[int], dtype: torch.dtype, most: int, random: torch.Generator
) -> torch.Tensor:
    """Normal numbers; flags, mostly set; lengths up to `most`; segments in order; else zeros."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random)
    if dtype == torch.bool:
        return torch.rand(shape, generator=random) < DENSITY
    if most:
        return torch.randint(-(-most // 2), most + 1, shape, generator=random)
    if len(shape) == 2:
        return (torch.arange(shape[1]) * SEGMENTS // max(1, shape[1])).expand(shape)
    return torch.zeros(shape)
