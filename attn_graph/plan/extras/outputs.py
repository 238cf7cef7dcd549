"""Results written into the caller's tensors: `plan(q, k, v, out=o)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import increment_version

from attn_graph.errors import GraphError, PlanMismatchError, show
from attn_graph.ir.layouts import output_specs
from attn_graph.ir.transforms.vjp import output_names
from attn_graph.lowering.backend import Write
from attn_graph.machine.ambient import has_tangent, require_untraced
from attn_graph.machine.likeness import NESTED, look_at
from attn_graph.machine.overlap import find_overlap, overlaps_itself
from attn_graph.machine.tensors import (
    ROOM,
    as_it_lies,
    is_distributed,
    read_arrays,
    require_as_declared,
)
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from attn_graph.plan import Out, Plan

Tensors = tuple[torch.Tensor, ...]


def write_outputs(
    plan: Plan, tensors: Tensors, named: Mapping[str, torch.Tensor], out: Out,
    write: Write | None = None,
) -> torch.Tensor | Tensors:  # fmt: skip
    """Run a plan, leave its results in `out`, and return these. write: of its executable, where
    some inputs are known; None without.

    Raises GraphError for recorded, traced and transformed calls, PlanMismatchError for tensors
    other than the results, or in memory of others.
    """
    if "out" in plan.names:  # an input
        return plan(*plan.arranged(tensors, {**named, "out": out}))  # type: ignore[dict-item]
    require_untraced()
    if named or len(tensors) != plan.count:
        tensors = plan.arranged(tensors, named)
    rooms, tensors = list_rooms(plan, out), read_arrays(tensors)
    wants = admit(plan, tensors)
    require_rooms(plan, rooms, tensors)
    refuse_derivatives(wants, tensors, rooms)
    refuse_inference(rooms)
    require_apart(plan, rooms, tensors)
    if profiler._is_profiler_enabled:
        with plan.named_in_profiles("forward"):
            fill_rooms(plan, rooms, tensors, write)
    else:
        fill_rooms(plan, rooms, tensors, write)
    return rooms[0] if plan.single else rooms


def fill_rooms(plan: Plan, rooms: Tensors, tensors: Tensors, write: Write | None) -> None:
    with torch.no_grad():
        made = write(rooms, *tensors) if write else plan.executable.place(rooms, tensors)
        for room, x in zip(rooms, made, strict=True):
            if room.data_ptr() != x.data_ptr():
                room.copy_(x)
    increment_version(rooms)  # kernels write without PyTorch


def list_rooms(plan: Plan, out: object) -> Tensors:
    """The tensors of `out`. Raises PlanMismatchError unless they are as many as results."""
    given = tuple(out) if isinstance(out, Sequence) and not plan.single else (out,)
    rooms = read_arrays(given)
    if len(rooms) != len(plan.graph.outputs):
        names = ", ".join(output_names(plan.graph))
        raise PlanMismatchError(
            f"out: expected a tuple of {len(plan.graph.outputs)} tensors ({names}), got {show(out)}"
        )
    return rooms


def admit(plan: Plan, tensors: Tensors) -> bool:
    """True if one of the tensors requires grad. Raises the errors of a call."""
    check, wants = plan.memo.call
    if True in map(getattr, tensors, *NESTED) or not check(*tensors):
        return plan.admit(tensors)
    return wants


def refuse_derivatives(wants: bool, tensors: Tensors, rooms: Tensors) -> None:
    """Raise GraphError if autograd would record the call, or forward mode push tangents."""
    if torch.is_grad_enabled() and (wants or any(room.requires_grad for room in rooms)):
        raise GraphError(
            "out= has no gradient, and a tensor of the call requires grad; call within "
            "torch.no_grad(), pass detached tensors, or leave out= out"
        )
    if forward_ad._current_level >= 0 and has_tangent((*tensors, *rooms)):
        raise GraphError("out= has no tangent, and a tensor of the call has one; leave out= out")


def refuse_inference(rooms: Tensors) -> None:
    """Raise GraphError for tensors of inference mode, which PyTorch lets nobody change outside."""
    if not torch.is_inference_mode_enabled() and any(room.is_inference() for room in rooms):
        raise GraphError(
            "out= is a tensor made in torch.inference_mode(), and the call runs outside it; call "
            "within it, or pass out.clone()"
        )


def require_rooms(plan: Plan, rooms: Tensors, tensors: Tensors) -> None:
    """Raise PlanMismatchError unless rooms are as the results. They are remembered."""
    graph, sizes = plan.graph, plan.sizes_of(tensors)
    looks: list[object] = [*sizes.values(), *map(look_at, rooms)]
    if looks == plan.memo.rooms and not any(map(is_distributed, rooms)):
        return
    due = [spec.bind(sizes) for spec in output_specs(graph)]
    if graph.is_gradient:  # gradients may lie in any way
        due = [as_it_lies(*pair) for pair in zip(due, rooms, strict=True)]
    names = [f"{ROOM}{name}" for name in output_names(graph)]
    specs, named = dict(zip(names, due, strict=True)), dict(zip(names, rooms, strict=True))
    first = {i.name: i.spec for i in graph.inputs[:1]}
    given = dict(zip(first, tensors, strict=False))
    beside = {name: TensorSpec.like(x) for name, x in given.items()}
    require_as_declared(given | named, beside | specs, plan.target)
    texts = [
        f"{name}: expected elements apart from each other, got strides {x.stride()}; pass memory "
        "with a place for each"
        for name, x in named.items()
        if overlaps_itself(x)
    ]
    if texts:
        raise PlanMismatchError(*texts, way_out="")
    plan.memo.rooms = looks


def require_apart(plan: Plan, rooms: Tensors, tensors: Tensors) -> None:
    """Raise PlanMismatchError if a result would be written over an input, or over another."""
    if (pair := find_overlap(rooms, tensors)) is not None:
        n, m = pair
        names = [*plan.names, *(f"out {name}" for name in output_names(plan.graph))]
        raise PlanMismatchError(
            f"{names[len(tensors) + n]}: expected memory of its own, got some of {names[m]}'s; "
            "pass another tensor",
            way_out="",
        )
