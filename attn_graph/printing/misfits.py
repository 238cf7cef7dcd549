"""How a tensor does not fit the scores, in words: the axis, both numbers, and the edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from attn_graph.spec import cast_code

LETTERS = {"b": "B", "h": "H", "i": "M", "j": "N"}  # of axes, and the names of their sizes
AXES = {  # one place, and several
    "b": "batch size",
    "d": "head size",
    "h": "head",
    "i": "query",
    "j": "key",
    "x": "block of queries",
    "y": "block of keys",
    "n": "element",
}
SEVERAL = {
    "query": "queries",
    "block of queries": "blocks of queries",
    "block of keys": "blocks of keys",
}
OWNERS = {"b": "q", "h": "q", "i": "q", "j": "k", "d": "q"}  # the tensor that has the size


def count_axes(letter: str, size: int) -> str:
    """The size of an axis in words: "9 keys", "1 head", "batch size 3"."""
    word = AXES[letter]
    if letter in "bd":
        return f"{word} {size}"
    return f"{size} {word if size == 1 else SEVERAL.get(word, f'{word}s')}"


def misfit(axis: int, letter: str, size: int, due: int) -> str:
    """That a tensor has another size than the one that owns the axis."""
    return f"has {count_axes(letter, size)} (axis {axis}), and {OWNERS[letter]} has {due}"


def cast_problem(name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> str:
    """That a tensor has another dtype, and how to change it; "" if it is allowed."""
    if dtype in allowed:
        return ""
    code = next((cast_code(name, x) for x in (torch.float32, *allowed) if x in allowed), "")
    if dtype.is_complex:
        code = f"{name}.real"
    other = ""
    if name == "keep" and dtype.is_floating_point:
        other = "bias= in place of keep= for numbers to add, such as 0 and -inf, or "
    if name == "bias" and dtype == torch.bool:
        other = "keep= in place of bias= for booleans, or "
    return f"is {dtype}, and needs {' or '.join(map(str, allowed))}; write {other}{code}"


def rank_problem(
    name: str,
    shape: Sequence[int],
    letters: str,
    full: Sequence[Any] | None,  # Any: sizes, or their names
    sizes: Mapping[str, int],
    broadcasts: bool = False,
) -> str:
    """That a tensor has other axes than its letters, and how to change that if one way is clear."""
    rank, needed = len(shape), len(letters)
    axes = f"{rank} {'axis' if rank == 1 else 'axes'}"
    due = "" if full is None else f", [{', '.join(map(str, full))}]"
    ways = list_readings(name, shape, sizes) if letters == "bhij" and full else ""
    if not ways and full is not None:
        ways = reshape_code(name, shape, full, broadcasts)
    return f"has {axes}, {[*shape]}, and needs {needed}{due}{ways}"


def reshape_code(
    name: str,
    shape: Sequence[int],
    full: Sequence[Any],  # Any: as above
    broadcasts: bool,
) -> str:
    """The code that gives a tensor its missing axes, or takes those of size 1 away."""
    rank, needed = len(shape), len(full)
    long = tuple(n for n in shape if n != 1)
    if needed == 1 and rank > 1 and len(long) <= 1:
        return f"; write {name}.flatten()"
    if rank > needed and long == tuple(n for n in full if n != 1):
        return f"; write {name}.reshape({', '.join(map(str, full))})"
    missing = needed - rank
    fits = (
        all(
            n == m or isinstance(m, str) or (broadcasts and n == 1)
            for n, m in zip(shape, full[missing:], strict=True)
        )
        if missing > 0
        else False
    )
    if fits and (broadcasts or all(n == 1 for n in full[:missing])):
        return f"; write {name}[{', '.join(['None'] * missing)}]"
    if fits and missing == 1:
        return f"; write {name}.expand({', '.join([str(full[0]), *['-1'] * rank])})"
    return ""


def list_readings(
    name: str,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    names: Mapping[str, str] = LETTERS,
) -> str:
    """The ways to index a tensor of fewer axes to all of them, one for each meaning.

    sizes: of the axes, by letter. names: of these sizes, in the order of the axes. The last axis is
    read as keys if any such meaning fits.
    """
    count = range(len(shape))
    every = combinations(names, len(shape))
    fitting = [x for x in every if all(shape[n] in (1, sizes[x[n]]) for n in count)]
    meanings = [x for x in fitting if x[-1:] == ("j",)] or [x for x in fitting if x]
    apart = {frozenset(x[n] for n in count if shape[n] != 1): x for x in meanings}
    ways = [
        f"{name}{index_axes(x, [*names])} if it is {name_axes(x, shape, names)}"
        for x in reversed(apart.values())
    ]
    return f"; write {' or '.join(ways)}" if ways else ""


def index_axes(axes: Sequence[str], every: Sequence[str]) -> str:
    """The index that inserts the missing axes: "[:, None]"."""
    index = [":" if x in axes else "None" for x in every]
    if [*axes] == [*every[:-1]]:
        return "[..., None]"
    kept = max(n for n, x in enumerate(index) if x == "None") + 1
    return f"[{', '.join(index[:kept])}]"


def name_axes(axes: Sequence[str], shape: Sequence[int], named: Mapping[str, str]) -> str:
    """A shape by the names of its sizes, 1 for an axis that broadcasts: "[B,N]"."""
    names = ("1" if n == 1 else named[x] for x, n in zip(axes, shape, strict=True))
    return f"[{','.join(names)}]"
