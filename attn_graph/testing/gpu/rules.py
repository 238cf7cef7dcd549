"""The table of instructions: each is a function, and a form with the kinds of its operands.

A form reads `results <- operands`. A kind of operand is a PTX type (`u32`, `f32`, `pred`), or
`u32*` for a vector; `@` is an address in memory, `@map` a tensor map with coordinates, `#` a number
in the text, `param` a place among the parameters; `_` changes no result, and the function lacks
it. A `?` after it marks it as optional.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

Array = npt.NDArray[Any]  # one element for each thread
Arrays = tuple[Array, ...]
DType = np.dtype[Any]
Function = TypeVar("Function", bound=Callable[..., Any])
any_of = np.count_nonzero  # of flags: a fifth of the time of any(), at the size of a program

DTYPES: dict[str, DType] = {
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"f{n // 8}") for n in (16, 32, 64)},
    "bf16": np.dtype("u2"),  # its bits
    "f32x2": np.dtype("u8"),  # two of them side by side
    "pred": np.dtype("?"),
}


@final
@frozen
class Rule:
    """How an instruction is executed.

    call: a function of the values of its operands; with `machine`, of the program and the threads
    before these. waits: it may hold threads back, and returns those that go on.
    """

    call: Callable[..., Any]
    results: tuple[str, ...]
    operands: tuple[str, ...]
    machine: bool = False
    waits: bool = False


VALUES: dict[str, Rule] = {}
ACTIONS: list[tuple[re.Pattern[str], Rule]] = []


def read_form(form: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Kinds of results, and of operands."""
    results, _, operands = form.rpartition("<-")
    return tuple(results.split()), tuple(operands.split())


def values(
    form: tuple[str, str],
    functions: Mapping[str, Callable[..., Any]],  # Any: arrays, and a dtype
) -> None:
    """Define instructions whose results depend on their operands alone, of one form.

    `values(("T <- T T", "u32 f32"), {"add.T": add})` defines two. `"u16/u32"` also gives a second
    type W. An operand `to` is the dtype of the result. Several names of an instruction have spaces
    between them.
    """
    for types in form[1].split() or [""]:
        bound = dict(zip("TW", types.split("/"), strict=False)) if types else {}
        results, operands = (
            tuple(bound.get(kind, kind) for kind in kinds) for kinds in read_form(form[0])
        )
        for names, function in functions.items():
            if operands[-1] == "to":
                rule = Rule(partial(function, to=DTYPES[results[0]]), results, operands[:-1])
            else:
                rule = Rule(function, results, operands)
            for opcode in names.split():
                VALUES[".".join(bound.get(word, word) for word in opcode.split("."))] = rule


def action(opcode: str, form: str = "", *, waits: bool = False) -> Callable[[Function], Function]:
    """Define instructions that touch memory, or other threads; opcode: a regular expression.

    Its named groups are keyword arguments of the function; in the form `{type}` is one of them.
    """

    def define(function: Function) -> Function:
        results, operands = read_form(form)
        rule = Rule(function, results, operands, machine=True, waits=waits)
        ACTIONS.append((re.compile(opcode), rule))
        return function

    return define


@cache
def find_rule(opcode: str) -> Rule | None:
    if opcode in VALUES:
        return VALUES[opcode]
    for pattern, rule in ACTIONS:
        if match := pattern.fullmatch(opcode):
            return bind(rule, match.groupdict())
    return None


def bind(rule: Rule, groups: dict[str, str | None]) -> Rule:
    """A rule with the groups of its opcode filled in."""
    return evolve(
        rule,
        call=partial(rule.call, **groups) if groups else rule.call,
        results=tuple(kind.format(**groups) for kind in rule.results),
        operands=tuple(kind.format(**groups) for kind in rule.operands),
    )
