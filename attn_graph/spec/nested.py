"""Values of a class within other values: in tuples, dicts and fields of attrs classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


def nested_values(value: object, kind: type[T]) -> Iterator[T]:
    """Every value of a class in a value: itself, or what it is made of; in order."""
    waiting: list[Any] = [value]
    while waiting:
        x = waiting.pop()
        if isinstance(x, kind):
            yield x
        elif (read := part_reader(x.__class__)) is not None:
            waiting += reversed(read(x))


@cache
def part_reader(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:  # Any: of that class
    """What gives the parts of values of a class; None of those that are not made of any."""
    if issubclass(kind, tuple):
        return tuple
    if issubclass(kind, Mapping):
        return lambda x: tuple(x.values())
    if attrs.has(kind):
        names = [x.name for x in attrs.fields(kind)]
        return lambda x: tuple([getattr(x, name) for name in names])
    return None


def replace_nested(
    value: Any,  # Any: of whatever kind
    kind: type[T],
    change: Callable[[T], object],
) -> Any:  # Any: of the same kind
    """The same value with something in place of each value of a class in it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple([replace_nested(part, kind, change) for part in value])
    if isinstance(value, Mapping):
        return {name: replace_nested(part, kind, change) for name, part in value.items()}
    if attrs.has(type(value)) and next(nested_values(value, kind), None) is not None:
        fields = [x for x in attrs.fields(type(value)) if x.init]
        parts = {x.alias: getattr(value, x.name) for x in fields}
        return type(value)(**{n: replace_nested(x, kind, change) for n, x in parts.items()})
    return value
