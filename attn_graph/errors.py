"""Errors: four kinds, two warnings, and the reasons of backends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import cached_property, wraps
from inspect import Parameter, signature
from pathlib import Path
from reprlib import Repr
from typing import Any, NoReturn, ParamSpec, TypeVar, final

import torch
from attrs import field, frozen

P = ParamSpec("P")
T = TypeVar("T")
HOMES = tuple(
    f"{Path(__file__).parent.parent / name}/" for name in ("attn_graph", "lowering", "kernels")
)
TORCH = f"{Path(torch.__file__).parent}/"


@final
@frozen
class Reason:
    """Why a backend can't run a graph. `str(reason)` follows the backend's name and "can't: ".

    key: the name of the limit. Each sentence of a backend has its own key, unchanged when sizes,
    specs, masks and versions change. limit: the backend's support, in words. actual: the graph's or
    target's property, in words. sentence: the form that joins the two. late: True if it shows only
    when a graph is lowered.
    """

    key: str
    limit: str
    actual: str = ""
    sentence: str = "{limit}, and {actual}"
    late: bool = field(default=False, eq=False, repr=False, kw_only=True)

    @classmethod
    def of(cls, reason: Reason | str) -> Reason:
        """A reason as it is; a plain text becomes its own key."""
        return reason if isinstance(reason, Reason) else cls(reason, reason, sentence="{limit}")

    def __str__(self) -> str:
        return self.sentence.format(limit=self.limit, actual=self.actual)


class GraphError(ValueError):
    """A description makes no sense. `problems` has every reason, one text each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(join_lines(f"the graph has {len(problems)} problems", problems))


class ArgumentError(GraphError, TypeError):
    """A function has no such argument; a TypeError too, as Python raises."""


class TensorError(GraphError, RuntimeError):
    """Tensors make no sense together; a RuntimeError too, as PyTorch's own functions raise."""


class TensorRankError(TensorError, IndexError):
    """A tensor has too few axes; an IndexError too, as PyTorch's own functions raise."""


class TensorDtypeError(TensorError, NotImplementedError):
    """No attention is computed in this dtype; a NotImplementedError too, as in PyTorch."""


NO_BACKEND = "no backend supports this graph"


class NoBackendError(RuntimeError):
    """All backends refuse the graph. `refusals` has each backend's name and all its reasons.

    Also raised, with another title, if only `math` supports it and on_fallback is "raise".

    `explained` has the refusals with their fixes, as an explanation has them; empty if a gradient
    was planned. The fixes are searched when it is first read or the error is printed.
    """

    search: Callable[[], tuple[Any, ...]] = tuple  # Any: a Refusal of the planner, far above

    def __init__(
        self,
        graph: object,
        refusals: Iterable[tuple[str, tuple[Reason, ...]]],
        title: str = NO_BACKEND,
    ) -> None:
        self.graph, self.refusals, self.title = graph, tuple(refusals), title
        super().__init__(graph, self.refusals, title)

    @cached_property
    def explained(self) -> tuple[Any, ...]:  # Any: as above
        """The refusals with their fixes, searched at the first reading."""
        return self.search()

    def __str__(self) -> str:
        told = [each.told for each in self.explained] or self.refusals
        lines = "\n".join(refusal_lines(told)) or "no backend was tried"
        return f"{self.title}\n{lines}\n{self.graph}"

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[Any, ...]]:  # Any: its arguments
        """Pickles without the search: another process sees the reasons."""
        return NoBackendError, (self.graph, self.refusals, self.title)


class FallbackWarning(UserWarning):
    """`math` runs a graph refused by every other backend; the text has every reason."""


class SelfCheckWarning(UserWarning):
    """A backend is not used on a device: its self-check failed there; the text has the cause."""


DECLARED = "pass tensors as declared, or compile a graph for these: TensorSpec.like(tensor)"


class PlanMismatchError(ValueError):
    """A plan was called with other tensors than its graph declares. `differences` has each one.

    way_out: the fix, as the last line; "" if the differences name it.
    """

    def __init__(self, *differences: str, way_out: str = DECLARED) -> None:
        self.differences, self.way_out = differences, way_out
        lines = (*differences, way_out) if way_out else differences
        super().__init__(join_lines("the call differs from the plan", lines))


class PlanTargetError(RuntimeError):
    """A plan is for another machine, a CUDA graph is captured before its first call, or Python is
    shutting down."""


def call_code(function: Callable[..., object], name: str) -> str:
    """How to call a function: arguments by position, and by name if they have no default."""
    empty = Parameter.empty
    parameters = [
        each.replace(annotation=empty)
        for each in signature(function).parameters.values()
        if each.name != "self"
        and (each.kind is not Parameter.KEYWORD_ONLY or each.default is empty)
    ]
    return (
        f"write {name}{signature(function).replace(parameters=parameters, return_annotation=empty)}"
    )


