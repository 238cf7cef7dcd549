"""Choice by measurement: which backend, and which of its ways, is the fastest on this machine."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.backend import Backend, Executable, Options, RefusedError
from attn_graph.errors import GraphError, Reason
from attn_graph.ir.graph import Graph, Input
from attn_graph.machine.store import Unfit
from attn_graph.machine.target import Target
from attn_graph.machine.timing import Job, Progress, samples
from attn_graph.planner.choose import BACKENDS, Choice, choose, choose_and_lower
from attn_graph.planner.cost import cost, format_scaled
from attn_graph.spec import TensorSpec

FORM = 1  # of what is stored; another number makes all be measured anew
Figures = dict[str, float]  # seconds of a call, by candidate


@final
@frozen
class Candidate:
    """A backend, and which of its ways to lower a graph; None is its own choice."""

    backend: Backend
    variant: str | None = None

    @property
    def name(self) -> str:
        return self.backend.name if self.variant is None else f"{self.backend.name}, {self.variant}"

    def lower(self, graph: Graph, target: Target, options: Options) -> Executable:
        return self.backend.lower(graph, target, evolve(options, variant=self.variant))


def choose_fastest(
    graph: Graph, target: Target, options: Options, among: Sequence[Backend] | None
) -> tuple[Choice, Executable]:
    """The fastest of all that take the graph, by what is stored of them or measured now.

    Figures are stored as they come: what was measured before an interrupt is not measured again.
    Raises GraphError for a target that is not this machine, NoBackendError as `choose` does.
    """
    if target.device is None:
        raise GraphError(
            f"tune: measures on this machine, {Target.here()}, and the target is {target}"
        )
    key, late = tuning_key(graph, target, options), dict[str, tuple[Reason, ...]]()
    figures = recall(key, options)
    while True:
        choice = choose(graph, target, options, among, late)
        able = all_takers(choice, BACKENDS if among is None else among)
        found = {c.name: c for b in able for c in candidates(b, graph, target, options)}
        missing = {name: c for name, c in found.items() if name not in figures}
        late |= measure(missing, graph, target, options, key, figures)
        if not late.keys() & {b.name for b in able}:
            break
    for name in sorted((n for n in found if n in figures), key=figures.__getitem__):
        executable = lowered_within(found[name], graph, target, options)
        if executable is not None:
            backend = found[name].backend
            also = tuple(b.name for b in able if b is not backend)
            told = explain_choice(
                figures,
                found,
                cost(graph, target, precision=options.precision).forward.achieved(figures[name]),
            )
            return evolve(choice, backend=backend, cause=told, also=also), executable
    return choose_and_lower(graph, target, options, among)


def lowered_within(
    candidate: Candidate, graph: Graph, target: Target, options: Options
) -> Executable | None:
    """The candidate, unless it refuses after all or needs a larger workspace than it may."""
    try:
        found = candidate.lower(graph, target, options)
    except RefusedError:
        return None
    return None if [*options.over_workspace(found.workspace)] else found


def all_takers(choice: Choice, among: Sequence[Backend]) -> list[Backend]:
    """All that take the graph, in the order of preference."""
    by_name = {backend.name: backend for backend in among}
    return [choice.backend, *(by_name[name] for name in choice.also)]


def candidates(
    backend: Backend, graph: Graph, target: Target, options: Options
) -> Iterator[Candidate]:
    yield Candidate(backend)
    try:
        names = backend.variants(graph, target, options)
    except RefusedError:  # it finds out only now, and finds the same when it is lowered
        return
    yield from (Candidate(backend, name) for name in names)


def explain_choice(figures: Figures, found: Mapping[str, Candidate], achieved: float | None) -> str:
    """Why the first is chosen: all figures, the fastest first, and its part of the roofline."""
    ranked = sorted((n for n in found if n in figures), key=figures.__getitem__)
    told = ", ".join(f"{name} {format_scaled(figures[name], 's')}" for name in ranked)
    share = "" if achieved is None else f"; that is {100 * achieved:.3g} % of the roofline"
    return f"it was the fastest when measured here: {told}{share}"


# What is stored.


def tuning_key(graph: Graph, target: Target, options: Options) -> str:
    """All that the figures depend on, as a text."""
    told = {
        "form": FORM,
        "graph": str(graph),
        "target": str(target),
        "libraries": target.libraries,
        "machine": platform.node(),
        "threads": torch.get_num_threads(),
        "deterministic": options.deterministic,
        "precision": options.precision,
        "switches": str(options.switches),
        "max_workspace": options.max_workspace,
    }
    return f"tune {json.dumps(told, sort_keys=True)}"


def recall(key: str, options: Options) -> Figures:
    """What was measured before; nothing where that is not kept."""
    return (options.store.load(key, figures_of) if options.store else None) or {}


def figures_of(data: bytes) -> Figures:
    """What `measure` stored. Raises Unfit for anything else."""
    try:
        return {str(name): float(seconds) for name, seconds in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise Unfit(f"it holds no figures: {error}") from error


# Measuring.


def measure(
    found: Mapping[str, Candidate],
    graph: Graph,
    target: Target,
    options: Options,
    key: str,
    figures: Figures,
) -> dict[str, tuple[Reason, ...]]:
    """Add the seconds of each candidate to the figures, and keep them, even when interrupted.

    What backends have against the graph after all, by name.
    """
    if not found:
        return {}
    from rich.console import Console

    device = target.device
    assert device is not None  # `choose_fastest` said so
    tensors = examples(graph, device)
    taken: dict[str, list[float]] = {}
    with Console(stderr=True).status("tuning") as status:
        jobs, late = able_jobs(found, graph, target, options, tensors, status.update)
        try:
            for name, seconds in samples(jobs, device=device, progress=status.update):
                taken.setdefault(name, []).append(seconds)
        finally:
            figures.update({name: statistics.median(each) for name, each in taken.items()})
            if options.store and figures:
                options.store.put(key, json.dumps(figures).encode())
    return late


def able_jobs(
    found: Mapping[str, Candidate],
    graph: Graph,
    target: Target,
    options: Options,
    tensors: Sequence[torch.Tensor],
    progress: Progress,
) -> tuple[dict[str, Job], dict[str, tuple[Reason, ...]]]:
    """A job for each candidate that runs here, and the reasons of backends that don't.

    Some find out only when they run; a variant that does is left out.
    """
    jobs: dict[str, Job] = {}
    late: dict[str, tuple[Reason, ...]] = {}
    for name, candidate in found.items():
        progress(f"{name}: building")
        try:
            executable = candidate.lower(graph, target, options)
            if over := [*options.over_workspace(executable.workspace)]:
                raise RefusedError(*over)
            executable.run(*tensors)
        except (RefusedError, torch.OutOfMemoryError) as error:
            if candidate.variant is None:
                late[candidate.backend.name] = late_reasons(error)
            continue
        jobs[name] = lambda run=executable.run: run(*tensors)  # type: ignore[misc]  # bound now
    return jobs, late


def late_reasons(error: RefusedError | torch.OutOfMemoryError) -> tuple[Reason, ...]:
    """Why a candidate that was tried does not run here."""
    if isinstance(error, RefusedError):
        return error.reasons
    return tuple(Reason("memory", str(text), sentence="{limit}") for text in error.args)


def examples(graph: Graph, device: torch.device) -> list[torch.Tensor]:
    """Tensors as the graph declares them, with values that make the usual work: lengths are full,
    all is of one segment, half of all flags are set, lse is that of scores near 0."""
    random = torch.Generator().manual_seed(0)
    sizes = {i.name: i.spec.shape for i in graph.inputs}
    M, N = sizes["q"][2] if "q" in sizes else 1, sizes["k"][2] if "k" in sizes else 1
    full = {"q_lengths": M, "kv_lengths": N}
    return [
        make_tensor(i, full.get(i.name, 0), math.log(max(1, N)), random).to(device)
        for i in graph.inputs
    ]


def make_tensor(x: Input, number: int, lse: float, random: torch.Generator) -> torch.Tensor:
    """A tensor of a spec: normal, or of one number, or of flags."""
    spec = x.spec
    count = elements_spanned(spec)
    if spec.dtype == torch.bool:
        values = torch.rand(count, generator=random) < 0.5
    elif not spec.dtype.is_floating_point:
        values = torch.full((count,), number, dtype=spec.dtype)
    elif x.name.startswith("lse"):
        values = torch.full((count,), lse, dtype=spec.dtype)
    else:
        values = torch.randn(count, generator=random).to(spec.dtype)
    return values.as_strided(spec.shape, spec.strides)


def elements_spanned(spec: TensorSpec) -> int:
    """How many elements of memory a spec reaches over."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
