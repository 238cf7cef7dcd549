"""Masks and modifiers as Triton functions, traced from the single definition of each.

Every function takes the scalars b and h, i and j broadcasting to a tile, the sizes M and N, the
pointers `data` and the integers `numbers`. Equal texts give one function, so a kernel is compiled
once for all graphs with equal masks up to lengths.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any, final

import torch
from attrs import field, frozen

from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.storage.packed import LEAVES, LENGTHS, and_parts
from attn_graph.ir.storage.paging import bound_seen_keys
from attn_graph.ir.terms.relative import MODIFIERS
from attn_graph.lowering.codegen.bounds import keep_by_bounds
from attn_graph.lowering.codegen.symbols import (
    TRITON,
    Array,
    Code,
    Dialect,
    Numbers,
    Size,
    Symbol,
)
from attn_graph.lowering.problem import Problem, read_specs
from attn_graph.machine.cache import remember
from attn_graph.machine.imports import load_modules
from attn_graph.masks import Mask
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.places import Place, Untraceable, trace_definition
from attn_graph.spec import INF, MOST_INT32, TensorSpec

WHERE, ENTRY = "b, h, i, j, M, N, data, numbers", "b, M, N, data, numbers"
UNBOUNDED = ("-FAR", "FAR", "N", "M")  # the bounds of an open strip; FAR: kernels/common.py

Arrays = Mapping[str, Array | Size]
Sizes = Mapping[str, str]  # lengths known to kernels, by name: "M" or "N"
Moved = Sequence[Mapping[str, TensorSpec]]  # for each modifier, tangents of its tensors, by name


@final
@frozen
class Contribution:
    """The share of each place in the gradient of one tensor of a modifier.

    source: the text of the function for it. axes: the gradient's, of "bhij"; shares are summed
    along the others. spec: of the tensor. column: of a table, the text of the function for a
    place's column, a function of j - i. places: of a table, the operand that has the columns.
    """

    source: str
    axes: str
    spec: TensorSpec
    column: str = ""
    places: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if kernels store the gradient itself, not sums still to add up."""
        return {*"ij"} <= {*self.axes} and self.places is None


@final
@frozen
class DeviceCode:
    """An attention's mask and modifiers as kernels take them.

    numbers: the integers to pass. Then texts of functions, "" for none: keep (the mask, false past
    the last key), keep_by_keys (for tiles with keys as rows), strip (its low, high, keys and rows),
    ends (the queries and keys before its lengths), seen (the first key in pages that is seen, and
    their end), change (all modifiers), back (ds back through them, in forward mode with its
    tangent), push (the tangent of the scores through them). contributions: their summands to an
    operand's gradient or its tangent, by number of the operand.
    """

    numbers: tuple[int, ...]
    keep: str = ""
    keep_by_keys: str = ""
    strip: str = ""
    ends: str = ""
    seen: str = ""
    change: str = ""
    back: str = ""
    push: str = ""
    contributions: Mapping[int, Contribution] = field(factory=dict, eq=False)


