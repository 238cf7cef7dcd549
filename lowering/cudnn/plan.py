"""cuDNN's plans: built once for a call, a device and the versions of both libraries, and stored."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from attrs import Factory, asdict, field, frozen

from attn_graph.errors import Reason
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.cudnn.graph import CudnnCall
from attn_graph.lowering.cudnn.offline import (
    ask_cudnn,
    check_frontend,
    describe_target,
    parse_versions,
)
from attn_graph.lowering.cudnn.run import Engine, handle
from attn_graph.lowering.request import Options
from attn_graph.machine.imports import load_modules
from attn_graph.machine.store import Unfit, read_json
from attn_graph.machine.target import Target, Version

LOG = logging.getLogger("attn_graph")
FORM = 3  # of the stored bytes; a new number makes all older files misses
READ_BY_CUDNN = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"  # the only variable to change its plans

# Device properties compared by cuDNN before it loads a plan. Each was tried alone under 9.20 and
# 9.28; the latter compares two more. A plan serves every device with equal properties. 9.26
# compares fewer, so it would serve others too.
COMPARED = (
    "deviceVer",
    "driverVer",
    "multiProcessorCount",
    "maxGridSize",
    "maxBlockSize",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "regsPerBlock",
    "maxRegistersPerSM",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "reservedSharedMemoryPerBlock",
)
COMPARED_LATER = ("memoryBusWidth", "smCountOrigin")
LATER = (9, 25, 0)


def as_pairs(lists: Iterable[Sequence[Any]]) -> tuple[Any, ...]:  # Any: from JSON
    return tuple(map(tuple, lists))


@final
@frozen
class CudnnPlan:
    """A plan built by cuDNN, with cuDNN's report on it.

    Named as in `builder.describe_plan`. plans: the names of all proposed plans. engine, knobs,
    notes: the chosen kernel, in cuDNN's terms. workspace: bytes. seconds: of building. data: the
    plan as cuDNN reads it back. execute: runs it.
    """

    plans: tuple[str, ...] = field(converter=tuple)
    engine: str
    knobs: tuple[tuple[str, int], ...] = field(converter=as_pairs)
    notes: tuple[str, ...] = field(converter=tuple)
    workspace: int
    seconds: float = field(eq=False)
    data: bytes = field(repr=False)
    execute: Engine = field(
        init=False, eq=False, repr=False, default=Factory(lambda x: Engine(x.data), takes_self=True)
    )

    @property
    def stored(self) -> bytes:
        """The bytes to store: a line of JSON, then the plan."""
        report = asdict(self, filter=lambda part, _: part.init and part.name != "data")
        return json.dumps(report).encode() + b"\n" + self.data

    @classmethod
    def load(cls, data: bytes) -> CudnnPlan:
        """Read a stored plan. Raises Unfit for other bytes."""
        report, _, plan = data.partition(b"\n")
        try:
            return cls(**read_json(report), data=plan)
        except (ValueError, TypeError) as error:
            raise Unfit(f"it holds no plan of cuDNN's: {error}") from error

    def __str__(self) -> str:
        knobs = "".join(f", {name} = {value}" for name, value in self.knobs)
        return f"{self.engine}{knobs}: {self.workspace:,} bytes of workspace"


def load_or_build(
    call: CudnnCall, target: Target, versions: tuple[Version, Version], options: Options
) -> CudnnPlan:
    """The plan of a call for a target: from the store, else built now and stored.

    versions: the target's cuDNN and frontend. Raises RefusedError if cuDNN refuses the call, or if
    it cannot run here.
    """
    stored = load_stored(call, target, versions, options)
    if stored is not None:
        return stored
    check_frontend()
    device, plan = describe_device(target), options.variant
    if is_here(target):
        check_versions(parse_versions(cudnn_builder.library_versions()), versions)
        built = build_here(call, plan)
    else:
        built = build_away(call, device, target.sm, versions, plan)
    if options.store:
        options.store.put(plan_key(call, device, versions, plan), built.stored)
    return built


def load_stored(
    call: CudnnCall, target: Target, versions: tuple[Version, Version], options: Options
) -> CudnnPlan | None:
    """The plan from the store; None if there is none, or if cuDNN does not load it here."""
    if options.store is None:
        return None
    key = plan_key(call, describe_device(target), versions, options.variant)
    plan = options.store.load(key, CudnnPlan.load)
    return plan if plan is not None and (not is_here(target) or loads(plan)) else None


def loads(plan: CudnnPlan) -> bool:
    """True if cuDNN loads a stored plan on the machine's own GPU; a failure is logged."""
    cudnn = load_modules("cudnn")

    try:
        plan.execute.load(torch.cuda.current_device())
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        LOG.warning("a stored plan of cuDNN's is not used: %s", error)
        return False
    return True


