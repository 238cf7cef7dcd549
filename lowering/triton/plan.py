"""What Triton has to launch for one attention or its gradient, and the memory that takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from attrs import define, field, frozen

from attn_graph.ir.philox import flat_origin, threshold
from attn_graph.kernels.tilings import (
    DELTA,
    SUMS,
    VARIANTS,
    Pass,
    Tiling,
    padded_head_size,
    table_arch,
    tiling,
)
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.device_code import (
    Contribution,
    DeviceCode,
    Tracer,
    read_axes,
    read_specs,
)
from attn_graph.lowering.triton.device_lists import DeviceLists
from attn_graph.lowering.triton.launches import Descriptor, Launch, Pointers, check_interpreter
from attn_graph.lowering.triton.operands import (
    copies_tiles,
    gradient_strides,
    is_copied_in_tiles,
    large_operands,
    takes_tf32,
)
from attn_graph.lowering.triton.programs import (
    begins_last,
    block_costs,
    dense_costs,
    divide_group,
    heads_together,
)
from attn_graph.lowering.triton.symbols import SPECIAL
from attn_graph.lowering.triton.tile_lists import blocks, list_ahead
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Untraceable
from attn_graph.spec import TensorSpec, dense_strides

Fixed = dict[str, Any]  # arguments of a kernel
FORWARDS = ("forward", "gluon_forward")  # kernels that store lse, where a pointer is given
HALVED = (90, 120)  # rows of the table whose tiles may be halved
TILED = ("q", "k", "v", "do")  # operands that kernels take descriptors of
WARPS, ROWS = 4, 64  # of the least tile that matrix units take at full speed
READ = ("q", "k", "v", "do", "lse", "delta", "seed", "offset")  # by every backward kernel
GRADIENTS = {"dq": "grad0", "dk": "grad1", "dv": "grad2"}  # by number of the operand


@final
@frozen(eq=False)
class Flash:
    """Launches in order, by what name they read which tensor, and scratch buffers by name.

    precision: of products of float32. tables: lists of tiles that were made when planning, by
    name too. division: what `explain` says of how query heads of a group are divided.
    """

    problem: Problem
    target: Target
    code: DeviceCode
    precision: Precision
    launches: tuple[Launch, ...]
    buffers: Mapping[str, Buffer]
    tables: Mapping[str, torch.Tensor]
    division: str = ""

    @classmethod
    def plan(
        cls,
        problem: Problem,
        target: Target,
        precision: Precision = "ieee",
        variant: str | None = None,
        most: int | None = None,
    ) -> Flash:
        """variant: of the table's tilings, one of VARIANTS. most: bytes of scratch that it should
        not exceed if it can do with less.

        Raises Untraceable where the mask or a modifier can't be made a kernel's.
        """
        best = precision if takes_tf32(problem, target.sm) else "ieee"
        code = Tracer.of(problem).trace()
        return FlashBuilder(problem, target, code, best, variant, most).build()

    @property
    def scratch(self) -> Scratch:
        """All scratch buffers, side by side."""
        return Scratch(tuple(self.buffers.values()))

    def specs(self) -> dict[str, TensorSpec]:
        """The specs of the large operands, by name."""
        return large_operands(self.problem)

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor that launches name."""
        p = self.problem
        dtypes = dict.fromkeys(("q", "k", "v", "o", "do", "tq", "tk", "tv", "to"), p.dtype)
        dtypes |= dict.fromkeys((*p.node.stats, "delta", "dlse", "tlse"), torch.float32)
        dtypes |= dict.fromkeys(("seed", "offset"), torch.int64)
        sinks = p.by_role.sinks
        dtypes |= dict.fromkeys(("sinks", "tsinks"), sinks.dtype) if sinks else {}
        dtypes |= {f"grad{n}": spec.dtype for n, spec in enumerate(p.specs)}
        dtypes |= {f"data.{k}": spec.dtype for k, spec in enumerate(read_specs(p))}
        dtypes |= {name: buffer.dtype for name, buffer in self.buffers.items()}
        return dtypes | {name: table.dtype for name, table in self.tables.items()}

    def without_lse(self) -> tuple[Launch, ...]:
        """The launches of a forward whose lse nobody reads."""
        return tuple(
            launch.without("lse_ptr") if launch.kernel in FORWARDS else launch
            for launch in self.launches
        )

    def check(self) -> None:
        """Raise RuntimeError where Triton interprets and the plan is to be compiled, or reverse."""
        check_interpreter(self.target.interprets)

    def new_gradient(self, n: int, device: torch.device) -> torch.Tensor:
        """An uninitialised gradient of operand n: q, k or v."""
        spec = self.problem.specs[n]
        strides = gradient_strides(spec)
        return torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=device)