@final
@frozen(eq=False)
class Tracer:
    """Traces one problem's mask and modifiers.

    strides: of each tensor, as code. moved: in forward mode, the tangents of the tensors of each
    modifier, by name, after all tensors. sizes: the mask's lengths known to kernels as M or N.
    paged: keys lie in pages. dialect: of the functions' language. array: their form of a tensor.
    """

    problem: Problem
    numbers: Numbers
    strides: tuple[tuple[str, ...], ...]
    moved: Moved | None = None
    sizes: Sizes = field(factory=dict)
    paged: bool = False
    dialect: Dialect = TRITON
    array: Callable[..., Array] = Array

    @classmethod
    def of(
        cls, problem: Problem, moved: Moved | None = None, *, sizes: Sizes | None = None,
        paged: bool = False,
    ) -> Tracer:  # fmt: skip
        """A tracer. Its numbers begin with the strides of all operands of masks and modifiers."""
        numbers = Numbers()
        tangents = (spec for tensors in moved or () for spec in tensors.values())
        specs = [*read_specs(problem), *tangents]  # in the order of the operands
        pairs = zip(problem.node.modifiers, moved or (), strict=moved is not None)
        moved_axes = (x.needs[name].axes for x, tensors in pairs for name in tensors)
        axes = [*read_axes(problem), *moved_axes]
        strides = tuple(
            numbers.add_strides(spec.strides, kernels_apart={"i", "j"} <= {*each})
            for spec, each in zip(specs, axes, strict=True)
        )
        return cls(problem, numbers, strides, moved, sizes or {}, paged)

    def trace(self) -> DeviceCode:
        """All functions of the problem. Raises Untraceable for code beyond tracing."""
        texts = {"keep": self.keep(False), "strip": self.strip(), "ends": self.ends()}
        texts |= {"seen": self.seen()} if self.paged else {}
        steps, moves = bool(self.problem.node.modifiers), self.moved is not None
        texts["change"] = self.change()
        if steps and moves:
            texts["push"] = self.push()
        if self.problem.grad is not None:
            texts["keep_by_keys"] = self.keep(True)
        if steps and self.problem.grad is not None:
            texts["back"] = self.bend() if moves else self.back()
        contributions = dict(self.contributions())
        return DeviceCode(tuple(self.numbers.values), **texts, contributions=contributions)

    def start(self) -> Code:
        """The code of a function, still empty."""
        p, half = self.problem, self.problem.dtype.itemsize == 2
        return Code(self.numbers, half, max(p.B, p.H, p.M, p.N), self.dialect)

    def place(self, code: Code) -> Place:
        """The symbols for a place: b, h, i and j."""
        b, h, i, j = (code.argument(axis) for axis in "bhij")
        return Place(b, h, i, j, self.problem.H, self.problem.M, self.problem.N)

    def arrays(self, code: Code) -> tuple[list[Arrays], Arrays]:
        """Each modifier's tensors, and the mask's, by name."""
        operands, node = self.problem.by_role, self.problem.node
        groups, owners = (*operands.modifiers, operands.mask), (*node.modifiers, node.mask)
        *arrays, mask = self.number_arrays(code, groups, 0, owners)
        pairs = [(name, x) for name, x in self.sizes.items() if name in mask]
        return arrays, {**mask, **{name: Size(code, x, mask[name].shape) for name, x in pairs}}

    def tangents(self, code: Code) -> list[Arrays]:
        """Tangents of each modifier's tensors, by name."""
        owners = self.problem.node.modifiers
        return self.number_arrays(code, self.moved or (), len(read_specs(self.problem)), owners)

    def number_arrays(
        self, code: Code, groups: Moved, first: int, owners: Sequence[Mask | Modifier | None]
    ) -> list[Arrays]:
        """Tensors by name as code reads them, numbered from `first` in their order. owners: who
        reads each group."""
        arrays: list[Arrays] = []
        slots = count(first)
        for tensors, owner in zip(groups, owners, strict=bool(groups)):
            each: dict[str, Array | Size] = {}
            for name, spec in tensors.items():
                n, is_long, most = next(slots), reach(spec) > MOST_INT32, element_reach(spec, owner)
                each[name] = self.array(
                    code, n, spec.shape, spec.dtype, self.strides[n], is_long, reach=most
                )
            arrays.append(each)
        return arrays

    def keep(self, by_keys: bool) -> str:
        """The mask's `keep`, for tiles with queries or keys as rows; "" without a mask."""
        mask = self.problem.node.mask
        if mask is None:
            return ""
        code = self.start()
        at = self.place(code).reading(self.arrays(code)[1])
        return code.write_function("keep", WHERE, keep_by_bounds(mask, at, code, by_keys))

    def strip(self) -> str:
        """The mask's strip; "" if the mask is none."""
        mask, code = self.problem.node.mask, self.start()
        if mask is None:
            return ""
        strip = trace_definition(mask.strip, self.place(code).reading(self.arrays(code)[1]))
        if strip is None:
            return ""
        pairs = zip((strip.low, strip.high, strip.keys, strip.rows), UNBOUNDED, strict=True)
        bounds = (code.argument(far) if x is None else self.runtime(code, x) for x, far in pairs)
        return code.write_function("strip", ENTRY, *bounds)

    def ends(self) -> str:
        """The numbers of queries and keys by the mask's lengths; "" if kernels know them."""
        parts = and_parts(self.problem.node.mask)
        ended = [LENGTHS[side] for side, leaf in LEAVES.items() if leaf in parts]
        ended = [name for name in ended if name not in self.sizes]
        if not ended:
            return ""
        code = self.start()
        at = self.place(code).reading(self.arrays(code)[1])
        values = [
            at.load(name, at.b) if name in ended else code.argument(size)
            for name, size in zip(LENGTHS.values(), "MN", strict=True)
        ]
        return code.write_function("ends", ENTRY, *values)

    def seen(self) -> str:
        """The keys that some query of a batch entry sees; "" if lengths alone bound them."""
        code, mask = self.start(), self.problem.node.mask
        at = self.place(code).reading(self.arrays(code)[1])
        others = (part.strip for part in and_parts(mask) if part not in LEAVES.values())
        if all(trace_definition(strip, at) is None for strip in others):
            return ""
        ends = (self.runtime(code, x) for x in bound_seen_keys(mask, at))
        return code.write_function("seen", ENTRY, *ends)

    def runtime(self, code: Code, x: int | Symbol) -> Symbol:
        """An integer as a symbol, read at run time."""
        return x if isinstance(x, Symbol) else code.argument(self.numbers.add(x), axes="b")

    def axes(self) -> frozenset[str]:
        """The axes of "bhij" read by the modifiers and the mask. Raises Untraceable."""
        code, mask = self.start(), self.problem.node.mask
        axes = self.chain(code, code.argument("s", "float"))[-1].axes - {"s"}
        if mask is None:
            return axes
        keep = trace_definition(mask.keep, self.place(code).reading(self.arrays(code)[1]))
        if not isinstance(keep, bool | Symbol):
            raise Untraceable(f"a mask keeps {keep!r}, which is not computed from a place")
        return axes | (keep.axes if isinstance(keep, Symbol) else frozenset())

    def chain(self, code: Code, s: Symbol) -> list[Symbol]:
        """The scores before, between and after the modifiers."""
        at, steps, node = self.place(code), [s], self.problem.node
        for modifier, data, restores in zip(
            node.modifiers, self.arrays(code)[0], node.restores, strict=True
        ):
            before = steps[-1]
            after = as_symbol(trace_definition(modifier.change, before, at.reading(data)))
            steps.append((before == -INF).where(-INF, after) if restores else after)
        return steps

    def change(self) -> str:
        """All modifiers as one function of the scores; "" without modifiers."""
        if not self.problem.node.modifiers:
            return ""
        code = self.start()
        return code.write_function("change", f"s, {WHERE}", self.chain(code, scores_code(code))[-1])

    def back(self) -> str:
        """ds before the modifiers, of ds after them; "" if they are equal."""
        code = self.start()
        steps = self.chain(code, scores_code(code))
        ds = self.gradients(code, steps)[0]
        return code.write_function("back", f"ds, s, {WHERE}", ds) if ds.text != "ds" else ""

    def gradients(self, code: Code, steps: list[Symbol]) -> list[Symbol]:
        """ds before, between and after the modifiers."""
        at, steps_back = self.place(code), [code.argument("ds", "float", "bhij")]
        node, arrays = self.problem.node, self.arrays(code)[0]
        each = zip(node.modifiers, arrays, steps[1:], node.restores, strict=True)
        for modifier, data, after, restores in reversed([*each]):
            here = at.reading(data)
            steps_back.insert(0, self.back_through(modifier, steps_back[0], after, here, restores))
        return steps_back

    def push(self) -> str:
        """ts after the modifiers, of ts before them, in forward mode; "" if they are equal."""
        code = self.start()
        ts = self.pushed(code, self.chain(code, scores_code(code)))[-1]
        return code.write_function("push", f"ts, s, {WHERE}", ts) if ts.text != "ts" else ""

    def pushed(self, code: Code, steps: list[Symbol]) -> list[Symbol]:
        """ts before, between and after the modifiers."""
        at, ts = self.place(code), [code.argument("ts", "float", "bhij")]
        node, arrays, moved = self.problem.node, self.arrays(code)[0], self.tangents(code)
        each = zip(node.modifiers, arrays, moved, steps[1:], node.restores, strict=True)
        for modifier, data, tangents, after, restores in each:
            here = at.reading(data)
            t = self.back_through(modifier, ts[-1], after, here, restores)
            ts.append(spread_symbol(modifier, t, tangents, here) if tangents else t)
        return ts

    def back_through(
        self, modifier: Modifier, ds: Symbol, after: Symbol, at: Place, restores: bool
    ) -> Symbol:
        """ds before a modifier with result `after`."""
        gradient = as_symbol(trace_definition(modifier.back, ds, after, at))
        return (after == -INF).where(0.0, gradient) if masks_back(modifier, restores) else gradient

    def bend(self) -> str:
        """ds and tds before the modifiers, of both after them; "" if they are equal."""
        code = self.start()
        ds, tds = self.bent(code, self.chain(code, scores_code(code)))[0]
        if (ds.text, tds.text) == ("ds", "tds"):
            return ""
        return code.write_function("bend", f"ds, tds, s, ts, {WHERE}", ds, tds)

    def bent(self, code: Code, steps: list[Symbol]) -> list[tuple[Symbol, Symbol]]:
        """ds and tds before, between and after the modifiers."""
        at, ts = self.place(code), self.pushed(code, steps)
        pairs = [(code.argument("ds", "float", "bhij"), code.argument("tds", "float", "bhij"))]
        node, arrays = self.problem.node, self.arrays(code)[0]
        each = [*zip(node.modifiers, arrays, steps[1:], ts[1:], node.restores, strict=True)]
        for modifier, data, after, t, restores in reversed(each):
            (ds, tds), here = pairs[0], at.reading(data)
            back = partial(self.back_through, modifier, after=after, at=here, restores=restores)
            bent = bend_symbol(modifier, ds, t, after, here)
            before = back(tds)
            if bent is not None:
                bent = (after == -INF).where(0.0, bent) if masks_back(modifier, restores) else bent
                before = before + bent
            pairs.insert(0, (back(ds), before))
        return pairs

    def contributions(self) -> Iterator[tuple[int, Contribution]]:
        """Number and contribution of each operand of a modifier with a wanted gradient."""
        problem, n = self.problem, 3
        for k, modifier in enumerate(problem.node.modifiers):
            for name in modifier.needs:
                if problem.grad is not None and problem.grad.wants[n]:
                    yield n, self.collect(k, name, n)
                n += 1

    def collect(self, k: int, name: str, n: int) -> Contribution:
        """The contribution of each place to the gradient of one tensor of modifier k, operand n, or
        to the gradient's tangent."""
        code, spec = self.start(), self.problem.specs[n]
        modifier, steps = self.problem.node.modifiers[k], self.chain(code, scores_code(code))
        if self.moved is None:
            ds, arguments = self.gradients(code, steps)[k + 1], f"ds, s, {WHERE}"
        else:
            _, ds = self.bent(code, steps)[k + 1]
            arguments = f"ds, tds, s, ts, {WHERE}"
        first = () if self.moved is None else (code.argument("ds"),)
        total, at = Total(spec.shape), self.place(code).reading(self.arrays(code)[0][k])
        trace_definition(modifier.collect, {name: total}, ds, at)
        share = total.sum[0] if total.sum else ds * 0.0
        pairs = zip(total.axes, spec.shape, strict=False)
        axes = "".join(a for a, n in pairs if n != 1)
        source = code.write_function("collect", arguments, *first, share)
        if not total.column:
            return Contribution(source, axes, spec)
        if "places" in modifier.needs:
            return Contribution(source, axes + "ij", spec, places=n + 1)
        column = code.write_function("column", WHERE, *total.column)
        return Contribution(source, axes, spec, column)


