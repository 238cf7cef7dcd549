"""Sizes by name: numbers of a shape, known at the call of a plan, and polynomials of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from keyword import iskeyword
from math import prod
from operator import index
from typing import Any, SupportsIndex, TypeVar, final
from unicodedata import normalize

import attrs
import torch
from attrs import frozen

from attn_graph.errors import GraphError, binds, show

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


Sizes = Mapping[str, int]  # values of Dims, by name


def is_flag(value: object) -> bool:
    """True for a boolean of Python, NumPy or PyTorch. It equals 1 or 0 and is not a number."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return False  # numbers that traced code may hold, of which no attribute may be asked
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def to_index(value: object) -> int | None:
    """An integer as an int; None for anything else, booleans too."""
    try:
        return index(value) if isinstance(value, SupportsIndex) and not is_flag(value) else None
    except (TypeError, RuntimeError):  # a class; a tensor of real numbers, or of several
        return None


def is_plain_name(name: str) -> bool:
    """True for an identifier in NFKC form: Python reads its other forms as this one."""
    plain = name.isidentifier() and not iskeyword(name) and name != "__debug__"
    return plain and normalize("NFKC", name) == name


@final
@frozen
class NamedSize:
    """A name with its largest size.

    classes: the sizes allowed, ascending; without classes, every size from 0 to `most`.
    """

    name: str
    most: int
    classes: tuple[int, ...] = ()

    @property
    def symbols(self) -> tuple[NamedSize, ...]:
        return (self,)

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.most

    def bind(self, sizes: Sizes) -> int:
        return sizes[self.name]

    def problems(self, size: int) -> Iterator[str]:
        if size > self.most:
            yield (
                f"{self.name}: expected at most {self.most}, got {size}; declare "
                f'Dim("{self.name}", most={size}), or pass fewer'
            )
        elif self.classes and size not in self.classes:
            fits = next(n for n in self.classes if n >= size)
            yield (
                f"{self.name}: expected one of {', '.join(map(str, self.classes))}, got {size}; "
                f"pass a view of {fits} rows of the buffer, and how many count as lengths"
            )

    def __str__(self) -> str:
        bound = f"classes={self.classes}" if self.classes else f"most={self.most}"
        return f'{self.name} = Dim("{self.name}", {bound})'


@final
@frozen
class Quotient:
    """A Dim divided by a number, rounded down."""

    of: Dim
    by: int

    @property
    def name(self) -> str:
        return (
            f"({self.of} // {self.by})"
            if len(self.of.terms) == 1
            else f"(({self.of}) // {self.by})"
        )

    @property
    def symbols(self) -> tuple[NamedSize, ...]:
        return self.of.symbols

    @property
    def most(self) -> int:
        """Its number for the largest sizes."""
        return int(self.of) // self.by

    @property
    def bounds(self) -> tuple[int, int]:
        least, most = range_of(self.of)
        return least // self.by, most // self.by

    def bind(self, sizes: Sizes) -> int:
        return self.of.bind(sizes) // self.by


Factors = tuple[NamedSize | Quotient, ...]
Terms = tuple[tuple[Factors, int], ...]  # products, each with its number


def dim_code(name: object = "N", most: object = 4096, **named: object) -> str:
    """What to write in place of a Dim that lacks its largest size, or has it by another name."""
    largest = named.get("max", named.get("maximum", most))
    return f'write Dim("{name}", most={show(largest)})'


