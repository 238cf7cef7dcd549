"""Tensors compared with specs with named sizes: the sizes' values, and any misfit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch
from attrs import frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.machine.target import Target
from attn_graph.machine.tensors import STARTS, STARTS_HINT, require_as_declared, require_device
from attn_graph.spec import TensorSpec, new_strides
from attn_graph.spec.dims import Dim, NamedSize, are_numbers

Shape = tuple[int, ...]
Layouts = Callable[..., Sequence[tuple[Shape, Shape]]]
Read = tuple[int, int, int, int]  # a tensor's number, an axis, factor and more of n * factor + more


@final
@frozen(eq=False)
class Fit:
    """The requirements of tensors for specs with named sizes.

    reads: for each symbol the axes that give it. read: tensors -> the symbols' values, in order, by
    the first axis of each. lying: `read` for tensors with fitting shapes and strides; None for
    others. Everything else in them is assumed to fit.
    """

    specs: Mapping[str, TensorSpec]
    symbols: tuple[NamedSize, ...]
    target: Target
    reads: tuple[tuple[Read, ...], ...]
    read: Callable[[Sequence[torch.Tensor]], Shape]
    lying: Callable[[Sequence[torch.Tensor]], Shape | None]

    @classmethod
    def of(
        cls, specs: Mapping[str, TensorSpec], symbols: Sequence[NamedSize], target: Target
    ) -> Fit:
        every = [*find_reads([*specs.values()])]
        reads = tuple(tuple(read for name, read in every if name == s.name) for s in symbols)
        firsts = [first for first, *_ in reads]
        lying = compile_fit(symbols, firsts, [*specs.values()])
        return cls(specs, tuple(symbols), target, reads, compile_reads(firsts), lying)

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> Shape:
        """The sizes. Raises PlanMismatchError with every misfit, or PlanTargetError."""
        require_device(tensors, self.target)
        given = dict(zip(self.specs, tensors, strict=True))
        each = zip(self.symbols, self.reads, strict=True)
        known = {s.name: [*self.places(reads, tensors)] for s, reads in each}
        problems = [x for s in self.symbols for x in size_problems(s, known[s.name])]
        if problems:
            raise PlanMismatchError(*problems)
        sizes = {name: next((n for _, n in places), 0) for name, places in known.items()}
        specs = {name: spec.bind(sizes) for name, spec in self.specs.items()}
        require_as_declared(given, specs, self.target)
        return tuple(sizes.values())

    def places(
        self, reads: Sequence[Read], tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, int]]:
        """The axes that give a size, as "k.shape[2]", each with the size there."""
        names = [*self.specs]
        for n, axis, by, more in reads:
            t = tensors[n]
            if isinstance(t, torch.Tensor) and t.ndim == len(self.specs[names[n]].shape):
                yield f"{names[n]}.shape[{axis}]", (t.shape[axis] - more) // by

    def named(self, sizes: Sequence[int]) -> dict[str, int]:
        return {s.name: n for s, n in zip(self.symbols, sizes, strict=True)}


def size_problems(symbol: NamedSize, places: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Problems of a symbol's sizes in tensors: two sizes for it, or one outside its range."""
    if len({n for _, n in places}) > 1:
        values = ", ".join(f"{n} by {place}" for place, n in places)
        starts = any(place.startswith(STARTS) for place, _ in places)
        yield (
            f"{symbol.name}: expected one size wherever it stands, got {values}; pass tensors that "
            f"agree, or declare another Dim{STARTS_HINT * starts}"
        )
    for n in dict.fromkeys(n for _, n in places):
        yield from symbol.problems(n)
        if n < 0:
            yield f"{symbol.name}: expected at least 0, got {n}"


def find_reads(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Read]]:
    """Each name with an axis that gives it: alone, in multiples, or plus a number."""
    for n, spec in enumerate(specs):
        for axis, size in enumerate(spec.shape):
            if isinstance(size, Dim) and size.line is not None:
                symbol, by, more = size.line
                yield symbol.name, (n, axis, by, more)


def read_sizes(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The values of named sizes in fitting tensors."""
    reads = dict(find_reads(specs)).items()
    return {name: (tensors[n].shape[axis] - more) // by for name, (n, axis, by, more) in reads}


def compile_fit(
    symbols: Sequence[NamedSize], reads: Sequence[Read], specs: Sequence[TensorSpec]
) -> Callable[[Sequence[torch.Tensor]], Shape | None]:
    """A function of tensors: their sizes, if each is in its symbol's range and the tensors have the
    specs' shapes and strides; else None. reads: the axis for each symbol.

    Dims print as Python; the compiled check takes half a microsecond a tensor.
    """
    given = "x" * (1 + max(len(s.name) for s in symbols))  # as no size is called
    sizes = []  # each named, and within its symbol's range
    for s, read in zip(symbols, reads, strict=True):
        size = f"({s.name} := {read_text(given, read)})"
        sizes.append(f"{size} in {s.classes}" if s.classes else f"0 <= {size} <= {s.most}")
    layouts = [layout_check(f"{given}[{n}]", spec) for n, spec in enumerate(specs)]
    names = ", ".join(s.name for s in symbols)
    text = f"lambda {given}: ({names},) if {' and '.join(sizes + layouts)} else None"
    return eval(text, {})  # type: ignore[no-any-return]  # of names and numbers


def compile_reads(reads: Sequence[Read]) -> Callable[[Sequence[torch.Tensor]], Shape]:
    """A function of tensors: their sizes."""
    sizes = [read_text("x", read) for read in reads]
    return eval(f"lambda x: ({', '.join(sizes)},)", {})  # type: ignore[no-any-return]  # as above


def read_text(tensors: str, read: Read) -> str:
    """The expression for a size read from tensors."""
    n, axis, by, more = read
    size = f"{tensors}[{n}].shape[{axis}]"
    return size if (by, more) == (1, 0) else f"({size} - {more}) // {by}"


def compile_layouts(names: Sequence[str], specs: Sequence[TensorSpec]) -> Layouts:
    """A function of sizes: shape and strides of each spec."""
    pairs = tuple((spec.shape, spec.strides) for spec in specs)
    return eval(f"lambda {', '.join(names)}: {pairs!r}", {})  # type: ignore[no-any-return]  # as above


def layout_check(tensor: str, spec: TensorSpec) -> str:
    """The expression for one tensor. Strides count along axes of more than one place, in tensors
    with elements. The check for those of a new tensor comes first, as it mostly passes."""
    stride, sizes = f"{tensor}.stride", [*zip(spec.shape, spec.strides, strict=True)]
    each = [
        f"{stride}({axis}) == {step}"
        if are_numbers(size)
        else f"({stride}({axis}) == {step} or {size} == 1)"
        for axis, (size, step) in enumerate(sizes)
        if size != 1
    ]
    new = new_strides(spec)
    all_ = [] if 0 in new else [f"{stride}() == {new}"]
    lies = " or ".join([*all_, " and ".join(each) or "True", f"not {tensor}.numel()"])
    return f"{tensor}.shape == {spec.shape} and ({lies})"
