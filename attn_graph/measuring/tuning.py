"""Chooses by measuring: the fastest backend, and its fastest variant, on this machine."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import final

import torch
from attrs import asdict, evolve, frozen

from attn_graph.errors import GraphError, Reason
from attn_graph.ir.graph import Graph, Input
from attn_graph.ir.storage.packed import LENGTHS, STARTS
from attn_graph.lowering.backend import Backend, Executable, RefusedError
from attn_graph.lowering.request import Request
from attn_graph.machine.imports import load_modules
from attn_graph.machine.store import Unfit, read_json, read_positive
from attn_graph.machine.target import Target
from attn_graph.measuring.self_check import lower_checked
from attn_graph.measuring.timing import Job, Progress, add_medians
from attn_graph.planner.choose import BACKENDS, Choice, choose, choose_and_lower, permitted_backends
from attn_graph.planner.cost import cost, format_scaled
from attn_graph.spec import TensorSpec

FORM = 1  # of stored figures; a new number measures all again
Figures = dict[str, float]  # seconds of a call, by candidate


@final
@frozen
class Candidate:
    """A backend and one of its variants; None leaves the variant to the backend."""

    backend: Backend
    variant: str | None = None

    @property
    def name(self) -> str:
        """The name of its figures in the store and in output."""
        return self.backend.name if self.variant is None else f"{self.backend.name}, {self.variant}"

    def lower(self, request: Request) -> Executable:
        """Lower the graph by this variant. Raises RefusedError, for too large a workspace too."""
        executable = lower_checked(self.backend, request.with_options(variant=self.variant))
        if over := [*request.options.over_workspace(executable.workspace)]:
            raise RefusedError(*over)
        return executable


def choose_fastest(request: Request) -> tuple[Choice, Executable]:
    """The fastest backend and variant that supports the graph, by stored figures or new ones.

    Figures are stored even after an interrupt: nothing is measured twice. Raises GraphError for a
    target other than this machine, NoBackendError as `choose` does.
    """
    if request.target.device is None:
        raise GraphError(
            f"tune: measures on this machine, {Target.here()}, and the target is {request.target}"
        )
    key, late = tuning_key(request), dict[str, tuple[Reason, ...]]()
    store = request.options.store
    by_name = {b.name: b for b in permitted_backends(request) or BACKENDS}
    figures = (store.load(key, read_figures) if store else None) or {}
    while True:
        choice = choose(request, late)
        able = [by_name[name] for name in (choice.backend.name, *choice.also)]
        contenders = {c.name: c for b in able for c in candidates(b, request)}
        missing = {name: c for name, c in contenders.items() if name not in figures}
        late |= measure(missing, request, key, figures)
        if not late.keys() & {b.name for b in able}:
            break
    ranked = sorted((n for n in contenders if n in figures), key=figures.__getitem__)
    for name in ranked:
        with suppress(RefusedError):  # a stored one may refuse now
            executable = contenders[name].lower(request)
            backend = contenders[name].backend
            work = cost(request.graph, request.target, precision=request.options.precision)
            also = tuple(b.name for b in able if b is not backend)
            text = explain_choice(figures, ranked, work.forward.achieved(figures[name]))
            return evolve(choice, backend=backend, cause=text, also=also), executable
    return choose_and_lower(request)


def candidates(backend: Backend, request: Request) -> Iterator[Candidate]:
    yield Candidate(backend)
    try:
        names = backend.variants(request.with_graph(backend.seen(request.graph)))
    except RefusedError:  # lowering raises it again, and then it is reported
        return
    yield from (Candidate(backend, name) for name in names)


def explain_choice(figures: Figures, ranked: Sequence[str], achieved: float | None) -> str:
    """The cause of a choice: all figures, the fastest first, and its share of the roofline."""
    text = ", ".join(f"{name} {format_scaled(figures[name], 's')}" for name in ranked)
    share = "" if achieved is None else f"; that is {100 * achieved:.3g} % of the roofline"
    return f"it was the fastest when measured here: {text}{share}"


# What is stored.


UNMEASURED = (  # options that change no backend's time
    *("workspace", "store", "tune", "variant", "avoid", "on_fallback", "resized"),
)


def tuning_key(request: Request) -> str:
    """The key of stored figures: everything they depend on, as a text."""
    text = {
        "form": FORM,
        "graph": str(request.graph),
        "target": str(request.target),
        "libraries": request.target.libraries,
        "machine": platform.node(),
        "threads": torch.get_num_threads(),
        **asdict(request.options, recurse=False, filter=lambda x, _: x.name not in UNMEASURED),
    }
    return f"tune {json.dumps(text, sort_keys=True)}"


def read_figures(data: bytes) -> Figures:
    """The figures in bytes stored by `measure`. Raises Unfit for anything else."""
    try:
        return {str(n): read_positive(seconds) for n, seconds in read_json(data).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise Unfit(f"it holds no figures: {error}") from error


# Measuring.


def measure(
    contenders: Mapping[str, Candidate],
    request: Request,
    key: str,
    figures: Figures,
) -> dict[str, tuple[Reason, ...]]:
    """Add the seconds of each candidate to the figures, and keep them, even when interrupted.

    Returns, by name, the reasons of backends refusing the graph only now.
    """
    if not contenders:
        return {}
    device = request.target.device
    assert device is not None  # `choose_fastest` raises otherwise
    tensors = examples(request.graph, device)
    with load_modules("rich.console").Console(stderr=True).status("tuning") as status:
        jobs, late = prepare_jobs(contenders, request, tensors, status.update)
        try:
            add_medians(figures, jobs, device=device, progress=status.update)
        finally:
            if request.options.store and figures:
                request.options.store.put(key, json.dumps(figures).encode())
    return late


def prepare_jobs(
    contenders: Mapping[str, Candidate],
    request: Request,
    tensors: Sequence[torch.Tensor],
    progress: Progress,
) -> tuple[dict[str, Job], dict[str, tuple[Reason, ...]]]:
    """A job for each candidate able to run here, and the reasons of the others.

    Some refuse only when they run. A variant that refuses is left out.
    """
    jobs: dict[str, Job] = {}
    late: dict[str, tuple[Reason, ...]] = {}
    for name, candidate in contenders.items():
        progress(f"{name}: building")
        try:
            executable = candidate.lower(request)
            executable.run(*tensors)
        except (RefusedError, torch.OutOfMemoryError) as error:
            if candidate.variant is None and isinstance(error, RefusedError):
                late[candidate.backend.name] = error.reasons
            elif candidate.variant is None:
                reasons = [Reason("memory", str(text), sentence="{limit}") for text in error.args]
                late[candidate.backend.name] = tuple(reasons)
            continue
        jobs[name] = lambda run=executable.run: run(*tensors)  # type: ignore[misc]  # bound now
    return jobs, late


def examples(graph: Graph, device: torch.device, *, drawn: bool = False) -> list[torch.Tensor]:
    """Tensors as the graph declares them, with typical values: full sequences of equal lengths, one
    segment, pages in order, half of all flags true, lse of scores near 0.

    drawn: sequences of other lengths, with gaps after them, several segments, pages as they come.
    """
    random = torch.Generator().manual_seed(0)
    sizes, most = {i.name: i.spec.shape for i in graph.inputs}, largest_integers(graph)
    lse = math.log(max(1, sizes["k"][2])) if "k" in sizes and "pages" not in sizes else 0.0
    tensors = [
        make_tensor(i, most.get(i.name, 3 * drawn), lse, random, drawn) for i in graph.inputs
    ]
    named = {i.name: x for i, x in zip(graph.inputs, tensors, strict=True)}
    for side, name in STARTS.items():
        if name in named and LENGTHS[side] in named:
            rows = named[name].diff()
            named[LENGTHS[side]].copy_(rows - rows // 4 * drawn)
    return [x.to(device) for x in tensors]


def largest_integers(graph: Graph) -> dict[str, int]:
    """The largest lengths, starts and numbers of pages, by name."""
    sizes = {i.name: i.spec.shape for i in graph.inputs}
    own = {"rows": sizes["q"], "keys": sizes["k"]} if "q" in sizes else {}
    most = {LENGTHS[side]: shape[-2] for side, shape in own.items()}
    most |= {STARTS[side]: shape[0] for side, shape in own.items()}
    if "pages" in sizes:
        (count, page, *_), (_, each) = sizes["k"], sizes["pages"]
        most |= {LENGTHS["keys"]: each * page, "pages": count - 1}
    return most


def make_tensor(
    x: Input, most: int, lse: float, random: torch.Generator, drawn: bool
) -> torch.Tensor:
    """A tensor of an input's spec: normal numbers, random flags, or integers rising from 0 to
    `most`; lengths are `most` unless drawn. An input named lse is `lse` everywhere."""
    spec = x.spec
    count = elements_spanned(spec)
    if spec.dtype == torch.bool:
        values = torch.rand(count, generator=random) < 0.5
    elif not spec.dtype.is_floating_point:
        least = most if x.name in LENGTHS.values() else 0
        even = torch.linspace(least, most, count, dtype=torch.float64)
        some = torch.randint(most + 1, (count,), generator=random).sort().values
        if x.name in STARTS.values():
            some[:1] = 0
        values = (some if drawn else even).to(spec.dtype)
    elif x.name.startswith("lse"):
        values = torch.full((count,), lse, dtype=spec.dtype)
    else:
        values = torch.randn(count, generator=random).to(spec.dtype)
    return values.as_strided(spec.shape, spec.strides)


def elements_spanned(spec: TensorSpec) -> int:
    """The number of memory elements from a tensor's first to its last."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