def binds(way_out: Callable[..., str] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: unknown, repeated and missing arguments raise ArgumentError.

    way_out: of the arguments, what to write, by default the call; it ends Python's own message.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            try:
                return function(*args, **named)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # of the function's own
                name = function.__qualname__.removesuffix(".__init__")
                edit = way_out(*args, **named) if way_out else call_code(function, name)
                raise ArgumentError(f"{plain(str(error))}; {edit}") from None

        return call

    return decorate


def plain(text: str) -> str:
    """Python's message without the name of a constructor's method."""
    return text.replace(".__init__()", "()").replace(".__new__()", "()")


def constructor_code(self: object, *given: object, **named: object) -> str:
    """How to construct a mask or a modifier, whose tensors are given to attention."""
    tensors = any(isinstance(x, torch.Tensor) for x in (*given, *named.values()))
    rest = ", and pass its tensor to attention(q, k, v, ...) by name" * tensors
    return call_code(type(self).__init__, type(self).__name__) + rest


class Declared:
    """The base of classes that users write as masks and modifiers: attrs makes their methods.

    What is defined here runs only in a class without attrs.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Before attrs: values print as they are written. After: constructors name the edit."""
        own = vars(cls)
        if "__attrs_attrs__" not in own:
            cls.__repr__ = own.get("__repr__", Declared.__repr__)  # type: ignore[method-assign]  # attrs keeps it
        elif "__init__" in own:
            cls.__init__ = binds(constructor_code)(cls.__init__)  # type: ignore[method-assign]  # attrs' own

    def __repr__(self) -> str:
        return str(self)

    def __init__(self, *_: object, **__: object) -> None:
        """Raises GraphError: attrs has not made the class's own."""
        raise GraphError(attrs_problem(type(self)))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Raises GraphError, as above: from the class's own __init__."""
        raise GraphError(attrs_problem(type(self)))


def asks_for_attrs(kind: type[T]) -> type[T]:
    """A frozen class; a subclass without attrs that sets a field raises the error of `Declared`."""
    kind.__setattr__ = Declared.__setattr__  # type: ignore[assignment]  # attrs' own raises another
    return kind


def attrs_problem(kind: type) -> str:
    """Why instances of a class have no fields known to attrs; "" if they have."""
    name = kind.__name__
    if is_dataclass(kind):
        return (
            f"{name} is a dataclass; masks and modifiers are attrs classes: replace @dataclass by "
            "@attrs.frozen"
        )
    if "__attrs_attrs__" not in vars(kind):
        return (
            f"{name} is not decorated, so its fields are unknown; write @attrs.frozen above the "
            "class"
        )
    if kind.__hash__ is None:
        return f"{name} can change after it is made; write @attrs.frozen above the class"
    return ""


def problems_of(attempt: Callable[[], object]) -> tuple[str, ...]:
    """The problems of the GraphError raised by `attempt`; none without an error."""
    try:
        attempt()
    except GraphError as error:
        return error.problems
    return ()


def refuse_truth(who: str, value: object, way_out: str) -> NoReturn:
    """Raise GraphError for a description of a computation in place of true or false.

    who: the kind of value. way_out: the code that was probably meant.
    """
    raise GraphError(f"{who}: {value} is neither true nor false; {way_out}")


def as_tensor_error(error: GraphError | PlanMismatchError) -> TensorError:
    """The error as a TensorError, for functions called like PyTorch's own."""
    return TensorError(*(error.problems if isinstance(error, GraphError) else error.differences))


@final
class Shown(Repr):
    """Values in messages: a tensor by its shape and dtype alone, also within lists."""

    def repr1(self, x: object, level: int) -> str:
        """A value within `level` others."""
        if isinstance(x, torch.Tensor):
            return f"<tensor of {x.dtype} {list(x.shape)}>"
        text = super().repr1(x, level)
        return text if "\n" not in text else f"<{type(x).__name__}>"


shown = Shown()
shown.maxstring = shown.maxother = 200
shown.maxtuple = shown.maxlist = shown.maxdict = 12
show = shown.repr


def join_lines(title: str, lines: tuple[str, ...]) -> str:
    """One line alone, or a title and one indented line each."""
    return lines[0] if len(lines) == 1 else "\n  - ".join([title, *lines])


DEVICE = "device"  # key of the reason against a target of another kind


def refusal_lines(refusals: Iterable[tuple[str, Sequence[object]]]) -> Iterator[str]:
    """A line for each set of reasons: its backends, and all of the reasons.

    Backends that only lack the device come last.
    """
    names: dict[tuple[bool, str], list[str]] = {}
    for name, reasons in refusals:
        absent = all(isinstance(each, Reason) and each.key == DEVICE for each in reasons)
        names.setdefault((absent, "; ".join(map(str, reasons))), []).append(name)
    for (_, text), told in sorted(names.items(), key=lambda item: item[0][0]):
        yield f"{', '.join(told)} can't: {text}"


def user_line() -> str:
    """`file:line` of the nearest frame outside this package and PyTorch: the user's code."""
    file, line = user_frame(TORCH)
    return f"{file}:{line}"


def user_frame(*others: str) -> tuple[str, int]:
    """File and line of the nearest frame outside this package, and outside other folders."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((*HOMES, *others)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
