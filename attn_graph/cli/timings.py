"""Times a graph by every backend able to run it on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
from attrs import asdict, frozen

import attn_graph as ag
from attn_graph.ir.transforms.vjp import main_outputs
from attn_graph.lowering.shares import mask_sources
from attn_graph.measuring.timing import Job, add_medians
from attn_graph.measuring.tuning import examples
from attn_graph.plan import Plan
from attn_graph.planner.cost import cost

Pass = Literal["forward", "backward"]
Tensors = Sequence[torch.Tensor]


@final
@frozen
class Figure:
    """The seconds of a pass by a backend, and the least work of the pass."""

    backend: str
    pass_: Pass
    seconds: float
    work: ag.types.Work

    @property
    def rate(self) -> float:
        """flop/s, of the flops left by the mask."""
        return self.work.flops / self.seconds

    @property
    def achieved(self) -> float | None:
        """The fraction of the machine's rates; None if they are unknown."""
        return self.work.achieved(self.seconds)

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """All of it as --json shows it."""
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
    """A backend unable to run a pass, with every reason and its key."""

    backend: str
    pass_: Pass
    reasons: tuple[str, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, backend: str, pass_: Pass, reasons: Sequence[ag.extend.Reason]) -> Refused:
        """The refusal of a pass, by its reasons."""
        return cls(backend, pass_, tuple(map(str, reasons)), tuple(x.key for x in reasons))


@final
@frozen
class Bench:
    """Figures of every backend able to run the graph, and the others' reasons.

    interrupted: True after Ctrl-C; the figures are then of the runs before it.
    """

    graph: ag.Graph
    target: ag.Target
    figures: tuple[Figure, ...]
    refusals: tuple[Refused, ...]
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """All of it as --json shows it."""
        return {
            "graph": str(self.graph),
            "target": str(self.target),
            "libraries": dict(self.target.libraries),
            "threads": torch.get_num_threads(),
            "results": [each.to_dict() for each in self.figures],
            "refusals": [asdict(each) for each in self.refusals],
            "interrupted": self.interrupted,
        }


def measure_graph(
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
    """Time a graph by each backend able to run it, all passes of all of them in turn.

    target: this machine. rates: the target with other rates, for the fractions of the roofline.
    """
    device = target.device
    assert device is not None  # it is this machine's
    jobs: dict[tuple[str, Pass], Job] = {}
    refusals: list[Refused] = []
    costs: ag.types.Cost | None = None
    for name in backends:
        pass_: Pass = "forward"
        try:
            plan = ag.compile(graph, target=target, backends=(name,), deterministic=deterministic)
            tensors = examples(plan.graph, device)
            costs = costs or count_costs(plan, rates or target, tensors)
            jobs[name, pass_] = partial(plan, *tensors)
            pass_ = "backward"
            if backward and plan.graph.has_gradient and plan.training_vjp:
                jobs[name, pass_] = backward_job(plan, tensors)
        except ag.NoBackendError as error:
            refusals += [Refused.of(name, pass_, reasons) for _, reasons in error.refusals]
    taken: dict[str, float] = {}
    interrupted = False
    try:
        named = {f"{name} {pass_}": job for (name, pass_), job in jobs.items()}
        add_medians(taken, named, seconds=seconds, device=device, progress=progress)
    except KeyboardInterrupt:
        interrupted = True
    some = tuple(collect_figures(jobs, taken, costs)) if costs else ()
    return Bench(graph, rates or target, some, tuple(refusals), interrupted)


def collect_figures(
    jobs: Iterable[tuple[str, Pass]], taken: Mapping[str, float], cost: ag.types.Cost
) -> Iterator[Figure]:
    """The median of each measured pass."""
    works = {"forward": cost.forward, "backward": cost.backward}
    for name, pass_ in jobs:
        seconds = taken.get(f"{name} {pass_}")
        if seconds and (work := works[pass_]):
            yield Figure(name, pass_, seconds, work)


def count_costs(plan: Plan, rates: ag.Target, tensors: Tensors) -> ag.types.Cost:
    """The cost of the graph with these very tensors."""
    graph = plan.graph
    read = {name for eqn in graph.eqns for name, _ in mask_sources(graph, eqn).values()}
    data = {i.name: x for i, x in zip(graph.inputs, tensors, strict=True) if i.name in read}
    return cost(graph, rates, data)


def backward_job(plan: Plan, tensors: Tensors) -> Job:
    """A training step's gradient by all inputs that have one, by autograd; the forward has run
    once."""
    fixed = plan.graph.carried | plan.graph.constants
    leaves = [
        t.detach().requires_grad_(t.is_floating_point() and n not in fixed)
        for n, t in enumerate(tensors)
    ]
    results = plan(*leaves)
    given = [results] if isinstance(results, torch.Tensor) else [*results]
    usual = main_outputs(plan.graph)
    outputs = [o for o, i in zip(given, plan.graph.outputs, strict=True) if i in usual]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = [torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)