@final
@define(eq=False)
class FlashBuilder:
    """The list of launches while it grows. It never leaves `Flash.plan`."""

    problem: Problem
    target: Target
    code: DeviceCode
    precision: Precision = "ieee"
    variant: str | None = None
    most: int | None = None
    division: str = ""
    launches: list[Launch] = field(factory=list)
    buffers: dict[str, Buffer] = field(factory=dict)
    tables: dict[str, torch.Tensor] = field(factory=dict)

    def build(self) -> Flash:
        """Add every launch of the problem; the whole as a value."""
        if self.problem.grad is None:
            self.forward()
        else:
            self.backward()
        return self.finish()

    def finish(self) -> Flash:
        """What was added so far, as a value."""
        made = tuple(self.launches), self.buffers, self.tables, self.division
        return Flash(self.problem, self.target, self.code, self.precision, *made)

    # Arguments that several kernels share

    def tiling(self, pass_: Pass) -> Tiling:
        """The tile of a pass."""
        return choose_tiling(self.problem, self.target, pass_, self.variant)

    def common(self) -> Fixed:
        """Sizes and constants."""
        p, rate = self.problem, self.problem.node.dropout
        return {
            "numbers": self.code.numbers or None,
            "GROUP": p.H // p.G,
            "M": p.M,
            "N": p.N,
            "EVEN": p.N % SPECIAL == 0 and any({"i", "j"} <= {*axes} for axes in read_axes(p)),
            "scale": p.node.scale,
            "keep_scale": 1 / (1 - rate) if rate < 1 else 0.0,
            "threshold": threshold(rate),
            "origin": flat_origin(p.node.origin),
            "D": p.D,
            "E": p.E,
            "WIDTH_D": padded_head_size(p.D),
            "WIDTH_E": padded_head_size(p.E),
            "DROPOUT": rate > 0,
            "UPCAST": self.target.interprets,
            "PRECISION": self.precision,
        } | self.strides("q", "k", "v")

    @property
    def blind(self) -> int:
        """Whether a query may see no key: 0 no, 1 by the mask alone, 2 by a modifier too."""
        hides = any(m.hides for m in self.problem.node.modifiers)
        return 2 if hides else int(self.problem.mask_has_blind_rows)

    def strides(self, *names: str) -> Fixed:
        """The strides of operands, as the kernels take them; 0 of those that are absent."""
        specs = large_operands(self.problem)
        return {
            f"{name}_strides": specs[name].strides if name in specs else (0, 0, 0, 0)
            for name in names
        }

    def operands(self, *names: str) -> tuple[Pointers, Fixed]:
        """Pointers by parameter, and None for those that this graph has not."""
        there = {"q", "k", "v", "delta", "dq", "dk", "dv", *self.problem.node.names}
        there |= set(large_operands(self.problem)) | (
            {"seed", "offset"} if self.problem.node.dropout else set()
        )
        there |= {"sinks"} if self.problem.node.sinks else set()
        pointers: Pointers = {
            f"{name}_ptr": GRADIENTS.get(name, name) for name in names if name in there
        }
        return pointers, {f"{name}_ptr": None for name in names if name not in there}

    def data(self) -> tuple[str, ...]:
        """Names of all that modifiers and the mask read, in the order of the operands."""
        return tuple(f"data.{k}" for k in range(len(read_specs(self.problem))))

    def texts(self, *names: str) -> dict[str, str]:
        """The generated functions, by parameter."""
        return {name.upper(): getattr(self.code, name) for name in names}

    # The order of programs, and lists of tiles

    def order(self, tiling: Tiling, by_keys: bool, pointers: Pointers, splits: int = 1) -> Fixed:
        """How many heads are walked together, and which block comes first.

        pointers: those of the lists, which lie in order if they were made when planning.
        """
        sorted_ = str(pointers.get("lists_ptr")) in self.tables
        return {
            "TOGETHER": heads_together(self.problem, self.target, tiling, by_keys, splits),
            "LAST_FIRST": not sorted_ and begins_last(self.problem, by_keys),
        }

    def listed(self, tiling: Tiling, by_keys: bool) -> tuple[Pointers, Fixed]:
        """The list that a kernel walks: its pointer, or None where closed form does without."""
        mask = self.problem.node.mask
        if mask is None or self.code.strip:
            return {}, {"lists_ptr": None, "lists_strides": (0, 0, 0), "LISTED": False}
        name = f"lists{len(self.buffers) + len(self.tables)}"
        try:
            shape = self.ranged(name, tiling, by_keys) if mask.needs else None
        except Untraceable:
            shape = None  # then from `span` and `surely`, for whatever the data may be
        if shape is None:
            self.tables[name] = list_ahead(self.problem, tiling, by_keys)
            shape = (1, 1, *self.tables[name].shape)
        strides = dense_strides(shape)[:3]
        strides = tuple(s if n > 1 else 0 for n, s in zip(shape, strides, strict=False))
        return {"lists_ptr": name}, {"lists_strides": strides, "LISTED": True}

    def ranged(self, name: str, tiling: Tiling, by_keys: bool) -> tuple[int, ...]:
        """Add what makes the lists on the device; their shape."""
        lists = DeviceLists.plan(name, self.problem, tiling, by_keys, self.data())
        self.buffers |= lists.buffers
        self.launches += lists.launches
        return lists.shape

    # The passes

    def launch(
        self, kernel: str, lines: int, tiling: Tiling, names: tuple[str, ...], more: Fixed,
        texts: dict[str, str], pointers: Pointers | None = None,
        tiled: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Add a launch of one program for each line. tiled: what it takes descriptors of."""
        named, absent = self.operands(*names)
        named |= pointers or {}
        sizes = {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n}
        fixed = self.common() | absent | sizes | more
        if "do" in names:
            fixed |= self.strides("do")
        if self.data():
            named["data"] = self.data()
        else:
            fixed["data"] = None
        descriptors = self.describe(tiling, tiled)
        fixed |= {f"{x}_desc": None for x in tiled if f"{x}_desc" not in descriptors}
        options = *tiling.options, descriptors
        self.launches.append(Launch(kernel, lines, named, fixed, texts, *options))

    def forward(self) -> None:
        """Add the launch of the forward."""
        p, tile = self.problem, self.tiling("forward")
        lists, listed = self.listed(tile, by_keys=False)
        sinks = p.by_role.sinks
        more = {
            "o_strides": p.layout_of_o[1],
            "sinks_stride": sinks.strides[0] if sinks else 0,
            "H": p.H,
            "FOLD": not p.low_scale and not p.node.modifiers,
        }
        names = ("q", "k", "v", "o", "lse", "max", "sinks", "seed", "offset")
        more |= self.order(tile, by_keys=False, pointers=lists)
        lines = blocks(p.M, tile.block_m) * p.H * p.B
        texts = self.texts("keep", "strip", "change")
        self.launch("forward", lines, tile, names, more | listed, texts, lists, TILED[:3])

    def describe(self, tile: Tiling, names: tuple[str, ...]) -> dict[str, Descriptor]:
        """Operands in tiles, by parameter, as far as the copy engine reads them."""
        if not copies_tiles(self.problem, self.target):
            return {}
        specs = large_operands(self.problem)
        rows = {"q": tile.block_m, "k": tile.block_n, "v": tile.block_n, "do": tile.block_m}
        copied = {n: specs[n] for n in names if n in specs and is_copied_in_tiles(specs[n])}
        widths = {name: padded_head_size(x.shape[3]) for name, x in copied.items()}
        return {
            f"{name}_desc": Descriptor.tiles(name, x, rows[name], widths[name], gluon=False)
            for name, x in copied.items()
        }

    def backward(self) -> None:
        """Add the launches of the gradient."""
        p = self.problem
        assert p.grad is not None
        self.buffers["delta"] = Buffer((p.B, p.H, p.M), torch.float32)
        self.delta()
        if p.grad.wants[0]:
            self.query_gradient()
        for n, collected in self.code.contributions.items():
            self.collect(n, collected)
        if p.grad.wants[1] or p.grad.wants[2]:
            self.key_gradient()  # the last: its sums take of max_workspace what is left

    def delta(self) -> None:
        """Add the launch that sums do o over each row."""
        p, rows = self.problem, DELTA.block_m
        pointers, absent = self.operands("o", "lse", "do", "dlse", "delta")
        fixed = absent | {
            **self.strides("do", "dlse"),
            "H": p.H,
            "M": p.M,
            "E": p.E,
            "WIDTH_E": padded_head_size(p.E),
            "BLOCK_M": rows,
            "BLIND": p.has_blind_rows,
            "UPCAST": self.target.interprets,
        }
        lines = blocks(p.M, rows) * p.H * p.B
        self.launches.append(
            Launch("delta", lines, pointers | {"o_strides": "o.strides"}, fixed, {}, *DELTA.options)
        )

    def query_gradient(self) -> None:
        """Add the launch of dq."""
        p, tile = self.problem, self.tiling("query_gradient")
        lists, listed = self.listed(tile, by_keys=False)
        names = (*READ, "dq")
        more = {"H": p.H, "dq_strides": gradient_strides(p.specs[0]), "BLIND": self.blind}
        more |= listed | self.order(tile, by_keys=False, pointers=lists)
        lines = blocks(p.M, tile.block_m) * p.H * p.B
        texts = self.texts("keep", "strip", "change", "back")
        self.launch("query_gradient", lines, tile, names, more, texts, lists, TILED)

    def key_gradient(self) -> None:
        """dk and dv, in one launch or in two; one that is not wanted is not computed."""
        p, tile = self.problem, self.tiling("key_gradient")
        assert p.grad is not None
        lists, listed = self.listed(tile, by_keys=True)
        splits = self.split(tile, lists)
        wanted = {name: n for n, name in enumerate(("dk", "dv"), start=1) if p.grad.wants[n]}
        order = self.order(tile, by_keys=True, pointers=lists, splits=splits)
        if splits > 1:
            for name, n in wanted.items():
                shape = (p.B, p.G * splits, p.N, p.specs[n].shape[3])
                self.buffers[f"parts.{name}"] = Buffer(shape, torch.float32)
        for results in [[name] for name in wanted] if tile.apart else [list(wanted)]:
            self.key_gradient_of(results, tile, splits, lists, listed | order)
        for name, n in wanted.items():
            if f"parts.{name}" in self.buffers:
                self.sum_parts(f"parts.{name}", n)

    def split(self, tile: Tiling, lists: Pointers) -> int:
        """Among how many programs of dk and dv the query heads of a group are divided."""
        p, table = self.problem, self.tables.get(str(lists.get("lists_ptr")))
        if p.H == p.G:
            return 1
        costs = block_costs(p, tile, True, table) or dense_costs(p, tile, True)
        used = Scratch(tuple(self.buffers.values())).bytes
        room = None if self.most is None else self.most - used
        division = divide_group(p, self.target, tile, costs, room)
        self.division = division.note
        return division.splits

    def key_gradient_of(
        self, results: list[str], tile: Tiling, splits: int, lists: Pointers, more: Fixed
    ) -> None:
        """Add the launch of dk, of dv or of both: themselves, or sums over parts of a group."""
        p = self.problem
        parts = {name: self.buffers.get(f"parts.{name}") for name in ("dk", "dv")}
        strides = {
            f"{name}_strides": dense_strides(part.shape) if part else gradient_strides(p.specs[n])
            for n, (name, part) in enumerate(parts.items(), start=1)
        }
        more = more | strides | {f"{name}_ptr": None for name in parts if name not in results}
        more |= {"G": p.G, "SPLITS": splits, "GROUPED": p.H > p.G, "BLIND": self.blind}
        pointers = lists | {f"{name}_ptr": f"parts.{name}" for name in results if parts[name]}
        lines = blocks(p.N, tile.block_n) * p.G * splits * p.B
        texts = self.texts("strip", "change", "back") | {"KEEP": self.code.keep_by_keys}
        self.launch(
            "key_gradient", lines, tile, READ + tuple(results), more, texts, pointers, TILED
        )

    def sum_parts(self, name: str, n: int) -> None:
        """Add the launch that makes the gradient of k or v, operand n, of sums by query heads."""
        p, spec, parts = self.problem, self.problem.specs[n], self.buffers[name]
        fixed = {
            "parts_strides": dense_strides(parts.shape),
            "out_strides": gradient_strides(spec),
            "G": p.G,
            "SUMMANDS": parts.shape[1] // p.G,
            "N": p.N,
            "SIZE": spec.shape[3],
            "WIDTH": padded_head_size(spec.shape[3]),
            "BLOCK_N": SUMS.block_n,
            "UPCAST": self.target.interprets,
        }
        pointers: Pointers = {"parts_ptr": name, "out_ptr": f"grad{n}"}
        lines = blocks(p.N, SUMS.block_n) * p.G * p.B
        self.launches.append(Launch("sum_parts", lines, pointers, fixed, {}, *SUMS.options))

    def collect(self, n: int, collected: Contribution) -> None:
        """The gradient of operand n: whole, or as sums that are left to add up."""
        tile = self.tiling("query_gradient")
        texts = self.texts("keep", "strip", "change") | {"COLLECT": collected.source}
        if set("ij") <= set(collected.axes):
            self.collect_places(n, collected, tile, texts)
        else:
            self.collect_lines(n, "j" in collected.axes, tile, texts)

    def collect_places(
        self, n: int, collected: Contribution, tile: Tiling, texts: dict[str, str]
    ) -> None:
        """One program for each tile of the gradient."""
        p, axes = self.problem, collected.axes
        more: Fixed = {
            "B": p.B,
            "H": p.H,
            "PER_BATCH": "b" in axes,
            "PER_HEAD": "h" in axes,
            "out_strides": dense_strides(collected.spec.shape),
        }
        tiles = blocks(p.M, tile.block_m) * blocks(p.N, tile.block_n)
        lines = tiles * (p.B if "b" in axes else 1) * (p.H if "h" in axes else 1)
        pointers: Pointers = {"out_ptr": f"grad{n}"}
        self.launch("collect_places", lines, tile, READ, more, texts, pointers)

    def collect_lines(self, n: int, by_keys: bool, tile: Tiling, texts: dict[str, str]) -> None:
        """One program for each block of queries, or of keys."""
        p = self.problem
        lists, listed = self.listed(tile, by_keys)
        length, block = (p.N, tile.block_n) if by_keys else (p.M, tile.block_m)
        self.buffers[f"sums{n}"] = Buffer((p.B, p.H, length), torch.float32)
        more: Fixed = {"H": p.H, "BY_KEYS": by_keys, **listed}
        pointers = lists | {"out_ptr": f"sums{n}"}
        lines = blocks(length, block) * p.H * p.B
        self.launch("collect_lines", lines, tile, READ, more, texts, pointers)


def choose_tiling(
    problem: Problem, target: Target, pass_: Pass, variant: str | None = None
) -> Tiling:
    """What the table has for a pass, or a variant of that."""
    p = problem
    width = padded_head_size(max(p.D, p.E))
    modified, drops = bool(p.node.modifiers), p.node.dropout > 0
    copied = copies_tiles(p, target) and all(map(is_copied_in_tiles, p.specs[:3]))
    decided = p.node.mask is not None and bool(p.node.mask.needs)
    usual = tiling(target.sm, p.dtype.itemsize, width, pass_, modified, drops, copied, decided)
    if variant is None:
        return spread_tiling(p, target, pass_ == "key_gradient", usual)
    return VARIANTS[variant](usual)


def spread_tiling(problem: Problem, target: Target, by_keys: bool, usual: Tiling) -> Tiling:
    """Half a tile on half the warps, where whole ones leave half of all multiprocessors idle.

    By lowering/triton/predict.py one that is alone on a multiprocessor takes 0.6 of the time of a
    whole one, with head size 128 on sm_90, and 0.7 on sm_120; elsewhere it gains nothing.
    """
    p, least = problem, 2 * ROWS
    length, block = (p.N, usual.block_n) if by_keys else (p.M, usual.block_m)
    programs = p.B * p.H * blocks(length, block)
    halves = usual.warps == 2 * WARPS and block >= least and length > block // 2
    idle = target.multiprocessors is not None and 2 * programs <= target.multiprocessors
    if not (halves and idle and table_arch(target.sm) in HALVED):
        return usual
    return VARIANTS[f"half the {'keys' if by_keys else 'queries'} and warps"](usual)
