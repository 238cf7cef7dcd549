"""Masks and modifiers as Triton functions, traced from the one definition that each has.

Every function takes b and h, scalars, i and j, which broadcast to a tile, the sizes M and N, the
pointers `data` and the integers `numbers`. Those whose text is equal are one function, so that a
kernel is compiled once for all graphs that differ in lengths alone.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, final

from attrs import field, frozen

from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.symbols import Array, Code, Numbers, Symbol, Untraceable
from attn_graph.masks.places import Place
from attn_graph.spec import INF, TensorSpec

WHERE = "b, h, i, j, M, N, data, numbers"
UNBOUNDED = ("-FAR", "FAR", "N", "M")  # for what a strip leaves open; FAR is of kernels/common.py
LONG = 2**31 - 1  # the largest offset that 32 bits hold

Arrays = Mapping[str, Array]


@final
@frozen
class Collected:
    """The gradient of one tensor of a modifier: what each place adds, and along which axes it goes
    there; along the others of "bhij" it is summed."""

    source: str
    axes: str
    spec: TensorSpec


@final
@frozen
class DeviceCode:
    """What kernels need to know of an attention's mask and modifiers.

    `numbers`: the integers to pass. Texts of functions: keep, strip (low, high, keys, rows), change
    (all modifiers), back (their derivative); "" where there is nothing to say. `collected`: by
    number of the operand.
    """

    numbers: tuple[int, ...]
    keep: str = ""
    strip: str = ""
    change: str = ""
    back: str = ""
    collected: Mapping[int, Collected] = field(factory=dict, eq=False)


@final
@frozen(eq=False)
class Tracer:
    """Traces one problem's mask and modifiers."""

    problem: Problem
    numbers: Numbers

    @classmethod
    def of(cls, problem: Problem) -> Tracer:
        return cls(problem, Numbers([s for x in read_specs(problem) for s in x.strides]))

    def code(self) -> DeviceCode:
        """Everything about the problem. Raises Untraceable where a definition can't be traced."""
        found = {"keep": self.keep(), "strip": self.strip(), "change": self.change()}
        if self.problem.grad is not None:
            found["back"] = self.back()
        collected = dict(self.collected())
        return DeviceCode(tuple(self.numbers.found), **found, collected=collected)

    def place(self, code: Code) -> Place:
        """The place of a tile's scores."""
        b, h, i, j = (code.argument(axis) for axis in "bhij")
        return Place(b, h, i, j, self.problem.H, self.problem.M, self.problem.N)

    def arrays(self, code: Code) -> tuple[list[Arrays], Arrays]:
        """What each modifier reads, and what the mask reads, by name."""
        given = self.problem.node.split(self.problem.specs)
        slot, at = 0, 0
        found: list[dict[str, Array]] = []
        for operands in (*given.modifiers, given.mask):
            found.append({})
            for name, spec in operands.items():
                array = Array(code, slot, spec.shape, spec.dtype, at, reach(spec) > LONG)
                found[-1][name] = array
                slot, at = slot + 1, at + len(spec.shape)
        return list(found[:-1]), found[-1]

    def keep(self) -> str:
        mask, code = self.problem.node.mask, Code(self.numbers)
        if mask is None:
            return ""
        kept = mask.keep(self.place(code).reading(self.arrays(code)[1]))
        if not isinstance(kept, Symbol):
            kept = constant_symbol(code, kept)
        return code.function("keep", WHERE, kept.truth())

    def strip(self) -> str:
        """The mask's strip; "" where it is none."""
        mask, code = self.problem.node.mask, Code(self.numbers)
        at = self.place(code).reading(self.arrays(code)[1])
        strip = mask.strip(at) if mask is not None else None
        if strip is None:
            return ""
        bounds = zip((strip.low, strip.high, strip.keys, strip.rows), UNBOUNDED, strict=True)
        told = [self.runtime(code, x) if x is not None else code.argument(far) for x, far in bounds]
        return code.function("strip", "b, M, N, data, numbers", *told)

    def runtime(self, code: Code, x: int | Symbol) -> Symbol:
        """An integer as one that is read at run time."""
        return x if isinstance(x, Symbol) else code.argument(self.numbers.add(x), axes="b")

    def axes(self) -> frozenset[str]:
        """Which of "bhij" the modifiers depend on, beside the scores."""
        code = Code(self.numbers)
        return self.chain(code, code.argument("s", "float"))[-1].axes - {"s"}

    def chain(self, code: Code, s: Symbol) -> list[Symbol]:
        """The scores before, between and after the modifiers."""
        at, steps, node = self.place(code), [s], self.problem.node
        for modifier, data, restores in zip(
            node.modifiers, self.arrays(code)[0], node.restores, strict=True
        ):
            before = steps[-1]
            after = as_symbol(modifier.change(as_tensor(before), at.reading(data)))
            steps.append((before == -INF).where(-INF, after) if restores else after)
        return steps

    def change(self) -> str:
        code = Code(self.numbers)
        if not self.problem.node.modifiers:
            return ""
        return code.function("change", f"s, {WHERE}", self.chain(code, scores_code(code))[-1])

    def back(self) -> str:
        code = Code(self.numbers)
        steps = self.chain(code, scores_code(code))
        ds = self.gradients(code, steps)[0]
        return code.function("back", f"ds, s, {WHERE}", ds) if ds.text != "ds" else ""

    def gradients(self, code: Code, steps: list[Symbol]) -> list[Symbol]:
        """ds before, between and after the modifiers."""
        at, found = self.place(code), [code.argument("ds", "float", "bhij")]
        node, arrays = self.problem.node, self.arrays(code)[0]
        each = zip(node.modifiers, arrays, steps[1:], node.restores, strict=True)
        for modifier, data, after, restores in reversed([*each]):
            ds = as_symbol(modifier.back(as_tensor(found[0]), as_tensor(after), at.reading(data)))
            if restores and not modifier.additive:
                ds = (after == -INF).where(0.0, ds)
            found.insert(0, ds)
        return found

    def collected(self) -> Iterator[tuple[int, Collected]]:
        """The gradients that are wanted of what modifiers read, by number of the operand."""
        problem, n = self.problem, 3
        for k, modifier in enumerate(problem.node.modifiers):
            for name in modifier.needs:
                if problem.grad is not None and problem.grad.wants[n]:
                    yield n, self.collect(k, name, problem.specs[n])
                n += 1

    def collect(self, k: int, name: str, spec: TensorSpec) -> Collected:
        """What each place adds to the gradient of one tensor of modifier k."""
        code = Code(self.numbers)
        modifier = self.problem.node.modifiers[k]
        ds = self.gradients(code, self.chain(code, scores_code(code)))[k + 1]
        total, at = Total(spec.shape), self.place(code).reading(self.arrays(code)[0][k])
        modifier.collect({name: total}, as_tensor(ds), at)  # type: ignore[dict-item]  # a total
        given = total.sum[0] if total.sum else ds * 0.0
        axes = "".join(a for a, n in zip(total.axes, spec.shape, strict=False) if n > 1)
        return Collected(code.function("collect", f"ds, s, {WHERE}", given), axes, spec)


