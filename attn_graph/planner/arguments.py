"""The arguments of `compile` and `explain`: read by name or as a value, and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_args

import torch

from attn_graph.errors import ArgumentError, GraphError, show
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.request import Fallback
from attn_graph.machine.sizes import parse_bytes
from attn_graph.machine.store import Store, default_store
from attn_graph.machine.target import Target, default_target
from attn_graph.machine.torch_switches import Precision, Switches
from attn_graph.machine.workspace import Workspace, default_workspace
from attn_graph.printing import words
from attn_graph.rings import find, load_present

# Modules for planning on GPUs, beyond those of every first plan; these import the rest.
FOR_GPUS = (
    "lowering.libraries.cudnn_limits",
    "lowering.cudnn.memory",
    "lowering.cudnn.plan",
    "lowering.libraries.fa4_limits",
    "lowering.fa4.lists",
    "lowering.fa4.offline",
    "lowering.fa4.run",
    "lowering.triton.plan",
    "measuring.device_test",
)
Backends = tuple[str | Backend, ...]
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])
Switch = Literal[True, False]


class ChoiceOptions(TypedDict, total=False):
    """The options of `compile` that choose a backend; functions of tensors have them too."""

    backends: Sequence[str | Backend] | None
    avoid: Sequence[str | Backend]
    deterministic: bool
    precision: Precision | None
    on_fallback: Fallback
    max_workspace: int | str | None
    batch_invariant: bool


class CompileOptions(ChoiceOptions, total=False):
    """The options of `compile`."""

    target: Target | str | None
    workspace: Workspace | None
    store: Store | str | os.PathLike[str] | bool
    tune: bool


CHOICE: ChoiceOptions = {
    "backends": None,
    "avoid": (),
    "deterministic": False,
    "precision": None,
    "on_fallback": "ignore",
    "max_workspace": None,
    "batch_invariant": False,
}
DEFAULTS: CompileOptions = {
    "target": None,
    **CHOICE,
    "workspace": None,
    "store": True,
    "tune": False,
}


def shows(options: Mapping[str, object]) -> Callable[[Function], Function]:
    """A decorator: a function's signature lists these options of `compile`, with their defaults, in
    place of `**options: Unpack[...]`, or before other keywords."""

    def sign(function: Function) -> Function:
        own, types = signature(function), CompileOptions.__annotations__
        *named, rest = own.parameters.values()
        more = [
            Parameter(n, Parameter.KEYWORD_ONLY, default=x, annotation=types[n].__forward_arg__)
            for n, x in options.items()
        ]
        last = () if rest.annotation.startswith("Unpack") else (rest,)
        function.__signature__ = own.replace(parameters=[*named, *more, *last])  # type: ignore[attr-defined]  # of any function
        return function

    return sign


def constraints(
    target: Target,
    switches: Switches,
    given: Mapping[str, Any],  # Any: as CompileOptions has them
) -> dict[str, Any]:  # Any: fields of Options
    """The options that limit the choice of a backend, PyTorch's switches among them."""
    precision, most = given["precision"], given["max_workspace"]
    if precision is None:
        precision = switches.precision(target.kind)
    return {
        "deterministic": one_of("deterministic", given["deterministic"], Switch)
        or switches.deterministic,
        "batch_invariant": one_of("batch_invariant", given["batch_invariant"], Switch),
        "max_workspace": None if most is None else parse_bytes(most),
        "precision": one_of("precision", precision, Precision),
        "avoid": backend_names(given["avoid"]),
        "switches": switches,
    }


def complete(
    function: Callable[..., object], usual: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, Any]:  # Any: as the TypedDict of `usual` has them
    """The options of a call, with defaults. Raises ArgumentError for a name without one."""
    if not given.keys() <= usual.keys():
        raise unknown_option(function, {n: x for n, x in given.items() if n not in usual})
    return {**usual, **given}


def unknown_option(
    function: Callable[..., object],
    given: Mapping[str, object],
) -> ArgumentError:
    """The error for options that a function lacks. given: their values by name."""
    (name, value), *_ = given.items()
    own = signature(function).parameters
    return ArgumentError(words.option_message(function.__name__, own, DEFAULTS, name, value))


def require_absent(name: str, value: object, kind: str) -> None:
    """Raise GraphError for an argument that only another kind of graph has."""
    if value is not None:
        raise GraphError(f"{name} is for {kind}, and this is none; leave {name}= out")


def as_tuple(name: str, backends: Sequence[str | Backend]) -> Backends:
    """Several backends as a tuple. Raises GraphError for a single one, or for none."""
    if isinstance(backends, str | Backend) or not isinstance(backends, Iterable):
        raise GraphError(
            f"{name}={show(backends)} is not a sequence of backends; write ({show(backends)},)"
        )
    return tuple(backends)


def resolve_workspace(workspace: Workspace | None) -> Workspace:
    """The workspace, by default the shared one. Raises GraphError for other values."""
    if workspace is not None and not isinstance(workspace, Workspace):
        raise GraphError(
            f"workspace {show(workspace)} is not a Workspace; bytes are for max_workspace"
        )
    return workspace or default_workspace()


def resolve_target(target: Target | str | None) -> Target:
    """A target by itself or by name; by default the current device of this machine, or the GPU that
    it emulates."""
    if target is None:
        target = default_target()
    elif isinstance(target, str):
        target = Target.of(target)
    elif not isinstance(target, Target):
        way_out = ""
        if isinstance(target, torch.device):
            way_out = f'; write target="{target.type}", or Target.here("{target}") for this machine'
        raise GraphError(f"target {show(target)} is not a Target, nor the name of one{way_out}")
    if target.kind != "cpu" or target.interprets:
        load_present(*FOR_GPUS)
    return target


def resolve_store(store: Store | str | os.PathLike[str] | bool) -> Store | None:
    """The default store, the user's own, one in a folder, or None."""
    if isinstance(store, bool):
        return default_store() if store else None
    if isinstance(store, Store):
        return store
    if not isinstance(store, (str, os.PathLike)) or not os.fspath(store):
        raise GraphError(f"store {show(store)} is not a folder, a Store, True or False")
    return Store(Path(store))


def one_of(name: str, value: Value, values: object) -> Value:
    """The value, if a literal type lists it. Raises GraphError otherwise."""
    known = get_args(values)
    if not isinstance(value, Hashable) or value not in {*known}:
        raise GraphError(
            f"{name} {show(value)} is not known; known are {', '.join(map(repr, known))}"
        )
    return value


def backend_names(backends: Sequence[str | Backend]) -> tuple[str, ...]:
    """The names of backends, each once and sorted. Raises GraphError for an unknown one."""
    if not backends:
        return ()
    return tuple(sorted({backend.name for backend in find("resolve_backends")(backends)}))