@final
@frozen(eq=False)
class Total:
    """Stands for the gradient of a tensor in `collect` of a modifier.

    sum: the sum so far, one symbol or none. axes: its axes, of "bhij"; "-" for an axis of one
    element. column: of a table, the column of a place, one symbol or none.
    """

    shape: tuple[int, ...]
    sum: list[Symbol] = field(factory=list)
    axes: list[str] = field(factory=list)
    column: list[Symbol] = field(factory=list)

    def add_at(self, share: Symbol, h: Symbol, n: Symbol) -> None:
        """Add to column n of a table [H|1, entries]: once, unless it has one column."""
        self[h, 0].__iadd__(share)
        if self.shape[1] != 1:
            self.column.append(n)

    def __getitem__(self, index: tuple[object, ...]) -> Total:
        axes = [x.text if isinstance(x, Symbol) else "-" for x in index]
        own = [axis for axis in axes if axis != "-"]
        if own != [axis for axis in "bhij" if axis in own] or self.axes not in ([], axes):
            raise Untraceable(
                f"a gradient is collected at {axes}, and only b, h, i, j in this order will do"
            )
        self.axes[:] = axes
        return self

    def __iadd__(self, x: Symbol) -> Total:
        self.sum[:] = [self.sum[0] + x if self.sum else x]
        return self

    def __isub__(self, x: Symbol) -> Total:
        return self.__iadd__(-x)