@final
@frozen(eq=False)
class Total:
    """Stands for the gradient of a tensor, while `collect` adds to it.

    axes: at which of "bhij" it was read, in this order; "-" where it has one element.
    """

    shape: tuple[int, ...]
    sum: list[Symbol] = field(factory=list)
    axes: list[str] = field(factory=list)

    def __getitem__(self, index: tuple[object, ...]) -> Total:
        axes = [x.text if isinstance(x, Symbol) else "-" for x in index]
        own = [axis for axis in axes if axis != "-"]
        if own != [axis for axis in "bhij" if axis in own] or self.axes not in ([], axes):
            raise Untraceable(f"a gradient is collected at {axes}, and can be at b, h, i, j alone")
        self.axes[:] = axes
        return self

    def __iadd__(self, x: Symbol) -> Total:
        self.sum[:] = [self.sum[0] + x if self.sum else x]
        return self

    def __isub__(self, x: Symbol) -> Total:
        return self.__iadd__(-x)


def scores_code(code: Code) -> Symbol:
    """The scores that functions are given."""
    return code.argument("s", "float", "bhij")


def as_tensor(x: Symbol) -> Any:  # Any: a modifier's definition takes it for a tensor
    return x


def as_symbol(x: Any) -> Symbol:  # Any: what a modifier's definition makes of a symbol
    if not isinstance(x, Symbol):
        raise Untraceable(f"a modifier gives {x!r}, which is nothing made of the scores")
    return x


def constant_symbol(code: Code, kept: object) -> Symbol:
    """A constant as a symbol of all places."""
    i, j = code.argument("i"), code.argument("j")
    same = code.line("(i == i) & (j == j)", "bool", (i, j))
    return same if kept else same ^ True


def read_specs(problem: Problem) -> list[TensorSpec]:
    """The specs of all that modifiers and mask read, in the order of the operands."""
    given = problem.node.split(problem.specs)
    return [spec for operands in (*given.modifiers, given.mask) for spec in operands.values()]


def reach(spec: TensorSpec) -> int:
    """The largest offset of an element, in elements."""
    return sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True) if n)


@lru_cache(maxsize=1024)
def compile_text(text: str) -> Any:  # Any: a function of Triton
    """The Triton function of a text; its source can be read by Triton, and by a person."""
    import triton
    import triton.language as tl

    from attn_graph.kernels import common

    if not text:
        return None
    name = f"<attn_graph {sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": __name__, "tl": tl}
    names |= {"FAR": common.FAR, "floor_div": common.floor_div, "tanh": common.tanh}
    exec(compile(text, name, "exec"), names)
    function = next(
        names[line.split("(")[0][4:]] for line in text.splitlines() if line[:4] == "def "
    )
    return triton.jit(function)
