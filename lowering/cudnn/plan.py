"""cuDNN's plans: built once for a call, a device and the versions of both libraries, and kept."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, final

import torch
from attrs import Factory, field, frozen

from attn_graph.backend import Options, RefusedError
from attn_graph.errors import Reason
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.cudnn.case import Version
from attn_graph.lowering.cudnn.graph import CudnnCall
from attn_graph.lowering.cudnn.offline import ask_cudnn, check_frontend, description, parse_versions
from attn_graph.lowering.cudnn.run import Engine, handle
from attn_graph.machine.store import Unfit
from attn_graph.machine.target import Target

LOG = logging.getLogger("attn_graph")
FORM = 3  # of what is stored; another number makes misses of what was stored before
READ_BY_CUDNN = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"  # the one variable that changes its plans

# Of a device, what cuDNN compares before it takes a plan back: 9.20 was asked field by field, and
# 9.28, which compares two more. So a plan serves every device that has these in common.
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


@final
@frozen
class Built:
    """A plan that cuDNN built, with what it told of it.

    plans: all that cuDNN proposed, by its names for them. engine, knobs: which of its kernels, in
    its own terms. workspace: bytes. seconds: it took to build. data: the plan as cuDNN reads it
    back. execute: runs it.
    """

    plans: tuple[str, ...]
    engine: str
    knobs: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    workspace: int
    seconds: float = field(eq=False)
    data: bytes = field(repr=False)
    execute: Engine = field(
        init=False, eq=False, repr=False, default=Factory(lambda x: Engine(x.data), takes_self=True)
    )

    @classmethod
    def of(cls, told: Mapping[str, Any], data: bytes) -> Built:  # Any: JSON
        knobs = tuple((name, value) for name, value in told["knobs"])
        lists = tuple(told["plans"]), tuple(told["notes"])
        return cls(
            lists[0], told["engine"], knobs, lists[1], told["workspace"], told["seconds"], data
        )

    @property
    def packed(self) -> bytes:
        """A line of JSON, then the plan."""
        told = {
            "plans": self.plans,
            "engine": self.engine,
            "knobs": self.knobs,
            "notes": self.notes,
            "workspace": self.workspace,
            "seconds": self.seconds,
        }
        return json.dumps(told).encode() + b"\n" + self.data

    @classmethod
    def unpacked(cls, data: bytes) -> Built:
        """The plan that was packed. Raises Unfit for other bytes."""
        told, _, plan = data.partition(b"\n")
        try:
            return cls.of(json.loads(told), plan)
        except (ValueError, TypeError, LookupError) as error:
            raise Unfit(f"it holds no plan of cuDNN's: {error}") from error

    def __str__(self) -> str:
        knobs = "".join(f", {name} = {value}" for name, value in self.knobs)
        return f"{self.engine}{knobs}: {self.workspace} bytes of workspace"


def load_or_build(
    call: CudnnCall, target: Target, versions: tuple[Version, Version], options: Options
) -> Built:
    """The plan of a call for a target: from the store, or else built now, and stored.

    versions: those of cuDNN and of its frontend that the target has. Raises RefusedError where
    cuDNN takes the call no further, and where there is no way to ask it.
    """
    kept = load_stored(call, target, versions, options)
    if kept is not None:
        return kept
    check_frontend()
    device, plan = describe_device(target), options.variant
    if is_here(target):
        check_versions(parse_versions(cudnn_builder.library_versions()), versions)
        found = build_here(call, plan)
    else:
        found = build_away(call, device, target.sm, versions, plan)
    if options.store:
        options.store.put(plan_key(call, device, versions, plan), found.packed)
    return found


def load_stored(
    call: CudnnCall, target: Target, versions: tuple[Version, Version], options: Options
) -> Built | None:
    """The plan, if the store has it, and if cuDNN loads it where it is to run."""
    if options.store is None:
        return None
    key = plan_key(call, describe_device(target), versions, options.variant)
    kept = options.store.load(key, Built.unpacked)
    return kept if kept is not None and (not is_here(target) or loads(kept)) else None


def loads(built: Built) -> bool:
    """Whether cuDNN takes a stored plan back on the machine's own GPU."""
    import cudnn

    try:
        built.execute.load(torch.cuda.current_device())
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        LOG.warning("a stored plan of cuDNN's is not used: %s", error)
        return False
    return True


def is_here(target: Target) -> bool:
    return target.kind == "cuda" and target.device is not None


def describe_device(target: Target) -> str:
    """The device as cuDNN reads of it."""
    return present() if is_here(target) else description(target)


def plan_key(
    call: CudnnCall, device: str, versions: tuple[Version, Version], plan: str | None = None
) -> str:
    """All that a plan depends on, as a text."""
    told = {
        "form": FORM,
        "call": call.plain,
        "device": compared_properties(device, versions[0]),
        "versions": versions,
        "plan": plan,
        READ_BY_CUDNN: os.environ.get(READ_BY_CUDNN),
    }
    return f"cudnn {json.dumps(told, sort_keys=True)}"


def compared_properties(device: str, cudnn: Version) -> dict[str, Any]:  # Any: JSON
    """What a version of cuDNN compares of a device, out of its description."""
    properties = json.loads(device)
    names = COMPARED if cudnn < LATER else COMPARED + COMPARED_LATER
    return {name: properties.get(name) for name in names}


def present() -> str:
    """The machine's own GPU as cuDNN describes it, in JSON."""
    check_frontend()
    import cudnn

    return str(cudnn.create_device_properties(torch.cuda.current_device()).serialize())


def build_here(call: CudnnCall, plan: str | None) -> Built:
    """Build for the machine's own GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    start = time.perf_counter()
    try:
        graph = cudnn_builder.build_graph(call.plain, plan=plan, handle=handle(device))
    except cudnn_builder.Declined as error:
        raise gap_reason(str(error)) from error
    seconds = time.perf_counter() - start
    told = cudnn_builder.describe_plan(graph, plan) | {"seconds": seconds}
    return Built.of(told, bytes(graph.serialize()))


def build_away(
    call: CudnnCall,
    device: str,
    sm: int,
    versions: tuple[Version, Version],
    plan: str | None = None,
) -> Built:
    """Build for a GPU that is not there."""
    found, (answer,) = ask_cudnn([call.plain], device, sm, plan=plan)
    check_versions(found, versions)
    if answer.refusal:
        raise gap_reason(answer.refusal)
    return Built.of(answer.told, answer.plan)


def check_versions(found: tuple[Version, Version], due: tuple[Version, Version]) -> None:
    """Raises RefusedError where cuDNN or its frontend are loaded in another version than said."""
    if found != due:
        here, there = (tuple(map(format_version, pair)) for pair in (found, due))
        limit = f"plans with cuDNN {here[0]} and frontend {here[1]} here"
        actual = f"the target has {there[0]} and {there[1]}"
        raise RefusedError(Reason("loaded_versions", limit, actual))


def format_version(version: Version) -> str:
    return ".".join(map(str, version))


def gap_reason(said: str) -> RefusedError:
    """The reason where cuDNN takes no call that the table of limits let pass: a gap of the table.

    It is logged, for it should be reported.
    """
    LOG.warning("cuDNN declined a graph that attn_graph took it for able to run: %s", said)
    limit = "said itself, where no limit was known"
    return RefusedError(Reason("unknown_limit", limit, f"at {said}", "{limit}, {actual}"))
