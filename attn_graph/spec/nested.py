"""Values of a class within other values: in tuples, dicts and fields of attrs classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


def nested_values(value: object, kind: type[T]) -> Iterator[T]:
    """Every value of a class in a value: itself, or what it is made of."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from nested_values(part, kind)
    elif isinstance(value, Mapping):
        yield from nested_values(tuple(value.values()), kind)
    elif attrs.has(type(value)):
        for x in attrs.fields(type(value)):  # type: ignore[arg-type]  # it has some
            yield from nested_values(getattr(value, x.name), kind)


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
