"""A plan: a graph, who runs it, and how to call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from attrs import Factory, evolve, field, frozen

from attn_graph.backend import Executable
from attn_graph.errors import PlanMismatchError, PlanTargetError
from attn_graph.ir import Graph
from attn_graph.memory import Memory
from attn_graph.reference import Verification, verified
from attn_graph.spec import NAMES, TensorSpec
from attn_graph.target import Target

if TYPE_CHECKING:  # and imported where they are used: calls ask for none of it
    from attn_graph.cost import Cost
    from attn_graph.explanation import Explanation

Tensors = tuple[torch.Tensor, ...]
MOST_PULLS = 64  # backward plans a plan keeps at hand; the cache holds them too


@final
@frozen(eq=False, repr=False)
class Plan:
    """How a graph runs on a target. Made by `compile`; immutable, shared by threads, reusable.

    Call it with the graph's inputs, by position or by name; it returns the one output, or a tuple.
    Where an input requires grad, the results are differentiable by PyTorch's autograd. Raises
    PlanMismatchError for tensors other than declared, PlanTargetError for a plan of another
    machine.
    """

    graph: Graph
    target: Target
    backend: str
    cause: str
    refusals: tuple[tuple[str, tuple[str, ...]], ...]
    also: tuple[str, ...]
    executable: Executable
    differentiable: Callable[..., Tensors]  # runs it so that autograd knows
    backward: Callable[..., Plan]  # the plan of its gradient for some inputs and cotangents
    runs_here: bool
    precision: str = "ieee"  # of float32 products
    run: Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = field(
        init=False, default=Factory(lambda plan: plan.executable.run, takes_self=True)
    )
    count: int = field(
        init=False, default=Factory(lambda plan: len(plan.graph.inputs), takes_self=True)
    )
    single: bool = field(
        init=False, default=Factory(lambda plan: len(plan.graph.outputs) == 1, takes_self=True)
    )
    seen: list[object] = field(init=False, factory=lambda: [()])  # the look of the last tensors
    pulls: dict[object, Plan] = field(
        init=False, factory=dict
    )  # backward plans that calls asked for

    def __call__(self, *tensors: torch.Tensor, **named: torch.Tensor) -> torch.Tensor | Tensors:
        if named or len(tensors) != self.count:
            tensors = self.arranged(tensors, named)
        told: list[object] = []
        wants = False
        try:
            for t in tensors:
                told += t.shape, t.stride(), t.dtype, t.device
                wants = wants or t.requires_grad
        except AttributeError:  # no tensor: `admit` says which
            told = [None]
        if told != self.seen[0]:
            self.admit(tensors, told)
        if wants and torch.is_grad_enabled():
            outputs: Sequence[torch.Tensor] = self.differentiable(self, tensors)
        else:
            outputs = self.run(*tensors)[0]
        return outputs[0] if self.single else tuple(outputs)

    def arranged(self, tensors: Tensors, named: Mapping[str, torch.Tensor]) -> Tensors:
        """Positional and named tensors in the order of the inputs."""
        names = [i.name for i in self.graph.inputs]
        told = ", ".join(names)
        given = dict(zip(names, tensors, strict=False))
        both = {**given, **named}
        differences = [f"{n}: given twice, by position and by name" for n in named if n in given]
        differences += [f"{n}: is no input; the inputs are {told}" for n in named if n not in names]
        missing = [i for i in self.graph.inputs if i.name not in both]
        differences += [f"{i.name}: expected {i.spec}, got nothing" for i in missing]
        if len(tensors) > len(names):
            differences += [f"expected {len(names)} tensors ({told}), got {len(tensors)}"]
        if differences:
            raise PlanMismatchError(*differences)
        return tuple(both[name] for name in names)

    def admit(self, tensors: Tensors, told: object) -> None:
        """Check the tensors in full, and remember how such ones look."""
        if not self.runs_here:
            raise PlanTargetError(
                f"the plan is for {self.target} and this machine is {Target.here()}; "
                "it can be inspected here, and called there"
            )
        pairs = [*zip(self.graph.inputs, tensors, strict=True)]
        differences = [text for i, t in pairs for text in differing(i.name, i.spec, t, self.target)]
        if not differences and len({t.device for t in tensors}) > 1:
            places = ", ".join(f"{i.name} on {t.device}" for i, t in pairs)
            differences = [f"expected tensors on one device, got {places}"]
        if differences:
            raise PlanMismatchError(*differences)
        self.seen[0] = told

    def pulled(
        self, needs: Sequence[bool], saved: Tensors, grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """The gradients of the inputs marked in `needs`, from what the forward saved."""
        given = [g for g in grads if g is not None]
        asked = (tuple(needs), tuple(None if g is None else g.stride() for g in grads))
        plan = self.pulls.get(asked)
        if plan is None:
            wants = [i for i, need in enumerate(needs) if need]
            plan = self.backward(wants, [None if g is None else TensorSpec.like(g) for g in grads])
            if len(self.pulls) >= MOST_PULLS:
                self.pulls.clear()
            self.pulls[asked] = plan
        return plan.run(*saved, *given)[0]

    @property
    def vjp(self) -> Plan:
        """The plan of the gradient by every floating input; see `attn_graph.vjp` for its inputs.

        Raises GraphError for a plan that is a gradient itself.
        """
        return self.backward()

    @property
    def has_gradient(self) -> bool:
        """Whether there is something to differentiate by, and this is no gradient itself."""
        return self.graph.has_gradient

    def memory(self) -> Memory:
        """Bytes that a call will need, known before it runs."""
        from attn_graph.explanation import needed

        backward = self.vjp if self.has_gradient else None
        gradients = sum(t.bytes for t in backward.graph.output_types) if backward else 0
        behind = backward.executable.foreseen if backward else None
        return needed(self.graph, gradients, self.executable.foreseen, behind)

    def cost(self, **tensors: torch.Tensor) -> Cost:
        """Flops and bytes that the masks leave, and the least time on the target.

        Exact for masks that no tensor decides, and for others with the tensors that do, by the
        names of the inputs: `plan.cost(kv_lengths=lengths)`. Without them it is the most there can
        be, and so it is, and says so, where counting would take longer than a second. Raises
        GraphError for other tensors.
        """
        from attn_graph.cost import cost

        return cost(self.graph, self.target, tensors, precision=self.precision)

    def verify(self, *tensors: torch.Tensor, **named: torch.Tensor) -> Verification:
        """Run the plan on these tensors and compare with float64 by the rule of `verified`."""
        with torch.no_grad():
            given = self.arranged(tensors, named)
            self(*given)  # checks the tensors
            return verified(self.graph, given, self.run(*given)[0])

    def text(self) -> str:
        """What was generated to run it, or how it runs. May change between versions."""
        return self.executable.text() or "\n".join(self.executable.notes)

    def explain(self) -> Explanation:
        """Who runs the graph and why, how, every reason why others don't, and what it costs.

        Prints as text, shows as HTML in a notebook, and gives `to_dict()`. To see the machine code
        of kernels it compiles them. `attn_graph.explain` builds nothing, and says what would have
        to change for those that refuse.
        """
        from attn_graph.explanation import tiles_of

        backward = self.vjp if self.has_gradient else None
        return evolve(
            self.side(),
            backward=backward.side() if backward else None,
            tiles=tuple(tiles_of(self.graph)),
            memory=self.memory(),
            cost=self.cost(),
        )

    def side(self) -> Explanation:
        """Of this pass alone: who runs it and how, and why the others don't."""
        from attn_graph.explanation import Explanation, Refusal

        return Explanation(
            self.graph,
            self.target,
            self.backend,
            self.cause,
            tuple(Refusal(name, reasons) for name, reasons in self.refusals),
            (*self.executable.notes, *self.executable.inspect()),
            self.also,
        )

    def __repr__(self) -> str:
        return f"Plan({self.backend} on {self.target})\n{self.graph}"


def differing(name: str, spec: TensorSpec, tensor: object, target: Target) -> list[str]:
    """What of a tensor is not as declared."""
    if not isinstance(tensor, torch.Tensor):
        return [f"{name}: expected a tensor {spec}, got {tensor!r}"]
    found = []
    if tensor.dtype not in NAMES or TensorSpec.like(tensor) != spec:
        got = TensorSpec.like(tensor) if tensor.dtype in NAMES else tensor.dtype
        found.append(f"{name}: expected {spec}, got {got}")
    if tensor.device.type != target.kind:
        found.append(f"{name}: expected a tensor on {target.kind}, got one on {tensor.device}")
    return found
