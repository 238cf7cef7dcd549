"""The table of instructions: each is a function, and a form with the kinds of its operands.

A form reads `results <- operands`. A kind of operand is a PTX type (`u32`, `f32`, `pred`), or
`u32*` for a vector; `@` is an address in memory, `@map` a tensor map with coordinates, `#` a number
in the text, `param` a place among the parameters. A `?` after it marks it as optional.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

Array = npt.NDArray[Any]  # one element for each thread
DType = np.dtype[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

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


def value(opcodes: str, form: str = "", **types: str) -> Callable[[Function], Function]:
    """Define instructions whose results depend on their operands alone.

    `value("add.T", T="u32 f32")` defines two. Without a form all operands are of type T. Several
    lists of types go in step. A function with a parameter `to` gets the dtype of its result.
    """

    def define(function: Function) -> Function:
        parameters = signature(function).parameters
        plain = "T <- " + "T " * len(parameters)
        rows = zip(*map(str.split, types.values()), strict=True) if types else [()]
        for bound in (dict(zip(types, row, strict=True)) for row in rows):
            results, operands = (
                tuple(bound.get(kind, kind) for kind in kinds) for kinds in read_form(form or plain)
            )
            call = partial(function, to=DTYPES[results[0]]) if "to" in parameters else function
            for opcode in opcodes.split():
                name = ".".join(bound.get(word, word) for word in opcode.split("."))
                VALUES[name] = Rule(call, results, operands)
        return function

    return define


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