def masks_back(modifier: Modifier, restores: bool) -> bool:
    """True if a gradient has to be 0 at results of -inf of a step."""
    return restores and not modifier.additive


def spread_symbol(modifier: Modifier, ts: Symbol, tangents: Arrays, at: Place) -> Symbol:
    """A modifier's `spread`. Raises Untraceable without one of its own."""
    if type(modifier).spread is Modifier.spread:
        moved = ", ".join(tangents)
        raise Untraceable(
            f"{type(modifier).__name__} defines no spread(ts, tangents, at): what {moved} adds"
        )
    return as_symbol(trace_definition(modifier.spread, ts, tangents, at))


def bend_symbol(
    modifier: Modifier, ds: Symbol, t: Symbol, after: Symbol, at: Place
) -> Symbol | None:
    """A modifier's `bend`; None if it adds nothing. Raises Untraceable without one."""
    if modifier.additive:
        return None
    if type(modifier).bend is Modifier.bend:
        raise Untraceable(
            f"{type(modifier).__name__} defines no bend(ds, t, s, at), the derivative of back"
        )
    bent = trace_definition(modifier.bend, ds, t, after, at)
    return None if bent is None else as_symbol(bent)


def scores_code(code: Code) -> Symbol:
    """The parameter s of generated functions: the scores of a tile."""
    return code.argument("s", "float", "bhij")


