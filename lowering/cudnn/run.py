"""cuDNN's plans at work: a handle for each thread and device, tensors by number, the workspace."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from attrs import define, field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.graph import Graph
from attn_graph.ir.packed import LEAVES, and_parts
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.cudnn.graph import CudnnCall, Slot
from attn_graph.lowering.problem import (
    ALIGNED,
    Problem,
    cotangent_bytes,
    cotangent_note,
    find_misplaced,
    on_boundary,
    select_outputs,
)
from attn_graph.lowering.rooms import NO_ROOMS, Rooms, require_aligned, room_or_new
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.device_memo import DeviceMemo, copy_to
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.workspace import Buffer, Scratch, Workspace
from attn_graph.spec import INF, NAMES, TensorSpec

LOG = logging.getLogger("attn_graph")
Pack = Mapping[int, torch.Tensor]
Execute = Callable[[Pack, torch.Tensor | None, torch.device], None]
# Read packed by cuDNN, regardless of given strides: vectors of few numbers, and lse, perhaps saved
# in another layout by another backend.
PACKED = {
    "q_lengths": torch.int32,
    "kv_lengths": torch.int32,
    "sinks": torch.float32,
    "lse": torch.float32,
}
OURS = {"lse": slice(0, 3), "dsinks": slice(1, 2)}  # our axes of cuDNN's results


class Handles(threading.local):
    """Each thread's handles, by device: cuDNN's are not for sharing."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}


HANDLES = Handles()


def handle(device: torch.device) -> Any:  # Any: cuDNN's
    """The calling thread's handle on a device, set to the current stream."""
    import cudnn

    own = HANDLES.held.get(device.index)
    if own is None:
        with torch.cuda.device(device):
            own = HANDLES.held[device.index] = cudnn.create_handle()
        same = cudnn.Handle(own.backend_handle)
        weakref.finalize(own, cudnn.destroy_handle, same).atexit = False  # when its thread ends
    cudnn.set_stream(handle=own, stream=torch.cuda.current_stream(device).cuda_stream)
    return own


@final
@frozen(eq=False)
class Engine:
    """A plan of cuDNN's, and its graphs on the devices loaded so far."""

    plan: bytes
    graphs: DeviceMemo[Any] = field(factory=DeviceMemo, init=False)  # Any: cuDNN's

    def __call__(self, pack: Pack, workspace: torch.Tensor | None, device: torch.device) -> None:
        elsewhere = torch.cuda.current_device() != device.index
        with torch.cuda.device(device) if elsewhere else nullcontext():
            self.load(device.index).execute(pack, workspace, handle=handle(device))

    def load(self, index: int) -> Any:  # Any: cuDNN's graph
        """Load the plan for a device of this machine. Nothing runs, on no stream."""
        return self.graphs.get(index, lambda: cudnn_builder.load_plan(self.plan, index))


