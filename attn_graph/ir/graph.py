"""The IR: ops, equations, graphs. Plain immutable values; two equal graphs hash alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, final

import torch
from attrs import frozen

from attn_graph.errors import GraphError
from attn_graph.spec import FLOATS, TensorSpec, ValueType

# Values are handles of whoever builds the graph, so that the IR needs to know nothing of builders.
Values = Sequence[Any]
Gradients = tuple[Any, ...]  # a value for each operand, or None
# What `pull` emits with: an op and the values it reads, giving the op's results.
Emit = Callable[..., tuple[Any, ...]]

NO_SECOND = (
    "a gradient has no gradient: second derivatives (double backward) are not built. They are "
    "taken by create_graph=True, a penalty on gradients, Hessians and gradgradcheck; compute that "
    "part by PyTorch's scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), which has "
    "them"
)


@frozen
class Op:
    """What an equation does. Fields are static parameters; tensors are the equation's operands.

    A subclass states all that is true of it on any machine: `problems`, `infer`, `run`, `pull`.
    What a backend makes of it stands with the backend.
    """

    is_gradient: ClassVar[bool] = False  # part of a gradient: it has no `pull`, so no gradient

    @property
    def names(self) -> tuple[str, ...]:
        """What the results are called when printed."""
        return ("x",)

    @property
    def reads(self) -> int:
        """How many operands, from the first, `infer` reads."""
        return 1

    @property
    def roles(self) -> tuple[str, ...]:
        """A name for each operand, for those who read messages."""
        return ()

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """How many axes each operand has; None: any number."""
        raise NotImplementedError

    # Any in these three: leaves fix their arity, and type checkers let them for exactly this form.
    def problems(self, *args: Any, **kwargs: Any) -> Iterator[str]:  # Any: as above
        """Everything that is wrong with operands of these types; none: the op means something."""
        yield from ()

    def infer(self, *args: Any, **kwargs: Any) -> tuple[ValueType, ...]:  # Any: as above
        """The types of the results. Asked even where there are problems of size, not of rank."""
        raise NotImplementedError

    def gradient_problems(self) -> Iterator[str]:
        """Why it runs forward alone; none: `pull` gives its gradient."""
        yield from ()

    def run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:  # Any: as above
        """The meaning, in torch; slow and exact."""
        raise NotImplementedError

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        """Emit the gradient of each operand; None for what has none. A None in grads is zero."""
        raise NotImplementedError


def check_graph(graph: object, name: str) -> None:
    """Raise GraphError for what is no graph."""
    if not isinstance(graph, Graph):
        raise GraphError(
            f"{name}: expected a Graph, got {type(graph).__name__}; see attention and graph"
        )


def op_name(op: type[Op]) -> str:
    """What an op is called in text and messages: SoftCap is soft_cap."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op.__name__).lower()


@final
@frozen
class Eqn:
    """`outs = op(*args)`; args are positions of earlier values, outs the types it adds."""

    op: Op
    args: tuple[int, ...]
    outs: tuple[ValueType, ...]


@final
@frozen
class Input:
    """A named tensor that the caller brings."""

    name: str
    spec: TensorSpec


@final
@frozen(cache_hash=True, repr=False)
class Graph:
    """Values are numbered in order: first the inputs, then each equation's results.

    Immutable and compared by content: equal graphs are one cache entry. `print(graph)` shows
    Python that `parse` reads back. Build one with `attention` or `graph`.
    """

    inputs: tuple[Input, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        count = len(self.inputs)
        for n, eqn in enumerate(self.eqns):
            if any(not 0 <= i < count for i in eqn.args):
                raise GraphError(f"graph: equation {n} reads {eqn.args} of {count} values so far")
            count += len(eqn.outs)
        if any(not 0 <= i < count for i in self.outputs):
            raise GraphError(f"graph: outputs {self.outputs} of {count} values")

    @property
    def types(self) -> tuple[ValueType, ...]:
        """The type of every value, by its number."""
        return (*(i.spec.type for i in self.inputs), *(t for e in self.eqns for t in e.outs))

    @property
    def output_types(self) -> tuple[ValueType, ...]:
        types = self.types
        return tuple(types[i] for i in self.outputs)

    @property
    def is_gradient(self) -> bool:
        """Whether an equation is part of a gradient: there is no gradient of this graph then."""
        return any(eqn.op.is_gradient for eqn in self.eqns)

    @property
    def gradient_problems(self) -> tuple[str, ...]:
        """Why there is no gradient of this graph; none: there is."""
        if self.is_gradient:
            return (NO_SECOND,)
        problems = (text for eqn in self.eqns for text in eqn.op.gradient_problems())
        return tuple(dict.fromkeys(problems))

    @property
    def has_gradient(self) -> bool:
        """Whether there is something to differentiate by, and a derivative of every step."""
        return not self.gradient_problems and any(i.spec.dtype in FLOATS for i in self.inputs)

    def numbered(self) -> Iterator[tuple[Eqn, range]]:
        """Each equation with the numbers of its results."""
        first = len(self.inputs)
        for eqn in self.eqns:
            yield eqn, range(first, first + len(eqn.outs))
            first += len(eqn.outs)

    def __str__(self) -> str:
        from attn_graph.ir.parse import show_graph  # above this floor; printing alone looks up

        return show_graph(self)

    __repr__ = __str__