def as_symbol(x: Any) -> Symbol:  # Any: whatever a modifier returns
    """The result of a definition, as a symbol. Raises Untraceable for anything else."""
    if not isinstance(x, Symbol):
        raise Untraceable(f"a modifier returns {x!r}, which is not computed from the scores")
    return x


def read_axes(problem: Problem) -> list[str]:
    """The axes, of "bhij", of the same tensors."""
    node, operands = problem.node, problem.by_role
    each = [*zip(node.modifiers, operands.modifiers, strict=True), (node.mask, operands.mask)]
    return [x.needs[name].axes for x, tensors in each if x is not None for name in tensors]


def element_reach(spec: TensorSpec, owner: Mask | Modifier | None) -> int:
    """The most an integer of a tensor may be, or minus this. A formula or a user's class may read
    any number of its dtype; the library's own read lengths, and numbers to compare."""
    is_known = is_ours(owner) if isinstance(owner, Mask) else type(owner) in MODIFIERS
    if is_known or spec.dtype == torch.bool:
        return MOST_INT32 // 4
    return -torch.iinfo(spec.dtype).min if not spec.dtype.is_floating_point else MOST_INT32


def reach(spec: TensorSpec) -> int:
    """The largest offset of an element, in elements."""
    return sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True) if n)


@remember
def compile_text(text: str) -> Any:  # Any: a function of Triton
    """The Triton function in a text. Triton and tracebacks can read its source."""
    if not text:
        return None
    triton, tl = load_modules("triton"), load_modules("triton.language")
    name = f"<attn_graph {sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": __name__, "tl": tl, **called_functions()}
    exec(compile(text, name, "exec"), names)
    function = next(
        names[line.split("(")[0][4:]] for line in text.splitlines() if line[:4] == "def "
    )
    return triton.jit(function)


def called_functions() -> dict[str, Any]:  # Any: functions of Triton
    """The functions of generated code, by name. The interpreter has no instructions of hardware,
    and takes the precise tanh for all dtypes."""
    jit = load_modules("triton.runtime.jit")
    common, functions = (load_modules(f"attn_graph.kernels.{x}") for x in ("common", "functions"))
    compiles = isinstance(functions.tanh, jit.JITFunction)
    fast_tanh = functions.fast_tanh if compiles else functions.tanh
    names = {"floor_div": functions.floor_div, "tanh": functions.tanh, "fast_tanh": fast_tanh}
    return names | {"FAR": common.FAR}
