"""Atomic operations on global and shared memory. PTX ISA 9.7.13.5 atom and 9.7.13.6 red.

Programs run one after another, so a program that waits for a later one in the grid's order never
goes on: it is a deadlock here, and may be one on a GPU that is full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attn_graph.testing.gpu.memory import CACHE, Memory
from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.regions import Access
from attn_graph.testing.gpu.rules import DTYPES, VALUES, Array, Arrays, action
from attn_graph.testing.gpu.shared import Shared
from attn_graph.testing.gpu.threads import Threads

Change = Callable[..., Any]  # of arrays, or of single numbers
CHANGES: dict[str, Change] = {  # of what is there, and operands; beside those of VALUES
    "exch": lambda old, new: new,
    "cas": lambda old, known, new: np.where(old == known, new, old),
    "inc": lambda old, most: np.where(old >= most, 0, old + 1),
    "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - 1),
}
WORDS = r"(?:\.(?:relaxed|acquire|release|acq_rel|cta|cluster|gpu|sys))*"
NAME = (
    rf"(?P<before>{WORDS})\.(?P<space>global|shared(?:::cta)?)(?P<after>{WORDS})"
    r"\.(?P<way>add|min|max|and|or|xor|exch|cas|inc|dec)(?:\.noftz)?"
    + CACHE
    + r"(?P<many>\.v[248])?\.(?P<type>b?f16x2|[a-z]+\d+)"
)


def change_of(way: str, kind: str) -> Change:
    """The function of an operation: an instruction on the same type, if there is one."""
    if way in CHANGES:
        return CHANGES[way]
    kind = kind.replace("u", "b").replace("s", "b") if way in ("and", "or", "xor") else kind
    return VALUES[f"{way}.{kind}"].call


@action("atom" + NAME, "{type}* <- @ {type}* {type}*?")
def change(
    m: Program,
    g: Threads,
    address: Array,
    values: Arrays,
    other: Arrays | None = None,
    **words: str | None,
) -> Array:
    """d = what was there; threads change it one after another."""
    at, operands = g.take(address), [g.take(g.stack(x)) for x in (values, other) if x is not None]
    order = {*f"{words['before']}{words['after']}".split(".")}
    change = change_global if words["space"] == "global" else change_shared
    return g.spread(change(m, g, at, operands, order, str(words["way"]), str(words["type"])))


def change_global(
    m: Program, g: Threads, at: Array, operands: list[Array], order: set[str], way: str, type: str
) -> Array:
    """In orders wider than `cta`, programs acquire the past of a release by others."""
    if order & {"acquire", "acq_rel"} and "cta" not in order:
        m.acquire(at)
    who = Access.by(m, "an atomic operation on", g.owners, stores=True, atomic=True, reads=True)
    old, size = np.zeros_like(operands[0]), DTYPES[type].itemsize
    for region, some, offsets in m.part(Memory).split(m, who.text, at, size * len(old)):
        again = bool(region.atomic[offsets // region.unit].any())
        note_order(m, region.name, way, type, offsets, again)
        region.check(m, who.select(some), offsets, size * len(old))
        words = region.words(size).view(DTYPES[type])
        places = offsets // size + np.arange(len(old))[:, None]
        old[:, some] = apply(m, change_of(way, type), words, places, [x[:, some] for x in operands])
    if order & {"release", "acq_rel"} and "cta" not in order:
        m.release_to(at)
    return old


def change_shared(
    m: Program, g: Threads, at: Array, operands: list[Array], order: set[str], way: str, type: str
) -> Array:
    if order & {"acquire", "release", "acq_rel"}:
        m.refuse("an atomic operation on shared memory by which warps wait for each other")
    shared, text, size = m.part(Shared), "an atomic operation", DTYPES[type].itemsize
    offsets = shared.offsets(m, text, at, size * len(operands[0]))
    shared.forget(m, offsets, size * len(operands[0]))
    cells = shared.cells(offsets, size * len(operands[0]))
    again = shared.ledger.add(m, text, g.owners, cells)
    note_order(m, shared.ledger.memory, way, type, offsets, again)
    places = offsets // size + np.arange(len(operands[0]))[:, None]
    words = shared.words(size).view(DTYPES[type])
    return apply(m, change_of(way, type), words, places, operands)


@action("red" + NAME, "<- @ {type}*")
def reduce(
    m: Program,
    g: Threads,
    address: Array,
    values: Arrays,
    **words: Any,  # Any: as above
) -> None:
    """Like atom, without a result."""
    change(m, g, address, values, **words)


def apply(m: Program, change: Change, words: Array, places: Array, given: list[Array]) -> Array:
    """Threads change their places in turn, in an order that a seed draws; what they saw there."""
    seen = np.zeros_like(given[0])
    turns = [*range(places.shape[1])]
    if m.random:
        m.random.shuffle(turns)
    if len({*places[0].tolist()}) == len(turns):  # none meets another
        seen[:] = words[places]
        words[places] = np.stack([change(*x) for x in zip(seen, *given, strict=True)])
        return seen
    for n in turns:
        seen[:, n] = words[places[:, n]]
        words[places[:, n]] = change(seen[:, n], *(x[:, n] for x in given))
    return seen


def note_order(m: Program, name: str, way: str, kind: str, offsets: Array, again: bool) -> None:
    """Note sums of which the last bits depend on their order; again: with earlier ones."""
    if way == "add" and "f" in kind and (again or len({*offsets.tolist()}) < len(offsets)):
        m.note(f"floats are added to {name} in any order, on which the last bits depend")
