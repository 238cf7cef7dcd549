"""Launches of Triton for one attention or its gradient, and their memory, compiled for any GPU,
here or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, final

import torch
from attrs import Factory, define, evolve, field, frozen

from attn_graph.ir.storage.packed import LENGTHS
from attn_graph.kernels.tilings import (
    DELTA,
    MERGE,
    MERGE_ROWS,
    SUMS,
    Pass,
    Tiling,
    padded_head_size,
)
from attn_graph.lowering.backend import NO_ROOMS, ResultLayout, Rooms, room_or_new
from attn_graph.lowering.codegen.device_code import Contribution, DeviceCode
from attn_graph.lowering.codegen.launches import (
    Launch,
    Pointers,
    check_interpreter,
    is_interpreting,
)
from attn_graph.lowering.codegen.machine_code import MachineCode, compile_launch, inspect_launch
from attn_graph.lowering.codegen.tile_lists import blocks
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem, read_specs
from attn_graph.lowering.triton.divisions import (
    PARTS,
    PARTS_LSE,
    Division,
    KeyDivision,
    describe_division,
    divide_keys,
    divide_work,
    parts_buffers,
)
from attn_graph.lowering.triton.launch_list import (
    PASS_OF,
    Fixed,
    LaunchList,
    add_weight_sums,
)
from attn_graph.lowering.triton.places import (
    DTYPES,
    NAMED,
    ORDER,
    kernel_strides,
    key_programs,
    row_lines,
    row_programs,
    sums_pages,
)
from attn_graph.lowering.triton.programs import (
    choose_tiling,
    fewer_in_flight,
    processors_of,
    takes_tf32,
)
from attn_graph.lowering.triton.work import Push, Work, lying_of, tangent_specs, trace
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.spec import TensorSpec, dense_strides

PARTS_OF_O: Pointers = {"parts_ptr": PARTS, "parts_lse_ptr": PARTS_LSE}  # of their merge
FORWARDS = ("forward", "merge_parts")  # they store lse, or lse of parts
CONVERTS = 89  # from there on GPUs have instructions for float8_e4m3fn
NOT_INVARIANT = "the order of sums would follow the batch, which batch_invariant=True forbids"
NO_MAXIMA = "parts of the largest score are not put together"


@final
@frozen(eq=False)
class Flash:
    """Launches in order, the name of each tensor they read, and scratch buffers by name.

    precision: of products of float32. tables: lists of tiles made in planning, by name. results:
    shape, strides and dtype of each result, by name. division: how the work of blocks is divided,
    in lines for `explain`; "": it is not. push: the moving operands, in forward mode.
    """

    problem: Problem
    target: Target
    code: DeviceCode
    precision: Precision
    launches: tuple[Launch, ...]
    buffers: Mapping[str, Buffer]
    tables: Mapping[str, torch.Tensor]
    results: Mapping[str, ResultLayout]
    division: str = ""
    lying: Lying = field(default=Factory(lambda x: Lying.dense(x.problem), takes_self=True))
    push: Push | None = None

    @classmethod
    def plan(
        cls,
        work: Problem | Work,
        target: Target,
        precision: Precision = "ieee",
        variant: str | None = None,
        most: int | None = None,
        invariant: bool = False,
        code: DeviceCode | None = None,
    ) -> Flash:
        """variant: of the table's tilings, one of VARIANTS. most: a limit on bytes of scratch, kept
        if possible. invariant: True if no entry's bits may depend on others. code: as by `trace`.

        Raises Untraceable if the mask or a modifier can't be a kernel's function.
        """
        lying = Lying.dense(work) if isinstance(work, Problem) else lying_of(work)
        p, push = lying.problem, work if isinstance(work, Push) else None
        best: Precision = "ieee"
        if precision == "tf32" and takes_tf32(p, target.sm):
            best = precision
        code = code or trace(push or lying)
        return FlashBuilder(p, target, code, best, variant, most, invariant, lying, push).build()

    @cached_property
    def scratch(self) -> Scratch:
        """All scratch buffers, side by side."""
        return Scratch(self.buffers)

    def specs(self) -> dict[str, TensorSpec]:
        """The specs of the large operands, by name."""
        return self.lying.large | (self.push.large if self.push else {})

    @cached_property
    def as_bytes(self) -> tuple[str, ...]:
        """Those of k and v that kernels read as bytes, since the GPU does not convert them."""
        kinds = zip("kv", self.lying.specs[1:3], strict=True)
        software = self.target.sm < CONVERTS
        return tuple(n for n, x in kinds if software and x.dtype == torch.float8_e4m3fn)

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor, by its name in launches."""
        p = self.problem
        wide = (*p.node.stats, "delta", "dlse", "tlse", "tdelta", "tdlse")
        dtypes = dict.fromkeys(("q", "k", "v", "o", "do", "tq", "tk", "tv", "tdo", "to"), p.dtype)
        specs = zip("qkv", self.lying.specs, strict=False)
        dtypes |= {n: torch.uint8 if n in self.as_bytes else x.dtype for n, x in specs}
        dtypes |= dict.fromkeys(wide, torch.float32)
        dtypes |= dict.fromkeys(("seed", "offset"), torch.int64)
        sinks = p.by_role.sinks
        dtypes |= dict.fromkeys(("sinks", "tsinks"), sinks.dtype) if sinks else {}
        dtypes |= {f"grad{n}": spec.dtype for n, spec in enumerate(p.specs)}
        read = (*read_specs(p), *tangent_specs(self.push))
        dtypes |= {f"data.{k}": spec.dtype for k, spec in enumerate(read)}
        places, mask = self.lying.tables, p.by_role.mask
        dtypes |= {name: x.dtype for name, x in places.items()}
        dtypes |= {n: mask[n].dtype for n in LENGTHS.values() if n in mask}
        dtypes |= DTYPES if sums_pages(self.lying) else {}
        dtypes |= {name: buffer.dtype for name, buffer in self.buffers.items()}
        return dtypes | {name: table.dtype for name, table in self.tables.items()}

    @cached_property
    def without_lse(self) -> tuple[Launch, ...]:
        """The launches of a forward with an unused lse."""
        return tuple(
            launch.without("lse_ptr")
            if launch.kernel in FORWARDS and launch.tensors.get("lse_ptr") == "lse"
            else launch
            for launch in self.launches
        )

    def check(self) -> None:
        """Raise RuntimeError if Triton interprets a plan for compiled kernels, or the reverse."""
        check_interpreter(self.target.interprets)

    def new_result(self, name: str, device: torch.device, rooms: Rooms = NO_ROOMS) -> torch.Tensor:
        return room_or_new(rooms, name, self.results[name], device)


