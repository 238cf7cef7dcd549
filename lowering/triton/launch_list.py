"""The launches of a problem while they are listed, and arguments shared by several kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from attrs import Factory, define, field

from attn_graph.ir.modifiers import SoftCap
from attn_graph.ir.storage.scaling import NARROW
from attn_graph.kernels.tilings import (
    Pass,
    PushPass,
    Tiling,
    held_head_size,
    padded_head_size,
    summed_columns,
)
from attn_graph.lowering.codegen.device_code import (
    DeviceCode,
    read_axes,
)
from attn_graph.lowering.codegen.launches import Descriptor, Launch, Pointers, parameters
from attn_graph.lowering.codegen.symbols import SPECIAL
from attn_graph.lowering.codegen.tile_lists import MOST_AHEAD, DeviceLists, blocks, list_ahead
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem, read_specs
from attn_graph.lowering.triton.places import (
    kernel_pointers,
    kernel_sizes,
    kernel_strides,
    row_lines,
    row_programs,
)
from attn_graph.lowering.triton.programs import (
    begins_last,
    choose_push_tiling,
    choose_tiling,
    copies_tiles,
    heads_together,
    is_copied_in_tiles,
    reads_v_in_k,
    spread_tilings,
)
from attn_graph.lowering.triton.work import Push, tangent_specs
from attn_graph.machine.philox import flat_origin, threshold
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision
from attn_graph.machine.workspace import Buffer
from attn_graph.masks import Mask, needs_of
from attn_graph.masks.places import Untraceable
from attn_graph.spec import IN_PAIRS, dense_strides

Fixed = dict[str, Any]  # arguments of a kernel
PUSHED: dict[Pass, PushPass] = {
    "forward": "push",
    "query_gradient": "push_query_gradient",
    "key_gradient": "push_key_gradient",
}
PASS_OF: dict[str, Pass] = {  # of kernels with ordered programs
    kernel: pass_ for pass_, pushed in PUSHED.items() for kernel in (pass_, pushed)
}
# Kernels with a program for each block of keys.
BY_KEYS = tuple(kernel for kernel, pass_ in PASS_OF.items() if pass_ == "key_gradient")
FUNCTIONS = ("KEEP", "STRIP", "ENDS", "SEEN", "CHANGE", "BACK", "PUSH")  # of `DeviceCode`
GRADIENTS = {"dq": "grad0", "dk": "grad1", "dv": "grad2"}  # by number of the operand


@define(eq=False)
class LaunchList:
    """The list of launches while it grows, with its buffers and lists of tiles."""

    problem: Problem
    target: Target
    code: DeviceCode
    precision: Precision = "ieee"
    variant: str | None = None
    most: int | None = None
    invariant: bool = False
    lying: Lying = field(default=Factory(lambda x: Lying.dense(x.problem), takes_self=True))
    push: Push | None = None
    notes: list[str] = field(factory=list)
    launches: list[Launch] = field(factory=list)
    buffers: dict[str, Buffer] = field(factory=dict)
    tables: dict[str, torch.Tensor] = field(factory=dict)
    lists: dict[tuple[int, int, bool], tuple[Pointers, Fixed]] = field(factory=dict)

    def tiling(self, pass_: Pass) -> Tiling:
        """The tile of a pass with many programs, or of the same pass in a direction."""
        if self.push is None:
            options = self.variant, self.lying.packed is None
            return choose_tiling(self.lying.flat, self.target, pass_, *options)
        return choose_push_tiling(self.problem, self.target, PUSHED[pass_], self.variant)

    def tilings(self, pass_: Pass) -> tuple[Tiling, Tiling | None]:
        """The tile of `tiling` or another for few programs, and one of shorter blocks or None."""
        usual = self.tiling(pass_)
        if self.push is not None or self.variant is not None or self.invariant:
            return usual, None
        return spread_tilings(self.lying.flat, self.target, pass_, usual)

    @cached_property
    def facts(self) -> Fixed:
        """Sizes, strides and constants of the problem, by parameter."""
        p, rate, lying = self.problem, self.problem.node.dropout, self.lying
        sinks, tsinks = p.by_role.sinks, self.push.by_role.sinks if self.push else None
        each = ((name, lying.tables[name]) for name in lying.scales)
        scales = tuple(kernel_strides(lying, *x) for x in each)  # as those of k and v
        pairs = zip(lying.blocks, scales, strict=True)  # a stride of 0: one for all
        blocks = [(n * bool(x[2]), m * bool(x[3])) for (n, m), x in pairs] or [(0, 0)] * 2
        held = [1 + (x.dtype == IN_PAIRS) for x in p.specs[1:3]]  # numbers a byte
        in_eight = bool(scales) and {x.dtype for x in p.specs[1:3]} <= {*NARROW}
        facts = {
            "numbers": self.code.numbers or None,
            "GROUP": p.H // p.G,
            "H": p.H,
            "G": p.G,
            "M": p.M,
            "N": p.N,
            "EVEN": self.is_even(),
            "scale": p.node.scale,
            "keep_scale": 1 / (1 - rate) if rate < 1 else 0.0,
            "threshold": threshold(rate),
            "origin": flat_origin(p.node.origin),
            "D": p.D,
            "E": p.E,
            "WIDTH_D": held_head_size(p.D),
            "WIDTH_E": padded_head_size(p.E),
            "COLUMNS": 1 if self.push else summed_columns(self.target.sm, p.dtype.itemsize),
            "V_IN_K": reads_v_in_k(p),
            "FOLD": p.folds_scale,
            "BLIND": self.blind if p.grad else 0,
            "SHORT": 0,
            "DROPOUT": rate > 0,
            "UPCAST": self.target.interprets,
            "PRECISION": self.precision,
            "sinks_stride": sinks.strides[0] if sinks else 0,
            "tsinks_stride": tsinks.strides[0] if tsinks else None,
            "scale_strides": scales or None,
            "K_BLOCKS": (*blocks[0], held[0]),
            "V_BLOCKS": (*blocks[1], held[-1]),
            "COMMON": in_eight and not any(x[2] or x[3] or (lying.pages and x[0]) for x in scales),
            "o_strides": kernel_strides(lying, "o", lying.o()),
        }
        large = lying.large | (self.push.large if self.push else {})
        strides = {f"{name}_strides": kernel_strides(lying, name, x) for name, x in large.items()}
        return facts | strides | kernel_sizes(lying)

    def tensors(self) -> Pointers:
        """The tensors of the problem, by parameter."""
        p, lying = self.problem, self.lying
        names = {"q", "k", "v", "delta", "dq", "dk", "dv", *p.node.names, *lying.large}
        names |= {"seed", "offset"} if p.node.dropout else set()
        names |= {"sinks"} if p.node.sinks else set()
        names |= {"rest"} & self.buffers.keys()
        if self.push is not None:
            names |= {*self.push.large, "to", "tlse", "tdelta"}
            names |= {"tsinks"} if self.push.by_role.sinks else set()
        pointers: Pointers = {f"{name}_ptr": GRADIENTS.get(name, name) for name in names}
        pointers |= kernel_pointers(lying)
        groups = {"scales": lying.scales, "data": self.data()}
        return pointers | {name: x for name, x in groups.items() if x}

    def is_even(self) -> bool:
        """True if many keys of operands of masks and modifiers are loaded at once."""
        placed = any({"i", "j"} <= {*axes} for axes in read_axes(self.problem))
        return placed and not self.lying.sides and self.problem.N % SPECIAL == 0

    @property
    def blind(self) -> int:
        """0: every query sees a key. 1: the mask alone may leave one no key. 2: a modifier too."""
        hides = any(m.hides for m in self.problem.node.modifiers)
        return 2 if hides else int(self.problem.mask_has_blind_rows)

    def data(self) -> tuple[str, ...]:
        """Names of operands of modifiers and the mask, in order, and of the tangents among them."""
        count = len(read_specs(self.problem)) + len(tangent_specs(self.push))
        return tuple(f"data.{k}" for k in range(count))

    # The order of programs, and lists of tiles

    def order(
        self, tiling: Tiling, pass_: Pass, pointers: Pointers, splits: int = 1, parts: int = 1
    ) -> Fixed:
        """How many heads are walked together, and the first block.

        pointers: of the lists. They lie in order if planning made them.
        """
        flat, target = self.lying.flat, self.target
        sorted_ = not self.lying.sides and str(pointers.get("lists_ptr")) in self.tables
        return {
            "TOGETHER": heads_together(flat, target, tiling, pass_, splits, parts),
            "LAST_FIRST": not sorted_ and begins_last(self.problem, pass_ == "key_gradient"),
        }

    def listed(self, tiling: Tiling, by_keys: bool) -> tuple[Pointers, Fixed]:
        """The list for a kernel, shared among kernels with equal tiles: its pointer, or None for a
        closed form."""
        mask, sizes = self.problem.node.mask, (tiling.block_m, tiling.block_n, by_keys)
        if mask is None or self.code.strip:
            return {}, {"LISTED": False}
        if sizes not in self.lists:
            self.lists[sizes] = self.make_lists(mask, tiling, by_keys)
        return self.lists[sizes]

    def make_lists(self, mask: Mask, tiling: Tiling, by_keys: bool) -> tuple[Pointers, Fixed]:
        """Add the list, or the launches of each call for it if data decide the tiles, or
        planning would take long."""
        p, lists = self.problem, None
        name = f"lists{len(self.buffers) + len(self.tables)}"
        if blocks(p.M, tiling.block_m) > MOST_AHEAD or needs_of(mask):
            with suppress(Untraceable):  # else ahead, for whatever the data may be
                own = self.data()[: len(read_specs(p))]
                lists = DeviceLists.plan(name, p, tiling, by_keys, own)
        if lists is None:
            first = not self.lying.sides
            self.tables[name] = list_ahead(p, tiling, by_keys, longest_first=first)
            shape = (1, 1, *self.tables[name].shape)
        else:
            self.buffers |= lists.buffers
            self.launches += lists.launches
            shape = lists.shape
        strides = dense_strides(shape)[:3]
        strides = tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=False))
        return {"lists_ptr": name}, {"lists_strides": strides, "LISTED": True}

    def launch(
        self, kernel: str, lines: int, tile: Tiling, own: Pointers | None = None,
        fixed: Fixed | None = None, texts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Add a launch of one program for each line. Of the problem's tensors, facts and functions,
        and of its own after them, a kernel takes those that it declares; None for any other."""
        takes, code, own, fixed = parameters(kernel), self.code, own or {}, fixed or {}
        facts = self.facts | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n} | fixed
        tensors = {name: x for name, x in self.tensors().items() if name not in fixed} | own
        tensors = {name: tensors[name] for name in takes if name in tensors}
        sources = {name: getattr(code, name.lower()) for name in FUNCTIONS} | dict(texts or {})
        sources = {name: sources[name] for name in takes if name in sources}
        tiles = self.describe(tile, [x for x in ["q", "k", "v", "do"] if f"{x}_desc" in takes])
        others = [name for name in takes if name not in {*tensors, *sources, *tiles}]
        rest = {name: facts.get(name) for name in others}
        if tile.spills:
            some = f"{kernel}: registers run short, and up to {tile.spills:,} bytes of a thread's"
            self.notes.append(f"{some} lie in memory; smaller tiles are predicted to be slower")
        self.launches.append(Launch(kernel, lines, tensors, rest, sources, *tile.options, tiles))

    def describe(self, tile: Tiling, names: Sequence[str]) -> dict[str, Descriptor]:
        """Operands in tiles, by parameter, as far as the copy engine reads them."""
        if self.lying.packed is not None or self.code.ends:  # the engine knows no lengths of them
            return {}
        if self.push is not None or not copies_tiles(self.problem, self.target):
            return {}
        specs = self.lying.large
        rows = {"q": tile.block_m, "k": tile.block_n, "v": tile.block_n, "do": tile.block_m}
        copied = {n: specs[n] for n in names if n in specs and is_copied_in_tiles(specs[n])}
        widths = {name: padded_head_size(x.shape[3]) for name, x in copied.items()}
        return {
            f"{name}_desc": Descriptor.tiles(name, x, rows[name], widths[name])
            for name, x in copied.items()
        }


