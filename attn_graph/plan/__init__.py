"""A plan: a graph, its backend, and the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, final

import torch
from attrs import Factory, define, field, frozen
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from attn_graph.errors import GraphError, Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.data_checks import check_data
from attn_graph.ir.transforms.binding import bind_graph, complete_sizes, split_sizes
from attn_graph.ir.transforms.jvp import jvp, push_graph
from attn_graph.ir.transforms.vjp import cotangent_specs, main_outputs
from attn_graph.lowering.backend import Executable
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import has_tangent, is_traced, named_in_profiles, teach_counters
from attn_graph.machine.autograd import (
    has_batch,
    push_each,
    record,
    run_with_autograd,
    select_moving,
    split_tangents,
)
from attn_graph.machine.fitting import Fit
from attn_graph.machine.imports import require_imports
from attn_graph.machine.likeness import NESTED, Check, Look, likeness, look_at, never
from attn_graph.machine.sizes import Memory
from attn_graph.machine.target import Target
from attn_graph.machine.tensors import (
    arrange,
    copy_laid_as,
    is_distributed,
    lay_as,
    read_array,
    require_as_declared,
    require_device,
)
from attn_graph.planner.forms.content import write_plan
from attn_graph.rings import find
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:  # imported at first use: calls need none of them
    from attn_graph.instruments.explanation import Explanation
    from attn_graph.ir.reference import Verification
    from attn_graph.planner.cost import Cost
    from attn_graph.planner.forms.sized import Sized

Tensors = tuple[torch.Tensor, ...]
Out = torch.Tensor | Sequence[torch.Tensor]
Pattern = tuple[object, ...]  # of a backward: inputs with a gradient, outputs without a cotangent
NAME, requires_grad = attrgetter("name"), attrgetter("requires_grad")
FOR_USERS = (
    *("graph", "target", "backend", "cause", "refusals", "executable"),
    *("explain", "memory", "cost", "verify", "check", "prepare", "at", "text", "vjp", "jvp"),
)
MOST_PULLS = 64  # backward plans a plan keeps at hand; the cache holds them too


@final
@frozen(eq=False)
class Pull:
    """A backward plan, and the cotangents it needs in another layout, by number.

    unsized: for named sizes, the check that tensors of other sizes must pass for this plan.
    """

    plan: Plan
    anew: tuple[tuple[int, TensorSpec], ...] = ()
    unsized: Check = never


@final
@define(eq=False)
class Memo:
    """A plan's memory: tensors already checked, by their likeness, and backward plans.

    looks: of the last call's tensors. call: their likeness, and True if one requires grad. pull:
    the likeness of the last backward's tensors, its pattern and plan. pushes: the plans of forward
    mode. content: the plan as text, made at first use. With named sizes: `sizes` of the last call,
    and `unsized`, the check of everything else in its tensors, and True if one requires grad.
    rooms: sizes and looks of the caller's tensors for results, checked last. fits: the checks of
    inputs given in advance, by their names; given: the last looks to pass, by these.
    """

    looks: list[Look | None] = field(factory=list)
    call: tuple[Check, bool] = (never, False)
    pull: tuple[Check, Pattern, Pull | None] = (never, (), None)
    pulls: dict[tuple[object, ...], Pull] = field(factory=dict)
    pushes: dict[tuple[object, ...], Plan] = field(factory=dict)
    content: str = ""
    sizes: tuple[int, ...] = ()
    rooms: list[object] = field(factory=list)
    fits: dict[tuple[str, ...], Fit] = field(factory=dict)
    given: dict[tuple[str, ...], list[Look | None]] = field(factory=dict)
    unsized: tuple[Check, bool] = (never, False)
    recorded: Plan | None = None


@final
@frozen(eq=False, repr=False)
class Plan:
    """A graph ready to run on a target. Made by `compile`; immutable, shared by threads, reusable.

    Call it with the graph's inputs, by position or by name; it returns the one output, or a tuple.
    Arrays with DLPack are read in place. out: a tensor, or a tuple of them, to write the outputs
    to, apart from the inputs; without gradients. If an input requires grad, the results are
    differentiable by PyTorch's autograd, twice, and by its forward mode. Raises PlanMismatchError
    for tensors other than declared, PlanTargetError for a plan of another machine, or of another
    kind of GPU than the tensors are on, GraphError for missing derivatives.

    It pickles as graph, target and options, and is planned again on arrival. A copy, deep or not,
    is the plan itself.
    """

    request: Request  # those for other graphs are made from it
    backend: str
    cause: str
    refusals: tuple[tuple[str, tuple[Reason, ...]], ...]
    also: tuple[str, ...]
    executable: Executable
    sized: Sized | None = None  # with named sizes
    whole: tuple[Plan, Mapping[str, int]] | None = None  # the plan it is `at` these sizes of
    graph: Graph = field(
        init=False, default=Factory(lambda plan: plan.request.graph, takes_self=True)
    )
    run: Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = field(
        init=False, default=Factory(lambda plan: plan.executable.run, takes_self=True)
    )
    infer: Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = field(
        init=False, default=Factory(lambda plan: plan.executable.infer, takes_self=True)
    )
    names: tuple[str, ...] = field(  # of the inputs
        init=False, default=Factory(lambda plan: (*map(NAME, plan.graph.inputs),), takes_self=True)
    )
    count: int = field(init=False, default=Factory(lambda plan: len(plan.names), takes_self=True))
    single: bool = field(
        init=False, default=Factory(lambda plan: len(plan.graph.outputs) == 1, takes_self=True)
    )
    constants: tuple[int, ...] = field(  # places of the outputs without a gradient
        init=False, default=Factory(lambda plan: plan.graph.constant_places, takes_self=True)
    )
    memo: Memo = field(init=False, factory=Memo)

    def __call__(
        self, /, *tensors: torch.Tensor, out: Out | None = None, **named: torch.Tensor
    ) -> torch.Tensor | Tensors:
        if out is not None:
            require_imports()
            from attn_graph.plan.extras.outputs import write_outputs

            return write_outputs(self, tensors, named, out)
        if named or len(tensors) != self.count:
            tensors = self.arranged(tensors, named)
        if (
            is_dynamo_compiling()
            or _are_functorch_transforms_active()
            or _len_torch_dispatch_stack()
            or _is_tracing()
        ):
            return self.call_op(tensors)
        check, wants = self.memo.call
        if True in map(getattr, tensors, *NESTED) or not check(*tensors):
            tensors = tuple(map(read_array, tensors))
            wants = self.admit(tensors)
        if profiler._is_profiler_enabled:
            return self.run_profiled(tensors, wants)
        return self.run_known(tensors, wants)

    def run_known(self, tensors: Tensors, wants: bool) -> torch.Tensor | Tensors:
        """Run checked tensors. wants: True if one of them requires grad."""
        if wants and torch.is_grad_enabled():
            outputs: Sequence[torch.Tensor] = record(self.memo.recorded or self.recorded, *tensors)  # type: ignore[no-untyped-call]  # of torch
        elif forward_ad._current_level >= 0 and has_tangent(tensors):
            outputs = self.push(tensors)
        else:
            outputs = self.infer(*tensors)[0]
        return outputs[0] if self.single else tuple(outputs)

    def push(self, tensors: Tensors) -> Tensors:
        """The outputs with their tangents."""
        outputs, moved = self.push_outputs(*split_tangents(tensors))
        pairs = zip(outputs, moved, strict=True)
        return tuple(x if t is None else forward_ad.make_dual(x, t) for x, t in pairs)

    def push_outputs(
        self, primals: Sequence[torch.Tensor], tangents: Mapping[int, torch.Tensor]
    ) -> tuple[Tensors, tuple[torch.Tensor | None, ...]]:
        """The outputs, and the tangent of each, None for one without gradient; by the plan of
        forward mode. tangents: by the number of the input; others are 0."""
        if has_batch(tangents.values()):
            return push_each(self, primals, tangents)
        if self.sized is not None:
            return self.bound_to(primals).push_outputs(primals, tangents)
        tangents, carried = select_moving(self.graph.carried, tangents), self.graph.carried
        pairs = enumerate(zip(primals, self.graph.inputs, strict=True))
        given = [lay_as(x, i.spec) if n in carried else x for n, (x, i) in pairs]
        results = self.push_plan(tangents)(*given, *tangents.values())
        assert isinstance(results, tuple)  # at least one and its tangent
        count, each = len(self.graph.outputs), iter(results[len(self.graph.outputs) :])
        known = (place not in self.constants for place in range(count))
        return results[:count], tuple(next(each) if has else None for has in known)

    def push_plan(self, tangents: Mapping[int, torch.Tensor]) -> Plan:
        """The plan of forward mode for tangents like these."""
        key = (*tangents, *map(look_at, tangents.values()))
        if key not in self.memo.pushes:
            specs = [*map(TensorSpec.like, tangents.values())]
            if len(self.memo.pushes) >= MOST_PULLS:
                self.memo.pushes.clear()
            self.memo.pushes[key] = self.plan_simplified(push_graph(self.graph, [*tangents], specs))
        return self.memo.pushes[key]

    @property
    def recorded(self) -> Plan:
        """The plan recorded by autograd: this one, or one that keeps more for its backward."""
        if self.memo.recorded is None:
            require_imports()
            from attn_graph.plan.building import plan_recorded

            self.memo.recorded = plan_recorded(self) or self
        return self.memo.recorded

    def plan_simplified(self, graph: Graph) -> Plan:
        """The plan of another graph, with the same target and options."""
        from attn_graph.plan.building import plan_simplified

        return plan_simplified(self.request.with_graph(graph))

    @property
    def target(self) -> Target:
        """The device and the libraries it is for."""
        return self.request.target

    def run_profiled(self, tensors: Tensors, wants: bool) -> torch.Tensor | Tensors:
        """Run checked tensors under a name in PyTorch's profilers and NVTX."""
        plan = self.recorded if wants and torch.is_grad_enabled() else self
        with plan.named_in_profiles("forward"):
            return self.run_known(tensors, wants)

    def named_in_profiles(self, side: str) -> AbstractContextManager[object]:
        """A context that PyTorch's profilers show as `attn_graph.<backend> <side>`."""
        return named_in_profiles(f"{self.backend} {side}")

    def call_op(self, tensors: Tensors) -> torch.Tensor | Tensors:
        """Call an operator of PyTorch's, as traces and transforms need. Raises GraphError for named
        sizes if torch.compile traces the call."""
        if not is_dynamo_compiling():
            teach_counters()
        elif self.sized is not None:
            raise GraphError(
                "a plan whose sizes have names is not traced; call plan.at(...) in compiled code"
            )
        content = content_of(self.bound_to(tensors))
        outputs = torch.ops.attn_graph.attention(list(tensors), content)
        return outputs[0] if self.single else tuple(outputs)

    def bound_to(self, tensors: Sequence[torch.Tensor]) -> Plan:
        """The plan for the sizes of tensors: itself without named sizes. Raises
        PlanMismatchError."""
        if self.sized is None:
            return self
        return self.at(**self.sized.fit.named(self.sized.fit.sizes_of(tensors)))

    def arranged(self, tensors: Tensors, named: Mapping[str, torch.Tensor]) -> Tensors:
        """Positional and named tensors in the order of the inputs."""
        if named and (*named,) == self.names[len(tensors) :]:
            return *tensors, *named.values()
        return arrange({i.name: i.spec for i in self.graph.inputs}, tensors, named)

    def admit(self, tensors: Tensors) -> bool:
        """True if one of the tensors requires grad. Checks all, unless they look like the last.

        Their likeness is remembered, unless the target is an emulated GPU, which may end.
        """
        require_imports()
        if True in map(getattr, tensors, *NESTED):
            self.check_tensors(tensors)
        if self.sized is not None:
            return self.admit_sized(self.sized.fit, tensors)
        looks = [*map(look_at, tensors)]
        if looks != self.memo.looks or any(map(is_distributed, tensors)):
            self.check_tensors(tensors)
        wants = any(map(requires_grad, tensors))
        if not (is_traced() or self.target.is_emulated):
            self.memo.looks, self.memo.call = looks, (likeness(tensors), wants)
        return wants

    def admit_sized(self, fit: Fit, tensors: Tensors) -> bool:
        """`admit` for named sizes. A new size costs a look at shapes and strides; the likeness is
        remembered if the size comes again."""
        check, wants = self.memo.unsized
        sizes = fit.lying(tensors) if check(*tensors) else None
        if sizes is None:
            sizes, wants = fit.sizes_of(tensors), any(map(requires_grad, tensors))
            if not (is_traced() or self.target.is_emulated):
                self.memo.unsized = likeness(tensors, sized=False), wants
        elif sizes == self.memo.sizes:
            self.memo.call = likeness(tensors), wants
        self.memo.sizes = sizes
        return wants

    def check_tensors(self, tensors: Tensors) -> None:
        """Raise PlanTargetError or PlanMismatchError unless the tensors are as declared."""
        require_device(tensors, self.target)
        specs = {i.name: i.spec for i in self.graph.inputs}
        require_as_declared(dict(zip(specs, tensors, strict=True)), specs, self.target)

    def pull(
        self,
        needs: tuple[bool, ...],
        saved: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
    ) -> Sequence[torch.Tensor]:
        """The gradients of the inputs marked in `needs`, from the values saved by the forward.

        If autograd records this too, they are differentiable themselves.
        """
        if len(grads) == 1 and (do := grads[0]) is not None:  # as mostly
            given = [do]
        else:
            given = [g for g in grads if g is not None]
        tensors = (*saved, *given)
        pattern = needs if len(given) == len(grads) else (*needs, *[g is None for g in grads])
        check, last, pull = self.memo.pull
        if pull is None or pattern != last or not check(*tensors):
            require_imports()
            from attn_graph.plan.pull import recall_pull

            require_device(tensors, self.target)
            pull = recall_pull(self, needs, saved, grads, pattern)
        if pull.anew:
            for n, spec in pull.anew:
                given[n] = copy_laid_as(given[n], spec)
            tensors = (*saved, *given)
        if profiler._is_profiler_enabled:
            with pull.plan.named_in_profiles("backward"):
                return pull.plan.run_handed(tensors)
        return pull.plan.run_handed(tensors)

    def run_handed(self, tensors: Tensors) -> Sequence[torch.Tensor]:
        """Run as a gradient: differentiable if autograd records it."""
        if torch.is_grad_enabled():
            carried = self.graph.carried
            held = [t.detach() if n in carried else t for n, t in enumerate(tensors)]
            return run_with_autograd(self, held)
        if forward_ad._current_level >= 0 and has_tangent(tensors):
            return self.push(tensors)
        return self.run(*tensors)[0]

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The values of named sizes in tensors that begin with the inputs."""
        if self.sized is None:
            return {}
        return self.sized.fit.named(self.sized.fit.read(tensors))

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[Request]]:
        from attn_graph.plan.building import plan_simplified

        return plan_simplified, (self.request,)

    def __dir__(self) -> list[str]:
        """The names for users; all others serve this library alone, and may change."""
        return [*FOR_USERS]

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    def backward(
        self,
        wants: Sequence[int] | None = None,
        cotangents: Sequence[TensorSpec | None] | None = None,
        saved: Sequence[TensorSpec] | None = None,
    ) -> Plan:
        """The plan of the gradient by some inputs, for cotangents and saved tensors of these specs;
        None: by all inputs, and as declared."""
        require_imports()
        from attn_graph.plan.building import plan_gradient

        return plan_gradient(self, wants, cotangents, saved)

    @property
    def vjp(self) -> Plan:
        """The plan of the gradient by every floating input; see `attn_graph.vjp` for its inputs.

        The vjp of a gradient is the second derivative. Raises GraphError for the plan of a second
        derivative.
        """
        return self.backward()

    @property
    def jvp(self) -> Plan:
        """The plan of forward mode by every floating input; see `attn_graph.jvp` for its inputs."""
        return self.plan_simplified(jvp(self.graph))

    @property
    def training_vjp(self) -> Plan:
        """The plan of a training step's gradient, without a cotangent of lse beside other outputs.
        It reads the values saved by the forward: see `recorded`."""
        plan = self.recorded
        return plan.backward(None, cotangent_specs(plan.graph, main_outputs(plan.graph)))

    def prepare(self, **inputs: torch.Tensor) -> Callable[..., torch.Tensor | Tensors]:
        """The plan with some inputs given in advance; it is called with the others, as the plan is.

        For the layers of a model, which share starts, lengths and tables of pages in each step. If
        all inputs but q, k, v, sinks and scales are given, a CPU reads and checks them here, once.
        They must not change until the last call: a call raises PlanMismatchError if PyTorch wrote
        to one of them, but sees no writes by other libraries. Raises PlanMismatchError for wrong
        inputs.
        """
        from attn_graph.plan.extras.prepared import prepare_inputs

        return prepare_inputs(self, inputs)

    def at(self, **sizes: int) -> Plan:
        """The plan for sizes as numbers, by their names; each size not given is its largest.

        A call of this plan with tensors of these sizes runs it, in its backend. Raises GraphError
        for other names, and for sizes outside a name's range.
        """
        from attn_graph.plan.building import bind_plan

        return bind_plan(self, sizes)

    def memory(self, **sizes: int) -> Memory:
        """Bytes needed by a call, and by a training step's gradient, known before they run.

        If lse is an output, the step uses the other outputs alone: `explain` also reports the needs
        of a gradient through lse. sizes: as in `at`.
        """
        require_imports()
        from attn_graph.plan.extras.memory import sum_needs

        plan = self.at(**sizes)
        return sum_needs(plan, plan.training_vjp if plan.graph.has_gradient else None)

    def cost(self, /, **tensors: torch.Tensor | int) -> Cost:
        """Flops and bytes left by the masks, and the least time on the target.

        Exact for masks without tensors, and for others if their tensors are given by the names of
        the inputs: `plan.cost(kv_lengths=lengths)`. Without them it is an upper bound, and it is
        marked as one if an exact count would take longer than a second. Sizes, as in `at`, stand
        among the tensors. Raises GraphError for other names.
        """
        require_imports()
        from attn_graph.planner.cost import cost

        sizes, given = split_sizes(self.graph, tensors)
        graph = bind_graph(self.graph, complete_sizes(self.graph, "cost", sizes))
        return cost(graph, self.target, given, precision=self.request.options.precision)

    def verify(self, /, *tensors: torch.Tensor, **named: torch.Tensor) -> Verification:
        """Run the plan on these tensors and compare with float64 by the rule of docs/semantics.md.

        If the graph has a gradient, and a backend for it, that of a training step is compared too,
        for drawn cotangents of all outputs but lse. If one key outweighs all others, the allowance
        is smaller than that page's: see there.
        """
        require_imports()
        from attn_graph.plan.extras.verified import verify_plan

        return verify_plan(self, tensors, named)

    def check(self, /, *tensors: torch.Tensor, **named: torch.Tensor) -> None:
        """Raise PlanMismatchError if starts, lengths or pages point at nothing: starts that
        descend or do not begin with 0, lengths beyond the tensor, pages outside the pool. Nothing
        is run.

        On CPUs calls check this themselves, but for lengths of padded tensors that do not end all
        keys or queries, as within `|`. On GPUs it is checked here alone, because a call would have
        to wait for the device. With wrong ones the result of a call is undefined.
        """
        given = self.arranged(tensors, named)
        plan = self.bound_to(given)
        plan.check_tensors(given)
        check_data(plan.graph, dict(enumerate(given)))

    def text(self) -> str:
        """The generated code that runs it, or a description. May change between versions."""
        return self.executable.text() or "\n".join(
            (*self.executable.notes, *self.executable.launches())
        )

    def explain(self, **sizes: int) -> Explanation:
        """The backend and the reasons, every other backend's refusal, and the cost.

        Prints as text, shows as HTML in a notebook, and gives `to_dict()`. It compiles kernels to
        show their machine code. `attn_graph.explain` builds nothing, and names the changes that
        lift each refusal. sizes: as in `at`.
        """
        explanation: Explanation = find("explain_plan")(self, sizes)
        return explanation

    def __repr__(self) -> str:
        return f"Plan({self.backend} on {self.target})\n{self.graph}"

    def _repr_html_(self) -> str:
        """For notebooks: the backend, the other backends, and the graph. It compiles nothing."""
        page: str = find("show_plan")(self)
        return page


def content_of(plan: Plan) -> str:
    """The plan as text. Raises PlanTargetError if it is for another machine than this one."""
    if not plan.memo.content:
        plan.memo.content = write_plan(plan.request)
    return plan.memo.content


content_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result