@final
class Dim(int):
    """A named size in the shape of a TensorSpec: B, M, N, T or the number of pages.

    A graph with Dims has one plan for all sizes up to `most`. A call takes the sizes from the
    shapes of its tensors; equal names must have equal sizes. H, G, D, E and the rows of a page are
    numbers.

    classes: the only sizes allowed, ascending, as from `doubling`; the last is `most`.

    Dims add, subtract, multiply and divide by numbers: starts have `B + 1` elements, and N keys
    `-(-N // 64)` blocks of 64. As an integer, for example in a comparison, a Dim is its `most`.
    Raises GraphError for a name that is not a Python identifier, for `most` below 1 and for
    other arithmetic.
    """

    terms: Terms

    @binds(lambda _, *given, **named: dim_code(*given, **named))
    def __new__(cls, name: str, most: int | None = None, *, classes: Iterable[int] = ()) -> Dim:
        given = tuple(classes) if isinstance(classes, Iterable) else (classes,)
        known = (None if isinstance(n, bool) else to_index(n) for n in given)
        sizes = tuple([n for n in known if n is not None])
        if not isinstance(name, str) or not is_plain_name(name):
            raise GraphError(f'dim: {show(name)} is not a name such as "T"')
        if len(sizes) < len(given):
            raise GraphError(f"dim {name}: classes {show(classes)} are not whole numbers")
        if sizes and (most is not None or [*sizes] != sorted({*sizes}) or sizes[0] < 1):
            raise GraphError(
                f"dim {name}: classes {sizes} are ascending sizes of at least 1, in place of most"
            )
        most = sizes[-1] if sizes else most
        if most is None:
            raise GraphError(f"dim {name}: its largest size is missing; {dim_code(name)}")
        if type(most) is not int or most < 1:
            raise GraphError(f"dim {name}: most {show(most)} is not a whole number of at least 1")
        return make_dim((((NamedSize(name, most, sizes),), 1),))

    @property
    def symbols(self) -> tuple[NamedSize, ...]:
        """The named sizes in its terms."""
        factors = (x for each, _ in self.terms for x in each)
        return tuple(dict.fromkeys(symbol for x in factors for symbol in x.symbols))

    @property
    def line(self) -> tuple[NamedSize, int, int] | None:
        """(x, by, more) if it is by * x + more of one named size x; None if not."""
        more = next((n for factors, n in self.terms if not factors), 0)
        match [term for term in self.terms if term[0]]:
            case [((NamedSize() as symbol,), by)]:
                return symbol, by, more
        return None

    def fit(self, size: int) -> int:
        """The least allowed size >= `size`: how many rows of a buffer to pass.

            >>> Dim("N", classes=(16, 32, 64)).fit(20)
            32

        Raises GraphError if there is none, and for a sum or a product.
        """
        (symbol, *more) = self.symbols
        if to_index(size) is None:
            raise GraphError(f"dim {self}: {show(size)} is not a whole number")
        if more or size > symbol.most:
            raise GraphError(f"dim {self}: no size up to {int(self)} is at least {size}")
        return next((n for n in symbol.classes if n >= size), size)

    def bind(self, sizes: Sizes) -> int:
        """Its number for these sizes."""
        return sum(n * prod([x.bind(sizes) for x in factors]) for factors, n in self.terms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.terms)

    def __add__(self, other: int) -> int:
        return add(self, other)

    def __sub__(self, other: int) -> int:
        return add(self, multiply(other, -1))

    def __rsub__(self, other: int) -> int:
        return add(other, multiply(self, -1))

    def __mul__(self, other: int) -> int:
        return multiply(self, other)

    def __neg__(self) -> int:
        return multiply(self, -1)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: int) -> int:
        return floor_divide(self, other)

    def __mod__(self, other: int) -> int:
        return self - self // other * other

    def __str__(self) -> str:
        text = " + ".join(show_term(factors, n) for factors, n in self.terms)
        return text.replace("+ -", "- ")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce__(self) -> tuple[Callable[[Terms], Dim], tuple[Terms]]:
        return make_dim, (self.terms,)

    def __copy__(self) -> Dim:
        return self

    def __deepcopy__(self, memo: object) -> Dim:
        return self


def show_term(factors: Factors, n: int) -> str:
    names = [x.name for x in factors]
    if not names:
        return str(n)
    return {1: "", -1: "-"}.get(n, f"{n}*") + "*".join(names)


