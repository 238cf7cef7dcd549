"""Values of a class within tuples, mappings and attrs classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


def nested_values(value: object, kind: type[T]) -> Iterator[T]:
    """Every instance of `kind` in a value, itself included, in order."""
    waiting: list[Any] = [value]
    while waiting:
        x = waiting.pop()
        if isinstance(x, kind):
            yield x
        elif (read := part_reader(x.__class__)) is not None:
            waiting += reversed(read(x))


@cache
def part_reader(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:  # Any: of that class
    """A function from an instance of `kind` to its parts; None if it has none."""
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
    """A copy of `value` with `change` applied to each instance of `kind` in it."""
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
