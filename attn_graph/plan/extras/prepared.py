"""Inputs given in advance: `plan.prepare(pages=..., kv_lengths=...)`, for all layers of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from attrs import frozen
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from attn_graph.errors import PlanMismatchError
from attn_graph.lowering.backend import Write
from attn_graph.machine.ambient import has_tangent, is_traced, neutral_state
from attn_graph.machine.fitting import Fit
from attn_graph.machine.likeness import look_at
from attn_graph.machine.tensors import (
    arrange,
    read_array,
    read_arrays,
    require_as_declared,
    require_device,
    stranger_problem,
    way_out_of_strangers,
)
from attn_graph.plan.extras.outputs import admit, write_outputs
from attn_graph.printing.words import own_name
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from attn_graph.plan import Out, Plan

Tensors = tuple[torch.Tensor, ...]


@final
@frozen(eq=False, repr=False)
class Prepared:
    """A plan with some of its inputs. Call it with the others, by position or by name.

    It computes as the plan does. A call recorded by autograd, or traced, or transformed,
    is a call of the plan. given: inputs by number, unchanged since. versions: PyTorch's counts of
    writes to them. write: calls that know them; None if the backend reads nothing in advance.
    """

    plan: Plan
    given: Mapping[int, torch.Tensor]
    versions: list[int]
    write: Write | None

    def __call__(
        self, /, *tensors: torch.Tensor, out: Out | None = None, **named: torch.Tensor
    ) -> torch.Tensor | Tensors:
        plan, every = self.plan, self.complete(tensors, named)
        if self.write is None or is_dynamo_compiling() or is_traced():
            return plan(*every, out=out)
        if out is not None:
            return write_outputs(plan, every, {}, out, self.write)
        every = read_arrays(every)
        recorded = admit(plan, every) and torch.is_grad_enabled()
        if recorded or (forward_ad._current_level >= 0 and has_tangent(every)):
            return plan(*every)
        with torch.no_grad(), plan.named_in_profiles("forward"):
            made = self.write((), *every)
        return made[0] if plan.single else tuple(made)

    def __repr__(self) -> str:
        given = (f"{self.plan.names[n]}: {TensorSpec.like(x).type}" for n, x in self.given.items())
        return f"Prepared({self.plan.backend} on {self.plan.target}, {', '.join(given)})"

    def complete(self, tensors: Tensors, named: Mapping[str, torch.Tensor]) -> Tensors:
        """All inputs, in order. Raises PlanMismatchError for inputs given in advance and written to
        since, and for missing ones."""
        if count_writes(self.given) != self.versions:
            names = ", ".join(self.plan.names[n] for n in self.given)
            raise PlanMismatchError(
                f"prepared: one of {names} was written to after plan.prepare(...); call it again "
                "for each step",
                way_out="",
            )
        if named or len(tensors) + len(self.given) != self.plan.count:
            inputs = enumerate(self.plan.graph.inputs)
            rest = {x.name: x.spec for n, x in inputs if n not in self.given}
            tensors = arrange(rest, tensors, named)
        every = [*tensors]
        for n, x in self.given.items():  # in order
            every.insert(n, x)
        return tuple(every)


def prepare_inputs(plan: Plan, named: Mapping[str, torch.Tensor]) -> Prepared:
    """`Plan.prepare`."""
    inputs = {x.name: x.spec for x in plan.graph.inputs}
    if unknown := [name for name in named if name not in inputs]:
        foreign = [name for name in unknown if not own_name(name, inputs)]
        raise PlanMismatchError(
            *(stranger_problem(name, inputs) for name in unknown),
            way_out=way_out_of_strangers(foreign),
        )
    tensors = {name: read_array(x) for name, x in named.items()}
    require_device(tuple(tensors.values()), plan.target)
    require_known(plan, tensors)
    given = {n: tensors[name] for n, name in enumerate(plan.names) if name in tensors}
    fix = plan.executable.fix
    with neutral_state(), torch.no_grad():
        write = None if fix is None else fix(given)
    return Prepared(plan, given, count_writes(given), write)


def require_known(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanMismatchError unless inputs are as declared, as far as they alone tell. Inputs
    like the last ones are."""
    looks, names = [*map(look_at, tensors.values())], (*tensors,)
    if None not in looks and plan.memo.given.get(names) == looks:
        return
    specs = {x.name: x.spec for x in plan.graph.inputs if x.name in tensors}
    sized = plan.sized
    if sized is None:
        require_as_declared(tensors, specs, plan.target)
        plan.memo.given[names] = looks
        return
    if (*specs,) not in plan.memo.fits:
        own = {s.name for spec in specs.values() for dim in spec.dims for s in dim.symbols}
        symbols = [s for s in sized.fit.symbols if s.name in own]
        plan.memo.fits[(*specs,)] = Fit.of(specs, symbols, plan.target)
    plan.memo.fits[(*specs,)].sizes_of([tensors[name] for name in specs])
    plan.memo.given[names] = looks


def count_writes(given: Mapping[int, torch.Tensor]) -> list[int]:
    """PyTorch's counts of writes to tensors. Those of inference mode have none."""
    return [0 if x.is_inference() else x._version for x in given.values()]
