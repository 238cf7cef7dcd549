"""A plan of one rank: called with its shards, differentiable, together with all other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, NoReturn, final
from weakref import WeakValueDictionary

import torch
from attrs import Factory, field, frozen
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from attn_graph.errors import GraphError, PlanMismatchError, show
from attn_graph.ir.transforms.gradient_ops import clear_blind_rows
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import (
    has_tangent,
    named_in_profiles,
    neutral_state,
    without_autocast,
)
from attn_graph.machine.autograd import run_with_autograd
from attn_graph.machine.imports import load_modules
from attn_graph.machine.target import Target
from attn_graph.machine.tensors import arrange, is_distributed, require_as_declared
from attn_graph.mesh.alone import OwnPart
from attn_graph.mesh.distributed import Wrapping, unwrap
from attn_graph.mesh.exchange import compare_texts, pack, post, unpack
from attn_graph.mesh.heads import backward_heads, forward_heads, prepare_heads
from attn_graph.mesh.results import ShardedPlan
from attn_graph.mesh.ring import backward_ring, forward_ring, prepare_ring
from attn_graph.mesh.schedule import absent_rows, shared_inputs
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.site import Site
from attn_graph.mesh.totals import Cotangents, Totals, lay_out_as
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = Sequence[torch.Tensor]
ONCE = (
    "shard: ranks differentiate once, in reverse mode: call their plans outside of torch.func's "
    "transforms (vmap, grad, jvp) and of forward_ad, and take gradients by backward() or "
    "torch.autograd.grad without create_graph; or compile the graph itself for one device"
)
plans: WeakValueDictionary[str, RankPlan] = WeakValueDictionary()  # by the names in traced code
numbers = count()


def enter_plan(plan: RankPlan) -> str:
    """A name for a plan in traced code, valid during the plan's life."""
    name = f"rank's plan {next(numbers)}"
    plans[name] = plan
    return name


