"""A plan of one rank: called with its shards, differentiable, together with all other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, final

import torch
from attrs import frozen

from attn_graph.compiler import Recipe
from attn_graph.errors import GraphError
from attn_graph.ir.gradient_ops import clear_blind_rows
from attn_graph.machine.ambient import has_tangent, named_in_profiles, without_autocast
from attn_graph.machine.autograd import run_with_autograd
from attn_graph.machine.target import Target
from attn_graph.machine.tensors import arrange, require_as_declared
from attn_graph.mesh.distributed import unwrap
from attn_graph.mesh.exchange import compare_texts, pack, post, unpack
from attn_graph.mesh.heads import backward_heads, forward_heads
from attn_graph.mesh.results import ShardedPlan
from attn_graph.mesh.ring import backward_ring, forward_ring
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.site import Site
from attn_graph.mesh.totals import Cotangents, Totals, lay_out_as
from attn_graph.mesh.traffic import shared_inputs
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = Sequence[torch.Tensor]
ONCE = (
    "shard: ranks differentiate once, in reverse mode: take gradients without create_graph and "
    "outside of torch.func.jvp and forward_ad, or compile the graph itself for one device"
)


@final
@frozen(eq=False, repr=False)
class RankPlan(ShardedPlan):
    """The plan of one rank, in its place in the group."""

    site: Site

    @property
    def sharded(self) -> Sharded:
        """What it runs."""
        return self.site.sharded

    @property
    def target(self) -> Target:
        return self.site.recipe.target

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.site.specs

    @property
    def constants(self) -> tuple[int, ...]:
        """Places of the outputs that have no gradient."""
        return self.sharded.graph.constant_places

    def __call__(
        self, /, *tensors: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        ordered = arrange(self.specs, tensors, named)
        parts, wrapping = unwrap(self.site, dict(zip(self.specs, ordered, strict=True)))
        require_as_declared(parts, self.specs, self.target)
        given = [*parts.values()]
        if has_tangent(given):
            raise GraphError(ONCE)
        self.agree(given[0].device)
        wants = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        outputs = run_with_autograd(self, given) if wants else self.run(*given)[0]
        outputs = wrapping.wrap(outputs) if wrapping else outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def agree(self, device: torch.device) -> None:
        """Compare with the other ranks, once. Raises GraphError where they compute other things."""
        if not self.site.memory.agrees:
            compare_texts(self.site.group, str(self.sharded), device)
            self.site.memory.agrees = True

    def run(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The outputs, and what the backward reads beside the inputs: o, lse, and more."""
        sharded, site = self.sharded, self.site
        with without_autocast(), named_in_profiles("mesh forward"):
            inputs = site.all_inputs(tensors)
            saved: Tensors = ()
            if sharded.method == "heads":
                results, saved = forward_heads(site, inputs)
            else:
                results = forward_ring(site, inputs)
                results.join_sinks(site.sinks(inputs))
            nq = sharded.eqn.args[0]
            rows = results.finish(inputs[nq].dtype, sharded.graph.inputs[nq].spec)
        first = len(sharded.graph.inputs)
        return [rows[i - first] for i in sharded.graph.outputs], (*rows[:2], *saved)

    def pull(
        self, needs: tuple[bool, ...], saved: Tensors, grads: Sequence[torch.Tensor | None]
    ) -> Tensors:
        """The gradients of the inputs marked in `needs`, from what the forward saved.

        All are computed, since other ranks may need what this one does not. Raises GraphError where
        autograd records this too.
        """
        if torch.is_grad_enabled():
            raise GraphError(ONCE)
        specs = self.sharded.graph.inputs
        given, (o, lse, *more) = saved[: len(needs)], saved[len(needs) :]
        with torch.no_grad(), without_autocast(), named_in_profiles("mesh backward"):
            inputs = self.site.all_inputs(given)
            cotangents = self.read_cotangents(o, lse, grads)
            if self.sharded.method == "heads":
                totals = backward_heads(self.site, inputs, more, cotangents)
            else:
                totals = backward_ring(self.site, inputs, cotangents)
            if self.sharded.sinks is not None:
                sinks = inputs[self.sharded.sinks]
                totals.own(self.sharded.sinks).add_(cotangents.sink_gradient(sinks))
            self.add_shared(totals)
        return [
            lay_out_as(totals.get(n, x), x.dtype, specs[n].spec)
            for n, x, need in zip(self.sharded.open_inputs, given, needs, strict=True)
            if need
        ]

    def push_outputs(self, primals: Tensors, tangents: Mapping[int, torch.Tensor]) -> NoReturn:
        """Raises GraphError: there is no forward mode."""
        raise GraphError(ONCE)

    def read_cotangents(
        self, o: torch.Tensor, lse: torch.Tensor, grads: Sequence[torch.Tensor | None]
    ) -> Cotangents:
        """o, lse and their cotangents by the order of the outputs; what blind rows hold is 0."""
        first = len(self.sharded.graph.inputs)
        by_number = dict(zip(self.sharded.graph.outputs, grads, strict=True))
        do, dlse = (
            None if x is None else clear_blind_rows(x, lse)
            for x in (by_number.get(first), by_number.get(first + 1))
        )
        return Cotangents(o, lse, do, dlse)

    def add_shared(self, totals: Totals) -> None:
        """Add up gradients over the ranks that have the same part of an input, in their order."""
        site = self.site
        others = [r for r in range(self.sharded.mesh.ranks) if r != site.rank]
        shared = {r: shared_inputs(self.sharded, site.rank, r) for r in others}
        outgoing = {r: pack(map(totals.own, own)) for r, own in shared.items() if own}
        sizes = {r: flat.numel() for r, flat in outgoing.items()}
        incoming = post(site.group, outgoing, sizes, totals.own(0)).wait()
        shares = {site.rank: {n: totals.own(n).clone() for own in shared.values() for n in own}}
        for r, flat in incoming.items():
            shapes = [totals.own(n).shape for n in shared[r]]
            shares[r] = dict(zip(shared[r], unpack(flat, shapes), strict=True))
        for n in shares[site.rank]:
            total = totals.own(n).zero_()
            for r in sorted(shares):
                if n in shares[r]:
                    total += shares[r][n]


def plan_rank(sharded: Sharded, recipe: Recipe, group: ProcessGroup | None) -> RankPlan:
    """The plan of this process, one of as many ranks as the mesh has.

    group: the ranks' process group, by default that of all processes. Raises GraphError for one of
    another size, and where there is none.
    """
    from torch import distributed as dist

    if not dist.is_initialized():
        raise GraphError(
            "shard: this process belongs to no group; call torch.distributed.init_process_group "
            "first, or attn_graph.explain, which needs none"
        )
    ranks = dist.group.WORLD if group is None else group
    assert ranks is not None  # there is one where a process group is initialised
    if ranks.size() != sharded.mesh.ranks:
        raise GraphError(
            f"shard: a mesh of {sharded.mesh.ranks} ranks, and a group of {ranks.size()}; "
            f"say ag.Mesh({ranks.size()})"
        )
    return RankPlan(Site(sharded, ranks.rank(), ranks, recipe))
