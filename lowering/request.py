"""A request: a graph, its target, the options, and the backends allowed. All planning reads it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.store import Store
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import LIBRARIES, KernelName, Precision, Switches
from attn_graph.machine.workspace import Workspace, default_workspace

if TYPE_CHECKING:
    from attn_graph.lowering.problem import Facts

Fallback = Literal["ignore", "warn", "raise"]
Among = tuple["str | Named", ...] | None
WORDS: dict[KernelName, str] = {  # for the kernels that PyTorch's switches turn on and off
    "math": "PyTorch's unfused attention, a tile at a time",
    "flash": "PyTorch's flash kernel",
    "efficient": "PyTorch's efficient kernel",
    "cudnn": "cuDNN's attention",
}


@final
@frozen(cache_hash=True)
class Options:
    """The arguments of `compile` besides the graph and the target.

    batch_invariant: True if the bits of a batch entry may not depend on the others. precision: of
    products: "ieee", or what may be rounded and need not be, inputs in float32 with "tf32", weights
    beside quantised q, k and v with "fp8". avoid: names of backends not to run. on_fallback: the
    action if `math` runs because every other backend refused. switches: PyTorch's own, at the time
    of planning. tune: True if measurements choose. variant: which of its ways a backend takes; None
    leaves it the choice. resized: True for a graph of a plan for many sizes.
    """

    deterministic: bool = False
    max_workspace: int | None = None
    workspace: Workspace = field(factory=default_workspace)
    store: Store | None = None
    tune: bool = False
    variant: str | None = None
    precision: Precision = "ieee"
    avoid: tuple[str, ...] = ()
    on_fallback: Fallback = "ignore"
    switches: Switches = field(factory=Switches)
    batch_invariant: bool = False
    resized: bool = False

    def over_workspace(self, need: int) -> Iterator[Reason]:
        """The reason against a lowering with too large a workspace, in bytes."""
        most = self.max_workspace
        if most is not None and need > most:
            yield Reason(
                "workspace",
                f"max_workspace is {most:,} bytes ({format_bytes(most)})",
                f"needs a workspace of {need:,} bytes ({format_bytes(need)})",
                "{actual}, {limit}",
            )

    def varying(self, limit: str) -> Iterator[Reason]:
        """The reason against a backend whose bits of one batch entry depend on the others."""
        if self.batch_invariant:
            yield Reason("batch_invariant", limit, "batch_invariant=True")

    def switched_off(self, kernel: KernelName) -> Iterator[Reason]:
        """The reason against a kernel of PyTorch's that this process has turned off."""
        if ways := " and by ".join(self.switches.ways_off(kernel)):
            actual = f"which this process has turned off, by {ways}"
            yield Reason("switched_off", f"runs {WORDS[kernel]}", actual, "{limit}, {actual}")


def switch_name(kind: str) -> str:
    return f"torch.backends.{LIBRARIES[kind]}.matmul.fp32_precision lets them round"


class Named(Protocol):
    """A backend, for modules below it."""

    @property
    def name(self) -> str:
        """What options and explanations call it."""
        raise NotImplementedError


@final
@frozen(cache_hash=True)
class Request:
    """Everything that a plan depends on. Equal requests have equal plans.

    Backends see the graph after all passes, with sizes as numbers except in `lower_any`. among: the
    backends allowed, in order of preference, by name or as records; None: all, in the planner's
    order. `planner.choose.permitted_backends` looks up the names.
    """

    graph: Graph
    target: Target
    options: Options
    among: Among = None

    @cached_property
    def facts(self) -> Facts:
        """The graph as backends see it."""
        from attn_graph.lowering.problem import facts_of  # waits for the first plan

        return facts_of(self.graph)

    def with_graph(self, graph: Graph) -> Request:
        """The same request for another graph."""
        return self if graph is self.graph else evolve(self, graph=graph)

    def with_options(self, **changed: Any) -> Request:  # Any: fields of Options
        """The same request with other options."""
        return evolve(self, options=evolve(self.options, **changed))

    @property
    def has_float32(self) -> bool:
        """True if an input is float32."""
        return any(i.spec.dtype == torch.float32 for i in self.graph.inputs)

    @property
    def is_exact(self) -> bool:
        """True if float32 products must not be rounded. Half precision loses nothing by it."""
        return self.options.precision != "tf32" and self.has_float32

    def rounded(self) -> Iterator[Reason]:
        """The reason against PyTorch's own float32 products, where its switch lets them round."""
        options, kind = self.options, self.target.kind
        if self.is_exact and options.switches.precision(kind) != "ieee":
            actual = f'precision is "{options.precision}": {switch_name(kind)}'
            yield Reason("rounded", "has PyTorch's float32 products", actual)

    def notes(self) -> Iterator[str]:
        """Lines for `explain` about the options, PyTorch's switches first."""
        options, kind = self.options, self.target.kind
        if options.switches.deterministic:
            yield "deterministic, as torch.use_deterministic_algorithms asks of this process"
        if order := options.switches.order(kind, self.target.sm):
            yield f"PyTorch's kernels in the order that sdpa_kernel set: {', '.join(order)}"
        by_switch = options.switches.precision(kind) == "tf32"
        if options.precision == "tf32" and self.has_float32 and (by_switch or kind == "cuda"):
            whose = switch_name(kind) if by_switch else 'precision="tf32"'
            yield f"float32 products may round their inputs: {whose}"
