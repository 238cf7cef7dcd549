"""The choice of a backend, with every other backend's reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar, final
from warnings import warn_explicit

from attrs import frozen

from attn_graph.errors import (
    NO_BACKEND,
    FallbackWarning,
    GraphError,
    NoBackendError,
    Reason,
    refusal_lines,
    show,
    user_frame,
)
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import keeps_weights
from attn_graph.lowering.backend import (
    UNKNOWN,
    UNPRICED,
    Backend,
    Executable,
    Price,
    RefusedError,
    no_device_test,
)
from attn_graph.lowering.request import Named, Options, Request
from attn_graph.machine.torch_switches import KernelName
from attn_graph.planner.cost import format_scaled
from attn_graph.rings import BACKENDS as HOMES
from attn_graph.rings import find, load, present_backends

T = TypeVar("T")
Refusals = tuple[tuple[str, tuple[Reason, ...]], ...]  # every reason against, by backend

BACKENDS: tuple[Backend, ...] = tuple(present_backends())
MATH = "math"

PREDICTED = "predicted to be the fastest"
BASIS = {"cpu": "on one thread", "cuda": "at best"}  # of prices, by kind of target
FIRST_ABLE = "first in the order of preference that supports the graph"
KEPT = "the only backend that keeps weights from pass to pass"

# The backends on GPUs behind each name of sdpa_kernel.
BY_KERNEL: Mapping[KernelName, tuple[str, ...]] = {
    "cudnn": ("cudnn", "torch_cudnn"),
    "flash": ("torch_flash",),
    "efficient": ("torch_efficient",),
    "math": (MATH,),
}


@final
@frozen
class Choice:
    """The chosen backend, the cause, and every other's reasons against the graph."""

    backend: Backend
    cause: str
    refusals: Refusals = ()
    also: tuple[str, ...] = ()

    @property
    def is_fallback(self) -> bool:
        """True if `math` was chosen because all the others refused, and there was at least one."""
        return self.backend.name == MATH and bool(self.refusals) and not self.also


def choose_and_lower(
    request: Request,
) -> tuple[Choice, Executable]:
    """The choice, and the lowered graph. Raises NoBackendError as `choose` does."""
    return first_that_succeeds(request, lambda b: lower_backend(b, request))


def first_that_succeeds(
    request: Request,
    attempt: Callable[[Backend], T],
) -> tuple[Choice, T]:
    """The first backend to support the graph and pass the attempt; and the attempt's result.

    The attempt may refuse too: the next backend is tried then. Raises NoBackendError as `choose`
    does.
    """
    late: dict[str, tuple[Reason, ...]] = {}
    while True:
        choice = choose(request, late)
        try:
            return choice, attempt(choice.backend)
        except RefusedError as error:
            late[choice.backend.name] = error.reasons


def lower_backend(backend: Backend, request: Request) -> Executable:
    """The lowered graph; of a backend with a self-check, after it on the device, if that is here.

    Raises RefusedError if the check fails.
    """
    lower = find("lower_checked") if is_checked(backend) else Backend.lowered
    executable: Executable = lower(backend, request)
    return executable


def known_reasons(backend: Backend, request: Request) -> tuple[Reason, ...]:
    """Every reason against a graph; without any, a known failure of its check on this device."""
    against = backend.reasons(request)
    if not against and is_checked(backend) and request.target.device is not None:
        against = find("failed_checks")(backend, request)
    return against


def is_checked(backend: Backend) -> bool:
    """True if some of the backend's kernels are tried on their device before their first use."""
    return backend.device_test is not no_device_test


def choose(
    request: Request,
    late: Mapping[str, tuple[Reason, ...]] = MappingProxyType({}),
) -> Choice:
    """The first backend, in order of preference, with no reason against the graph.

    late: reasons by backend, discovered while it was lowered. Raises NoBackendError with every
    backend's reasons if all refuse; warns or raises by on_fallback if only `math` is left.
    """
    among, prices = permitted_backends(request), dict[str, Price]()
    elsewhere = refuse_devices(BACKENDS if among is None else among, request)
    ordered: Sequence[Backend]
    if among is not None:
        if not among:
            names = ", ".join(b.name for b in BACKENDS)
            raise GraphError(f"backends= names none; there are {names}")
        ordered, cause = among, "first in backends="
    elif kernels := request.options.switches.order(request.target.kind, request.target.sm):
        ordered, cause = by_priority(kernels), "first in the order set by sdpa_kernel"
    else:
        prices = price_all(request, elsewhere)
        ordered = sorted(BACKENDS, key=lambda b: (prices[b.name].seconds, prices[b.name].traffic))
        cause = "first in the order of preference"
    early = {**elsewhere, **late}
    reasons = [(b, early.get(b.name) or known_reasons(b, request)) for b in ordered]
    able = [b for b, against in reasons if not against]
    refusals = tuple([(b.name, against) for b, against in reasons if against])
    if not able:
        raise NoBackendError(request.graph, refusals, refused_title(request))
    first = able[0]
    known = {name: price.seconds for name, price in prices.items() if price.seconds < UNKNOWN}
    priced = [b.name for b in able if b.name in known]
    if keeps_weights(request.graph):
        cause = KEPT
    elif len(able) == 1:
        limited = " allowed" if among is not None or request.options.avoid else ""
        cause = f"the only backend{limited} that supports the graph"
    elif len(priced) > 1:
        figures = ", ".join([f"{name} {format_rough(known[name])}" for name in priced])
        cause = f"{PREDICTED}, {BASIS[request.target.kind]}: {figures}"
    elif known or first is not ordered[0]:
        cause = FIRST_ABLE
    choice = Choice(first, cause, refusals, tuple([b.name for b in able[1:]]))
    if choice.is_fallback:
        report_fallback(request.graph, request.options, refusals)
    return choice