def is_here(target: Target) -> bool:
    return target.kind == "cuda" and target.device is not None


def describe_device(target: Target) -> str:
    """The target's device as cuDNN describes it, in JSON."""
    return describe_own_gpu() if is_here(target) else describe_target(target)


def plan_key(
    call: CudnnCall, device: str, versions: tuple[Version, Version], plan: str | None = None
) -> str:
    """The key of a plan in the store: all inputs of the plan, as text."""
    facts = {
        "form": FORM,
        "call": call.plain,
        "device": compared_properties(device, versions[0]),
        "versions": versions,
        "plan": plan,
        READ_BY_CUDNN: os.environ.get(READ_BY_CUDNN),
    }
    return f"cudnn {json.dumps(facts, sort_keys=True)}"


def compared_properties(device: str, cudnn: Version) -> dict[str, Any]:  # Any: JSON
    """The properties compared by a version of cuDNN, out of a device's description."""
    properties = json.loads(device)
    names = COMPARED if cudnn < LATER else COMPARED + COMPARED_LATER
    return {name: properties.get(name) for name in names}


def describe_own_gpu() -> str:
    """The machine's own GPU as cuDNN describes it, in JSON."""
    check_frontend()
    cudnn = load_modules("cudnn")

    return str(cudnn.create_device_properties(torch.cuda.current_device()).serialize())


def build_here(call: CudnnCall, plan: str | None) -> CudnnPlan:
    """Build for the machine's own GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    start = time.perf_counter()
    try:
        graph = cudnn_builder.build_graph(call.plain, plan=plan, handle=handle(device))
    except cudnn_builder.DeclinedError as error:
        raise gap_reason(str(error)) from error
    seconds = time.perf_counter() - start
    report: dict[str, Any] = cudnn_builder.describe_plan(graph, plan)
    return CudnnPlan(**report, seconds=seconds, data=bytes(graph.serialize()))


def build_away(
    call: CudnnCall,
    device: str,
    sm: int,
    versions: tuple[Version, Version],
    plan: str | None = None,
) -> CudnnPlan:
    """Build for a GPU absent from the machine."""
    loaded, (answer,) = ask_cudnn([call.plain], device, sm, plan=plan)
    check_versions(loaded, versions)
    if answer.refusal:
        raise gap_reason(answer.refusal)
    return CudnnPlan(**answer.report, data=answer.plan)


def check_versions(loaded: tuple[Version, Version], planned: tuple[Version, Version]) -> None:
    """Raises RefusedError if the plan is for another cuDNN or frontend than the loaded one."""
    if loaded != planned:
        here, there = (tuple(map(format_version, pair)) for pair in (loaded, planned))
        limit = f"plans with cuDNN {here[0]} and frontend {here[1]} here"
        actual = f"the target has {there[0]} and {there[1]}"
        raise RefusedError(Reason("loaded_versions", limit, actual))


def format_version(version: Version) -> str:
    """(9, 20, 0) -> "9.20.0"."""
    return ".".join(map(str, version))


def gap_reason(refusal: str) -> RefusedError:
    """cuDNN's refusal of a call allowed by the table of limits: the table has a gap.

    It is logged, since users should report it.
    """
    LOG.warning("cuDNN declined a graph that attn_graph took it for able to run: %s", refusal)
    limit = "said itself, where no limit was known"
    return RefusedError(Reason("unknown_limit", limit, f"at {refusal}", "{limit}, {actual}"))