def make_dim(terms: Terms) -> Dim:
    """A Dim of sorted terms, at least one with a symbol."""
    made = int.__new__(Dim, sum(n * prod(x.most for x in factors) for factors, n in terms))
    made.terms = terms
    return made


def from_terms(terms: Iterable[tuple[Factors, int]]) -> int:
    """The sum of terms: a Dim, or a number if no symbol is left."""
    sums: Counter[Factors] = Counter()
    for factors, n in terms:
        sums[tuple(sorted(factors, key=lambda x: x.name))] += n
    kept = [(factors, n) for factors, n in sums.items() if n]
    if not any(factors for factors, _ in kept):
        return sum(n for _, n in kept)
    return make_dim(tuple(sorted(kept, key=order_of_term)))


def order_of_term(term: tuple[Factors, int]) -> tuple[bool, int, list[str]]:
    """The sort key of a term: positive before negative, longer before shorter."""
    factors, n = term
    return n < 0, -len(factors), [x.name for x in factors]


def terms_of(x: int) -> Terms:
    """A number or a Dim as a sum of terms."""
    if isinstance(x, Dim):
        return x.terms
    if not isinstance(x, SupportsIndex):
        raise GraphError(f"dim: sizes add and multiply with whole numbers, not with {show(x)}")
    return (((), index(x)),)


def add(a: int, b: int) -> int:
    return from_terms((*terms_of(a), *terms_of(b)))


def multiply(a: int, b: int) -> int:
    pairs = product(terms_of(a), terms_of(b))
    return from_terms(((*x, *y), n * m) for (x, n), (y, m) in pairs)


def floor_divide(a: int, b: int) -> int:
    """a // b. Raises GraphError for a divisor that is a Dim or below 1."""
    if isinstance(b, Dim) or to_index(b) is None or b < 1:
        raise GraphError(f"({a}) // {show(b)}: sizes divide by whole numbers of at least 1")
    whole = from_terms((factors, n // b) for factors, n in terms_of(a) if n % b == 0)
    rest = from_terms((factors, n) for factors, n in terms_of(a) if n % b)
    return add(
        whole, make_dim((((Quotient(rest, b),), 1),)) if isinstance(rest, Dim) else rest // b
    )


def are_numbers(*sizes: int) -> bool:
    return Dim not in map(type, sizes)


def surely_least(x: int) -> int:
    """A lower bound of x for all values of its Dims."""
    return range_of(x)[0]


def range_of(x: int) -> tuple[int, int]:
    """Bounds of x for all values of its Dims."""
    least = most = 0
    for factors, n in terms_of(x):
        ends = [prod(each) for each in product((n,), *(factor.bounds for factor in factors))]
        least, most = least + min(ends), most + max(ends)
    return least, most


def dims_in(value: object) -> Iterator[Dim]:
    return nested_values(value, Dim)


def bind(value: Any, sizes: Sizes) -> Any:  # Any: of the same kind
    """`value` with numbers in place of its Dims."""
    return replace_nested(value, Dim, lambda dim: dim.bind(sizes))


def doubling(least: int, most: int) -> tuple[int, ...]:
    """Classes of a Dim by powers of two: least, 2 least, 4 least, ... and `most`.

    For a cache in a buffer: pass a view of `dim.fit(n)` rows and the true length as lengths, so
    that few sizes need a plan. Raises GraphError unless 1 <= least <= most.

        >>> doubling(16, 100)
        (16, 32, 64, 100)
    """
    if to_index(least) is None or to_index(most) is None or not 1 <= least <= most:
        raise GraphError(
            f"doubling: needs whole numbers, 1 <= least <= most, got {show(least)} and {show(most)}"
        )
    steps = [least]
    while steps[-1] < most:
        steps.append(min(2 * steps[-1], most))
    return tuple(steps)