def refuse_devices(backends: Sequence[Backend], request: Request) -> dict[str, tuple[Reason, ...]]:
    """The reasons of backends for other devices, by name; those with one rule share its reason."""
    rules = {rule: rule(request.target) for rule in dict.fromkeys(b.no_device for b in backends)}
    absent = [(b, reason) for b in backends if (reason := rules[b.no_device]) is not None]
    return {b.name: (*b.unwanted(request.options), reason) for b, reason in absent}


def price_all(request: Request, elsewhere: Collection[str] = ()) -> dict[str, Price]:
    """The price of each of our backends, by name; none of those for other devices, `elsewhere`."""
    return {b.name: UNPRICED if b.name in elsewhere else b.price(request) for b in BACKENDS}


def refused_title(request: Request) -> str:
    """The title if all allowed backends refuse: it names the others able to run the graph."""
    among, avoid, free = (
        permitted_backends(request),
        request.options.avoid,
        request.with_options(avoid=()),
    )
    ordered = BACKENDS if among is None else among
    shut = [b for b in BACKENDS if b not in ordered or b.name in avoid]
    able = [b.name for b in shut if not known_reasons(b, free)]
    if not able:
        return NO_BACKEND
    if among is None:
        who = f"no backend besides those to avoid, {', '.join(avoid)},"
    else:
        who = f"none of the backends allowed, {', '.join(b.name for b in among)},"
    return f"{who} supports this graph; {' and '.join(able)} {'does' if len(able) == 1 else 'do'}"


def format_rough(seconds: float) -> str:
    """Predicted seconds to two digits: "1.3 ms"."""
    return format_scaled(float(f"{seconds:.2g}"), "s")


def report_fallback(graph: Graph, options: Options, refusals: Refusals) -> None:
    """Warn, at the line outside this package, or raise, as `on_fallback` sets."""
    title = "no fused backend supports this graph; `math` does"
    if options.on_fallback == "raise":
        raise NoBackendError(graph, refusals, f'{title}, and on_fallback is "raise"')
    if options.on_fallback == "warn":
        lines = "\n".join(refusal_lines(refusals))
        warn_explicit(f"{title} and will run it\n{lines}", FallbackWarning, *user_frame())


def by_priority(order: Sequence[KernelName]) -> tuple[Backend, ...]:
    """Backends with PyTorch's kernels in this order, cuDNN's own plans before PyTorch's of cuDNN.

    Backends outside PyTorch come after them, but before `math` if `math` is last.
    """
    by_name = {backend.name: backend for backend in BACKENDS}
    ranked = [by_name[n] for kernel in order for n in BY_KERNEL[kernel] if n in by_name]
    behind = len(ranked) - (order[-1] == "math")
    others = [backend for backend in BACKENDS if backend not in ranked]
    return (*ranked[:behind], *others, *ranked[behind:])


def permitted_backends(request: Request) -> tuple[Backend, ...] | None:
    """The backends allowed by a request, as records; None: all. Raises GraphError for an unknown
    name."""
    return None if request.among is None else resolve_backends(request.among)


def resolve_backends(backends: Sequence[str | Named]) -> tuple[Backend, ...]:
    """Backends by name or by value. Raises GraphError for an unknown name."""
    given = [b for b in backends if isinstance(b, str | Backend)]
    if strangers := [b for b in backends if not isinstance(b, str | Backend)]:
        names = ", ".join(b.name for b in BACKENDS)
        raise GraphError(
            f"{show(strangers[0])} is not a Backend, nor the name of one; there are {names}"
        )
    known = {b.name: b for b in BACKENDS}
    if unknown := [b for b in given if isinstance(b, str) and b not in known]:
        for name in HOMES.keys() & {*unknown}:
            load(HOMES[name][0], f"the backend {name}")  # which says that its ring is missing
        raise GraphError(
            f"no backend is named {', '.join(map(repr, unknown))}; there are {', '.join(known)}"
        )
    return tuple(known[b] if isinstance(b, str) else b for b in given)