@final
@frozen(eq=False, repr=False)
class RankPlan(ShardedPlan):
    """The plan of one rank, in its place in the group.

    inputs: its specs; width: how many outputs it has. Traced code reads fields alone.
    """

    site: Site
    inputs: Mapping[str, TensorSpec] = field(
        init=False, default=Factory(lambda plan: plan.site.specs, takes_self=True)
    )
    width: int = field(
        init=False, default=Factory(lambda plan: len(plan.sharded.graph.outputs), takes_self=True)
    )
    name: str = field(init=False, default=Factory(enter_plan, takes_self=True))

    @property
    def sharded(self) -> Sharded:
        return self.site.sharded

    @property
    def target(self) -> Target:
        return self.site.request.target

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.site.specs

    @cached_property
    def own(self) -> OwnPart | None:
        return OwnPart(self.site) if self.sharded.method is None else None

    @property
    def constants(self) -> tuple[int, ...]:
        return self.sharded.graph.constant_places

    def __call__(
        self, /, *tensors: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if is_dynamo_compiling():
            return self.trace(arrange(self.inputs, tensors, named))
        try:
            given, wrapping = self.read(tensors, named)
        except (GraphError, PlanMismatchError) as fault:
            self.agree((*tensors, *named.values()), fault)
            raise
        if _len_torch_dispatch_stack():
            outputs = self.call_op(given)
        else:
            self.agree(given)
            wants = torch.is_grad_enabled() and any(x.requires_grad for x in given)
            outputs = run_with_autograd(self, given) if wants else self.run(*given)[0]
        outputs = wrapping.wrap(outputs) if wrapping else outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def trace(self, tensors: Tensors) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The call as an operator in code under torch.compile. Raises GraphError."""
        if any(map(is_distributed, tensors)):
            raise GraphError(
                "shard: compiled code calls a rank's plan with plain tensors; pass x.to_local(), "
                "and make DTensors of the results by DTensor.from_local"
            )
        outputs = self.call_op(tensors)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def call_op(self, tensors: Tensors) -> Tensors:
        """The outputs by a PyTorch operator, visible to traces and dispatch modes."""
        results: Tensors = torch.ops.attn_graph.mesh([*tensors], self.name)
        return results[: self.width]

    def start(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """`run` for the operator's tensors."""
        given, _ = self.read(tensors, {})
        self.agree(given)
        return self.run(*given)

    def read(
        self, tensors: Tensors, named: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], Wrapping | None]:
        """The rank's parts in their order, and how results become DTensors; errors as of a call."""
        ordered = arrange(self.specs, tensors, named)
        if _are_functorch_transforms_active() or has_tangent(ordered):
            raise GraphError(ONCE)
        parts, wrapping = unwrap(self.site, dict(zip(self.specs, ordered, strict=True)))
        require_as_declared(parts, self.specs, self.target)
        return [*parts.values()], wrapping

    def agree(self, given: Sequence[object], fault: Exception | None = None) -> None:
        """Compare with the other ranks, until all computed once. fault: this rank's reason not to
        compute.

        Raises GraphError for different graphs, and for another rank's fault.
        """
        if self.site.memory.agrees:
            return
        kind = self.target.kind
        places = (x.device for x in given if isinstance(x, torch.Tensor))
        default = torch.device("cuda" if kind == "cuda" and torch.cuda.is_available() else "cpu")
        device = next((place for place in places if place.type == kind), default)
        with neutral_state():
            compare_texts(self.site.group, str(self.sharded), device, fault)
        self.site.memory.agrees = fault is None

    def prepare(self) -> None:
        """Plan the first box, so that a graph without a backend is refused before anything is sent.

        Raises NoBackendError.
        """
        if self.own:
            assert self.own.plan
        elif self.sharded.method == "heads":
            prepare_heads(self.site)
        else:
            prepare_ring(self.site)

    def __copy__(self) -> RankPlan:
        return self

    def __deepcopy__(self, memo: object) -> RankPlan:
        return self

    def __reduce__(self) -> NoReturn:
        raise GraphError(
            "shard: a rank's plan belongs to its process group, and doesn't pickle; pickle the "
            "sharded graph, or its text, and compile it where it arrives"
        )

    def run(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The outputs, and the other tensors saved for the backward."""
        with without_autocast(), named_in_profiles("mesh forward"):
            inputs = self.site.all_inputs(tensors)
            if self.own:
                return self.own.forward(inputs)
            sharded, site = self.sharded, self.site
            saved: Tensors = ()
            inputs = site.unpack_all(inputs)
            if sharded.method == "heads":
                results, saved = forward_heads(site, inputs)
            else:
                results = forward_ring(site, inputs)
                absent = sharded.once(absent_rows, site.holding.rows)
                results.join_sinks(site.sinks(inputs), site.holding.heads, absent)
            nq = sharded.eqn.args[0]
            rows = results.finish(site, inputs[nq].dtype, sharded.graph.inputs[nq].spec)
            named = dict(zip(sharded.node.names, rows, strict=True))
            return [named[name] for name in sharded.output_names], (*rows[:2], *saved)

    def pull(
        self, needs: tuple[bool, ...], saved: Tensors, grads: Sequence[torch.Tensor | None]
    ) -> Tensors:
        """The gradients of the inputs marked in `needs`, from the forward's saved tensors.

        All are computed, since other ranks may need more than this one. Raises GraphError if
        autograd records this too.
        """
        if torch.is_grad_enabled():
            raise GraphError(ONCE)
        given, more = saved[: len(needs)], saved[len(needs) :]
        with torch.no_grad(), without_autocast(), named_in_profiles("mesh backward"):
            inputs = self.site.all_inputs(given)
            if self.own:
                totals = Totals.given(self.site, self.own.backward(inputs, more, grads))
            else:
                totals = self.pull_together(inputs, more, grads)
            self.add_shared(totals)
        specs = self.sharded.graph.inputs
        return [
            lay_out_as(totals.get(n, x), x.dtype, specs[n].spec)
            for n, x, need in zip(self.sharded.open_inputs, given, needs, strict=True)
            if need
        ]

    def pull_together(
        self, inputs: Tensors, saved: Tensors, grads: Sequence[torch.Tensor | None]
    ) -> Totals:
        """The gradients of the rank's inputs with exchanged keys or heads."""
        site, (o, lse, *more) = self.site.behind, saved
        inputs = site.unpack_all(inputs)
        o, lse = site.unpack(o), site.unpack(lse)
        named = dict(zip(self.sharded.output_names, grads, strict=True))
        do, dlse = (
            None if x is None else clear_blind_rows(site.unpack(x), lse)
            for x in (named.get("o"), named.get("lse"))
        )
        cotangents = Cotangents(o, lse, do, dlse)
        if self.sharded.method == "heads":
            totals = backward_heads(site, inputs, more, cotangents)
        else:
            totals = backward_ring(site, inputs, cotangents)
        if self.sharded.sinks is not None:
            sinks = inputs[self.sharded.sinks]
            totals.own(self.sharded.sinks).add_(cotangents.sink_gradient(sinks))
        return totals.packed(site)

    def push_outputs(self, primals: Tensors, tangents: Mapping[int, torch.Tensor]) -> NoReturn:
        """Raises GraphError: forward mode is not supported."""
        raise GraphError(ONCE)

    def add_shared(self, totals: Totals) -> None:
        """Add up gradients over the ranks with one part of an input, in their order."""
        site = self.site.behind
        others = [r for r in range(self.sharded.mesh.ranks) if r != site.rank]
        shared = {r: shared_inputs(self.sharded, site.rank, r) for r in others}
        outgoing = {r: pack(map(totals.own, own)) for r, own in shared.items() if own}
        sizes = {r: flat.numel() for r, flat in outgoing.items()}
        like = next(iter(outgoing.values()), totals.own(self.sharded.eqn.args[0]))
        incoming = post(site.line, outgoing, sizes, like).wait()
        shares = {site.rank: {n: totals.own(n).clone() for own in shared.values() for n in own}}
        for r, flat in incoming.items():
            shapes = [totals.own(n).shape for n in shared[r]]
            shares[r] = dict(zip(shared[r], unpack(flat, shapes), strict=True))
        for n in shares[site.rank]:
            total = totals.own(n).zero_()
            for r in sorted(shares):
                if n in shares[r]:
                    total += shares[r][n]


def plan_rank(sharded: Sharded, request: Request, group: ProcessGroup | None) -> RankPlan:
    """The plan of this process, one for each rank of the mesh.

    group: the ranks' process group, by default the group of all processes. Raises GraphError for
    one of another size, and without any.
    """
    from torch import distributed as dist

    if not dist.is_initialized():
        raise GraphError(
            "shard: this process belongs to no group; call torch.distributed.init_process_group "
            "first, or attn_graph.explain, which needs none"
        )
    ranks = dist.group.WORLD if group is None else group
    if not isinstance(ranks, dist.ProcessGroup):
        raise GraphError(
            f"shard: group {show(ranks)} is not a process group of which this process is a member; "
            "compile in its members alone, with what new_group or DeviceMesh.get_group gives them"
        )
    if ranks.size() != sharded.mesh.ranks:
        raise GraphError(
            f"shard: a mesh of {sharded.mesh.ranks} ranks, and a group of {ranks.size()}; "
            f"say ag.Mesh({ranks.size()})"
        )
    load_modules("attn_graph.mesh.operators")  # which imports this module
    plan = RankPlan(Site(sharded, ranks.rank(), ranks, request))
    plan.prepare()
    return plan