# Rows of weights that a backward sums again: see kernels/weight_sums.py

# By bytes of an element: the |lse| whose rounding, 2^-24 of it at most, shows beside other errors:
# in float32 as on CPUs; in half precision beside the weights' rounding, at least 2^-12 of them.
FAR_LSE = {4: 2.0**5, 2: 2.0**10}
LOG_OF_KEYS = 21  # more than the logarithm of the most keys, 2^30
DIAGONAL, ALL = 1, 2  # the rows with delta = sum_j p z dp
COTANGENTS = ("do_ptr", "seed_ptr", "offset_ptr")  # read to overwrite delta


def may_be_far(problem: Problem) -> bool:
    """True if rows of a gradient may have too large an lse: modifiers may add any number.

    Scores of products alone were rounded by as much as their lse, and a soft cap holds scores
    small. lse of a part belongs to more keys than are here.
    """
    node, limit = problem.node, FAR_LSE[problem.dtype.itemsize]
    if not node.modifiers or node.part:
        return False
    last = node.modifiers[-1]
    capped = isinstance(last, SoftCap) and last.cap + LOG_OF_KEYS <= limit
    return node.sinks or not capped


def add_weight_sums(plan: LaunchList) -> None:
    """Add the launch, for a gradient in need of it."""
    p, lying, pass_ = plan.problem, plan.lying, PASS_OF["query_gradient"]
    weighed = 0  # or the rows with sum_j p z dp as delta, DIAGONAL or ALL
    if (p.gathers or p.drops_rounded) and "do" in lying.large and plan.push is None:
        # The keys that a cache has room for may not decide it, and listed tiles may follow them.
        weighed = ALL if p.gathers or plan.invariant else DIAGONAL
    if may_be_far(p):
        plan.buffers["rest"] = Buffer(row_lines(lying), plan.buffers["delta"].dtype)
    elif not weighed:
        return
    tile, _ = plan.tilings(pass_)
    lists, listed = plan.listed(tile, by_keys=False)
    fixed: Fixed = listed | {"WEIGHED": weighed, "FAR_LSE": FAR_LSE[p.dtype.itemsize]}
    fixed |= {} if weighed else dict.fromkeys(COTANGENTS)
    plan.launch("sum_weights", row_programs(lying, tile.block_m), tile, lists, fixed)