@final
@frozen(eq=False)
class Run:
    """Runs a graph: passes the call's tensors, and new ones, to cuDNN.

    spots: the graph's input for each tensor of the call; None for tensors to make or perhaps to
    copy. packs: the graph's inputs of the latter, by their place in the call. blanks: shape,
    strides and dtype of each result, as returned. sums: results cuDNN may add to. rows: the graph's
    inputs for do and lse, if a query may see no key. keys: its inputs for k, v and their lengths,
    if given.
    """

    call: CudnnCall
    problem: Problem
    graph: Graph
    workspace: Workspace
    scratch: Scratch
    execute: Execute
    spots: tuple[int | None, ...]
    packs: Mapping[int, int]
    blanks: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    sums: tuple[int, ...]
    rows: tuple[int, int] | None = None
    keys: tuple[int, int, int] | None = None
    sizes: DeviceMemo[torch.Tensor] = field(factory=DeviceMemo, init=False)

    @classmethod
    def of(
        cls,
        call: CudnnCall,
        problem: Problem,
        graph: Graph,
        workspace: Workspace,
        need: int,
        execute: Execute,
    ) -> Run:
        """need: bytes of workspace."""
        scratch = Scratch({"workspace": Buffer((need,), torch.uint8)} if need else {})
        spots = call_arguments(problem, graph)
        direct = (None if x.source in PACKED else spots.get(x.source) for x in call.inputs)
        packs = {n: spots[x.source] for n, x in enumerate(call.inputs) if x.source in PACKED}
        blanks = tuple(map(blank, call.outputs))
        sums = tuple(n for n, x in enumerate(call.outputs) if x.source == "dsinks")
        rows = (spots["do"], spots["lse"]) if clears(problem) else None
        keys = (spots["k"], spots["v"], spots["kv_lengths"]) if ends_keys(problem) else None
        return cls(
            call, problem, graph, workspace, scratch, execute, tuple(direct), packs, blanks, sums,
            rows, keys,
        )  # fmt: skip

    def forward(
        self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """o, and lse if it is stored."""
        made = self.run(tensors, rooms)
        results = {x.source: t for x, t in zip(self.call.outputs, made, strict=True)}
        return [results[name] for name in self.graph.result_names], made

    def backward(
        self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The wanted gradients of the operands, o, lse and the cotangents."""
        assert self.problem.grad is not None
        clean = tensors if self.rows is None else self.cleared(tensors, *self.rows)
        results = self.run(clean, rooms)
        by_source = {x.source: t for x, t in zip(self.call.outputs, results, strict=True)}
        cast_sinks(by_source, self.problem)
        return select_outputs(self.graph, [by_source[name] for name in self.problem.grad.names]), ()

    def cleared(self, tensors: Sequence[torch.Tensor], do: int, lse: int) -> list[torch.Tensor]:
        """The tensors, with do copied and 0, and lse +inf, in rows without keys: for every score,
        exp(s - lse) is 0 then."""
        clean, blind = [*tensors], tensors[lse] == -INF
        slot = next(x for x in self.call.inputs if x.source == "do")
        copy = torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device=blind.device)
        clean[do] = copy.copy_(tensors[do]).masked_fill_(blind[..., None], 0.0)
        clean[lse] = tensors[lse].masked_fill(blind, INF)
        return clean

    def ended(self, tensors: Sequence[torch.Tensor], k: int, v: int, at: int) -> list[torch.Tensor]:
        """The tensors, with copies of k and v set to 0 past the lengths: cuDNN may multiply these
        rows by weights of 0, and NaN would stay NaN."""
        clean, lengths = [*tensors], tensors[at]
        past = torch.arange(self.problem.N, device=lengths.device) >= lengths[:, None]
        for name, n in ("k", k), ("v", v):
            x = next(x for x in self.call.inputs if x.source == name)
            copy = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=lengths.device)
            clean[n] = copy.copy_(tensors[n]).masked_fill_(past[:, None, :, None], 0.0)
        return clean

    def run(self, tensors: Sequence[torch.Tensor], rooms: Rooms) -> list[torch.Tensor]:
        device = tensors[0].device
        if self.keys is not None:
            tensors = self.ended(tensors, *self.keys)
        given = [
            self.special(n, tensors, device) if spot is None else tensors[spot]
            for n, spot in enumerate(self.spots)
        ]
        if self.problem.grad is not None:  # nobody can clone autograd's tensors
            given = [on_boundary(t) for t in given]
        for t in given:
            if t.data_ptr() % ALIGNED:
                sources = (x.source for x in self.call.inputs)
                raise PlanMismatchError(*find_misplaced(zip(sources, given, strict=True)))
        made = self.new_results(device, rooms)
        for n in self.sums:
            made[n].zero_()
        with self.workspace.lease(self.scratch, device) as views:
            pack = dict(enumerate(given + made, start=1))
            self.execute(pack, views.get("workspace"), device)
        return made

    def new_results(self, device: torch.device, rooms: Rooms) -> list[torch.Tensor]:
        """Uninitialised results, in their rooms."""
        if not rooms:
            return [
                torch.empty_strided(shape, strides, dtype=dtype, device=device)
                for shape, strides, dtype in self.blanks
            ]
        require_aligned(rooms)
        each = zip(self.call.outputs, self.blanks, strict=True)
        return [room_or_new(rooms, x.source, lying, device) for x, lying in each]

    def special(
        self, n: int, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        """A vector packed for cuDNN; or lengths [B] of M or N, if none are given."""
        x = self.call.inputs[n]
        if n in self.packs:
            return readable_vector(tensors[self.packs[n]], x.dtype)
        count = self.problem.M if x.source == "M" else self.problem.N
        return self.sizes.get((x.source, device), lambda: full_lengths(x.shape[0], count, device))


def full_lengths(B: int, count: int, device: torch.device) -> torch.Tensor:
    """B lengths on a device, all equal to count."""
    with neutral_state():
        host = torch.full((B,), count, dtype=torch.int32)
    return copy_to(device, host, "lengths")


Results = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # outputs, and saved tensors


@final
@define(eq=False)
class Inference:
    """A forward that stores no lse: its plan is built when it is first needed.

    saving: the built forward with lse. It gives equal results, and runs during stream capture, as
    nothing can be built then, and if cuDNN supports no other plan.
    """

    saving: Callable[..., Results]
    build: Callable[[], Callable[..., Results]]
    run: Callable[..., Results] | None = None
    lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __call__(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        run = self.run or self.choose(tensors[0].device)
        return run(*tensors, rooms=rooms) if rooms else run(*tensors)

    def choose(self, device: torch.device) -> Callable[..., Results]:
        """The call to run before the plan is built."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.saving
        return self.prepare()

    def prepare(self) -> Callable[..., Results]:
        """Build the plan that stores no lse, once; returns the call from now on."""
        with self.lock:
            if self.run is None:
                try:
                    self.run = self.build()
                except RefusedError as error:
                    LOG.warning("calls without gradients store lse: cuDNN %s", error)
                    self.run = self.saving
            return self.run

    def __str__(self) -> str:
        built = "built" if self.run else "built when first needed"
        return f"calls without gradients store no lse, by a plan of their own, {built}"


def clears(problem: Problem) -> bool:
    """True if do is copied, to clear rows without keys."""
    return problem.grad is not None and problem.grad.with_do and problem.has_blind_rows


def ends_keys(problem: Problem) -> bool:
    """True if k and v are copied, to clear rows past lengths."""
    return LEAVES["keys"] in and_parts(problem.node.mask)


def temporary_bytes(call: CudnnCall, problem: Problem, graph: Graph) -> int:
    """Bytes of unwanted gradients computed by cuDNN, of copied vectors and cotangents, of lse if
    rows are cleared, and of k and v if they end."""
    grad, vectors = problem.grad, copied_vectors(problem, graph)
    wanted = ("o", "lse") if grad is None else grad.names
    casts = ("dsinks",) if "sinks" in vectors else ()
    unasked = sum(x.bytes for x in call.outputs if x.source not in wanted or x.source in casts)
    made = {*vectors, *(("lse",) if clears(problem) else ())}
    made |= {"k", "v"} if ends_keys(problem) else set()
    return (
        unasked + sum(x.bytes for x in call.inputs if x.source in made) + cotangent_bytes(problem)
    )


def cast_sinks(made: dict[str, torch.Tensor], problem: Problem) -> None:
    """Cast the gradient of sinks from cuDNN's float32 to the dtype of the sinks."""
    sinks = problem.by_role.sinks
    if sinks is not None and "dsinks" in made:
        made["dsinks"] = made["dsinks"].to(sinks.dtype)


def run_notes(problem: Problem, graph: Graph) -> tuple[str, ...]:
    vectors = (
        f"{name} is copied to a dense {NAMES[PACKED[name]]} at each call"
        for name in copied_vectors(problem, graph)
    )
    odd = cotangent_note(problem, "is broadcast, or begins off 16 bytes")
    keys = sum(x.type.bytes for x in problem.specs[1:3])
    ended = (f"k and v are copied, {format_bytes(keys)}, with 0 past their lengths",)
    return (*vectors, *odd, *ended * ends_keys(problem))


def copied_vectors(problem: Problem, graph: Graph) -> list[str]:
    """Short vectors in a dtype or layout unfit for cuDNN."""
    spots = call_arguments(problem, graph).items()
    specs = {name: graph.inputs[n].spec for name, n in spots if name in PACKED}
    return [n for n, x in specs.items() if x.dtype != PACKED[n] or not is_packed(x)]


def call_arguments(problem: Problem, graph: Graph) -> dict[str, int]:
    """The graph's input for each operand, by name."""
    return dict(zip(operand_names(problem), graph.eqns[0].args, strict=True))


def operand_names(problem: Problem) -> tuple[str, ...]:
    """The operands of an attention or of its gradient, in order."""
    own, grad = problem.node.roles, problem.grad
    if grad is None:
        return own
    return (*own, "o", "lse", *["do"] * grad.with_do, *["dlse"] * grad.with_dlse)


def blank(x: Slot) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of a result."""
    axes = OURS.get(x.source, slice(None))
    return x.shape[axes], x.strides[axes], x.dtype


def is_packed(x: TensorSpec) -> bool:
    return x.is_dense


def readable_vector(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vector in this dtype, packed and aligned for cuDNN; a copy unless it already is."""
    dense = x.dtype == dtype and x.is_contiguous()
    if dense and not x.data_ptr() % ALIGNED:
        return x
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