@final
@define(eq=False)
class FlashBuilder(LaunchList):
    """The launches of each pass. It never leaves `Flash.plan`."""

    def build(self) -> Flash:
        """Add every launch of the problem; the whole as a value."""
        if self.problem.grad is not None:
            self.backward()
        else:
            self.forward()
        made = tuple(self.launches), self.buffers, self.tables, dict(self.results())
        more = "\n".join(dict.fromkeys(filter(None, self.notes))), self.lying, self.push
        return Flash(self.problem, self.target, self.code, self.precision, *made, *more)

    def results(self) -> Iterator[tuple[str, ResultLayout]]:
        """How each result lies, by name."""
        p, lying = self.problem, self.lying
        if p.grad is None:
            o, shape = lying.o(), lying.statistic()
            names = ("o", *("to",) * bool(self.push))
            yield from ((n, (o.shape, o.strides, o.dtype)) for n in names)
            names = (*p.node.stats, *("tlse",) * bool(self.push))
            yield from ((n, (shape, dense_strides(shape), torch.float32)) for n in names)
            return
        for n in (n for n in range(3) if p.grad.wants[n]):
            spec = lying.gradient(n)
            yield f"grad{n}", (spec.shape, spec.strides, spec.dtype)
        for n in self.code.contributions:
            spec = p.specs[n]
            yield f"grad{n}", (spec.shape, dense_strides(spec.shape), spec.dtype)

    def forward(self) -> None:
        """Add the launch of the forward, or the launches of its parts for few queries."""
        options = self.variant, self.most, self.invariant
        division = None if self.push else divide_keys(self.lying, self.target, *options)
        if division is not None:
            self.split_forward(division)
        if division is None or division.short:
            self.whole_forward(division.short if division else 0)

    def split_forward(self, division: KeyDivision) -> None:
        """Add the launches of parts of the keys, and of their merge."""
        p, tile, short = self.problem, division.tile, division.short
        self.buffers |= parts_buffers(self.lying, division.parts, short)
        rows = division.queries * (p.H // p.G)
        lines = p.B * p.G * division.parts * blocks(rows, tile.block_m)
        fixed = {"SPLITS": division.parts, "EACH": division.each}
        fixed |= {"M": division.queries, "SHORT": short}
        self.launch("split_forward", lines, tile, PARTS_OF_O, fixed)
        joined = evolve(MERGE_ROWS, block_m=min(short, MERGE_ROWS.block_m)) if short else MERGE
        self.merge(division.parts, joined, p.B * short, SHORT=short)
        self.notes.append(describe_division(self.lying, self.target, division))

    def merge(self, parts: int, tile: Tiling, rows: int = 0, **fixed: object) -> None:
        """Add the launch to join the parts of o. tile: rows of a program, and parts at a time.

        rows: how many have parts; 0: all.
        """
        B, H, M = row_lines(self.lying)
        M = rows or M
        fixed |= {"PARTS": parts, "M": M, "ROWS": tile.block_m, "AT_ONCE": tile.block_n}
        self.launch("merge_parts", B * H * blocks(M, tile.block_m), tile, PARTS_OF_O, fixed)

    def whole_forward(self, short: int) -> None:
        """Add the launch with one program for a block of queries, or the launches with several for
        one block and another to join their parts. short: without sequences of so many rows or
        fewer, whose blocks nobody shares."""
        barrier = NO_MAXIMA if "max" in self.problem.node.stats else ""
        way = self.divide("forward", barrier, whole=short > 0)
        lists, listed = self.listed(way.tile, by_keys=False)
        fixed = listed | self.share_rows("forward", way, lists) | {"SHORT": short}
        if way.parts > 1:
            self.buffers |= parts_buffers(self.lying, way.parts)
            lists = lists | {"o_ptr": PARTS, "lse_ptr": PARTS_LSE}
            fixed["o_strides"] = self.parts_strides(PARTS)
        lines = row_programs(self.lying, way.tile.block_m, short) * way.parts
        self.launch("forward", lines, way.tile, lists, fixed)
        if way.parts > 1:
            self.merge(way.parts, MERGE_ROWS, sinks_ptr=None)  # the first part has them

    def share_rows(self, pass_: Pass, way: Division, lists: Pointers) -> Fixed:
        """The order of programs of blocks of queries, and the programs sharing keys."""
        order = self.order(way.tile, pass_, lists, parts=way.parts)
        return order | {"PARTS": way.parts, "PARTED": way.parts > 1}

    def backward(self) -> None:
        """Add the launches of the gradient."""
        p = self.problem
        assert p.grad is not None
        self.buffers["delta"] = Buffer(row_lines(self.lying), torch.float32)
        self.delta()
        add_weight_sums(self)
        if p.grad.wants[0]:
            self.query_gradient()
        for n, collected in self.code.contributions.items():
            self.collect(n, collected)
        if p.grad.wants[1] or p.grad.wants[2]:
            self.key_gradient()  # the last: its sums take the rest of max_workspace

    def delta(self) -> None:
        """Add the launch for sums of do o over each row."""
        B, H, M = row_lines(self.lying)
        own: Pointers = {"o_strides": "o.strides"}
        if self.push is not None:
            self.buffers["tdelta"] = Buffer((B, H, M), torch.float32)
            own["to_strides"] = "to.strides"
        fixed = {"M": M, "BLIND": self.problem.has_blind_rows}
        lines = blocks(M, DELTA.block_m) * H * B
        self.launch("delta", lines, DELTA, own, fixed)

    def query_gradient(self) -> None:
        """Add the launch of dq, or of its parts and of their sum."""
        pass_ = PASS_OF["query_gradient"]
        way, part = self.divide(pass_), "parts.dq"
        lists, listed = self.listed(way.tile, by_keys=False)
        fixed = listed | self.share_rows(pass_, way, lists)
        fixed["dq_strides"] = self.gradient_strides(0)
        if way.parts > 1:
            self.buffers[part] = self.sums_buffer(0, self.problem.H * way.parts)
            lists = lists | {"dq_ptr": part}
            fixed["dq_strides"] = self.parts_strides(part)
        lines = row_programs(self.lying, way.tile.block_m) * way.parts
        self.launch(pass_, lines, way.tile, lists, fixed)
        if way.parts > 1:
            self.sum_parts(part, 0)

    def key_gradient(self) -> None:
        """dk and dv, in one launch or in two; an unwanted one is not computed."""
        p, way = self.problem, self.divide("key_gradient")
        assert p.grad is not None
        tile = way.tile
        lists, listed = self.listed(tile, by_keys=True)
        wanted = {name: n for n, name in enumerate(("dk", "dv"), start=1) if p.grad.wants[n]}
        order = self.order(tile, "key_gradient", lists, way.splits, way.parts)
        pages = self.lying.pages
        if way.summands > 1 or pages:
            for name, n in wanted.items():
                self.buffers[f"parts.{name}"] = self.sums_buffer(n, p.G * way.summands)
        for results in [[name] for name in wanted] if tile.apart else [list(wanted)]:
            self.key_gradient_of(results, tile, way, lists, listed | order)
        for name, n in wanted.items():
            if pages:
                self.sum_pages(f"parts.{name}", n)
            elif way.summands > 1:
                self.sum_parts(f"parts.{name}", n)

    def divide(self, pass_: Pass, barrier: str = "", whole: bool = False) -> Division:
        """How the work of a block is divided among programs. whole: each takes all of its tiles."""
        flat, target, pushes = self.lying.flat, self.target, self.push is not None
        tile, half = self.tilings(pass_)
        processors = processors_of(target)
        if processors is None or (pushes and pass_ != "key_gradient"):
            return Division(tile)
        room = None if self.most is None else self.most - Scratch(self.buffers).bytes
        barrier = NOT_INVARIANT if self.invariant else barrier
        of = self.problem, flat, target, pass_, tile, half, processors, room
        division = divide_work(*of, whole=pushes or whole, barrier=barrier)
        self.notes.append(division.note)
        return division

    def sums_buffer(self, n: int, heads: int) -> Buffer:
        """A buffer for sums of the gradient of operand n, by heads."""
        B, _, length, width = self.lying.flat.specs[n].shape
        return Buffer((B, heads, length, width), torch.float32)

    def key_gradient_of(
        self, results: list[str], tile: Tiling, way: Division, lists: Pointers, more: Fixed
    ) -> None:
        """Add the launch of dk, of dv or of both: themselves, or sums over parts of a group."""
        p = self.problem
        parts = {name: self.buffers.get(f"parts.{name}") for name in ("dk", "dv")}
        strides = {
            f"{name}_strides": (
                self.parts_strides(f"parts.{name}") if part else self.gradient_strides(n)
            )
            for n, (name, part) in enumerate(parts.items(), start=1)
        }
        more = more | strides | {f"{name}_ptr": None for name in parts if name not in results}
        more |= {"SPLITS": way.splits, "PARTS": way.parts, "PARTED": way.summands > 1}
        more |= {"GROUPED": p.H > p.G or way.summands > 1}
        own = lists | {f"{name}_ptr": f"parts.{name}" for name in results if parts[name]}
        lines = key_programs(self.lying, tile.block_n, p.G * way.summands)
        texts = {"KEEP": self.code.keep_by_keys}
        self.launch("key_gradient", lines, tile, own, more, texts)

    def sum_parts(self, name: str, n: int) -> None:
        """Add the launch from sums to the gradient of operand n."""
        B, _, N, _ = self.buffers[name].shape
        lines = blocks(N, SUMS.block_n) * self.problem.specs[n].shape[1] * B
        self.launch("sum_parts", lines, SUMS, *self.sums(name, n))

    def sum_pages(self, name: str, n: int) -> None:
        """Add the launch from sums by table entries to the gradient of a pool."""
        pages, (pool, page) = self.lying.pages, self.lying.specs[1].shape[:2]
        assert pages is not None
        entries, (own, fixed) = prod(pages.shape), self.sums(name, n)
        own |= {"named_ptr": NAMED, "order_ptr": ORDER}
        fixed |= {"PAGES": pages.shape[1], "ENTRIES": entries, "STEPS": entries.bit_length()}
        lines = blocks(pool * page, SUMS.block_n) * self.problem.G
        self.launch("sum_pages", lines, SUMS, own, fixed)

    def sums(self, name: str, n: int) -> tuple[Pointers, Fixed]:
        """Pointers, sizes and strides for both of these kernels."""
        G, parts = self.problem.specs[n].shape[1], self.buffers[name]
        _, heads, N, size = parts.shape
        fixed: Fixed = {
            "parts_strides": dense_strides(parts.shape),
            "out_strides": self.gradient_strides(n),
            "G": G,
            "SUMMANDS": heads // G,
            "N": N,
            "SIZE": size,
            "WIDTH": padded_head_size(size),
        }
        return {"parts_ptr": name, "out_ptr": f"grad{n}"}, fixed

    def parts_strides(self, name: str) -> tuple[int, ...]:
        """The strides of sums, in a buffer, as kernels take them."""
        entry, *others = dense_strides(self.buffers[name].shape)
        packed = "keys" if name in ("parts.dk", "parts.dv") else "rows"
        return (0 if packed in self.lying.sides else entry, *others)

    def gradient_strides(self, n: int) -> tuple[int, ...]:
        """The strides of the gradient of operand n, as kernels take them."""
        return kernel_strides(self.lying, "qkv"[n], self.lying.gradient(n))

    def collect(self, n: int, collected: Contribution) -> None:
        """The gradient of operand n: whole, or as sums still to add up."""
        pass_ = PASS_OF["query_gradient"]
        tile = self.tiling(pass_)
        if self.push is None:
            # These kernels have no copy engine, and hold two tiles of scores.
            flat = self.lying.flat
            tile = choose_tiling(flat, self.target, pass_, self.variant, dense=False)
            tile = fewer_in_flight(tile)
        texts = {"COLLECT": collected.source}
        whole = {*"ij"} <= {*collected.axes}
        (self.collect_places if whole else self.collect_lines)(n, collected, tile, texts)

    def collect_places(
        self, n: int, collected: Contribution, tile: Tiling, texts: dict[str, str]
    ) -> None:
        """One program for each tile of the gradient."""
        p, axes = self.problem, collected.axes
        out, shape = f"grad{n}", collected.spec.shape
        if not collected.is_whole:
            out, shape = f"sums{n}", (1, p.H if "h" in axes else 1, p.M, p.N)
            self.buffers[out] = Buffer(shape, torch.float32)
        more: Fixed = {"PER_BATCH": "b" in axes, "PER_HEAD": "h" in axes}
        more["out_strides"] = dense_strides(shape)
        tiles = blocks(p.M, tile.block_m) * blocks(p.N, tile.block_n)
        lines = tiles * (p.B if "b" in axes else 1) * (p.H if "h" in axes else 1)
        self.launch("collect_places", lines, tile, {"out_ptr": out}, more, texts)

    def collect_lines(
        self, n: int, collected: Contribution, tile: Tiling, texts: dict[str, str]
    ) -> None:
        """One program for each block of queries, or of keys; of a table for each of queries."""
        p, by_keys = self.problem, "j" in collected.axes
        lists, listed = self.listed(tile, by_keys)
        length, block = (p.N, tile.block_n) if by_keys else (p.M, tile.block_m)
        more: Fixed = listed | {"BY_KEYS": by_keys}
        count, shape = blocks(length, block), [length]
        if collected.column:
            entries, folds = collected.spec.shape[1], blocks(block, tile.block_n) + 1
            shape = [count, folds, entries]
            more |= {"ENTRIES": entries, "FOLDS": folds}
            texts["COLUMN"] = collected.column
        self.buffers[f"sums{n}"] = Buffer((p.B, p.H, *shape), torch.float32)
        own = lists | {"out_ptr": f"sums{n}"}
        self.launch("collect_lines", count * p.H * p.B, tile, own, more, texts)


def compile_launches(flash: Flash) -> list[MachineCode]:
    """Compile every launch for the target's compute capability. Returns the needs of each machine
    code."""
    tensors = mock_tensors(flash)
    return [inspect_launch(launch, tensors, flash.target.sm) for launch in flash.launches]


def compile_ahead(flash: Flash) -> None:
    """Compile every launch for the target into Triton's cache, with lse and without.

    Nothing under the interpreter.
    """
    if not is_interpreting():
        tensors = mock_tensors(flash)
        for launch in dict.fromkeys((*flash.launches, *flash.without_lse)):
            compile_launch(launch, tensors, flash.target.sm)


def mock_tensors(flash: Flash) -> dict[str, Any]:  # Any: Triton's
    """Stand-ins for tensors of launches, while they are compiled."""
    from triton.runtime.jit import MockTensor

    tensors: dict[str, Any] = {name: MockTensor(dtype) for name, dtype in flash.dtypes().items()}
    o = kernel_strides(flash.lying, "o", flash.lying.o())
    return tensors | dict.fromkeys(("o.strides", "to.strides"), o)
