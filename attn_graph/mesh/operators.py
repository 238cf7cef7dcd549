"""torch.ops.attn_graph.mesh: a rank's plan as an operator, for torch.compile.

Traced code knows a plan by its name in this process. The operator returns a call's results, then
the other tensors saved for the backward; `mesh_backward` takes all of them, and cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_graph.ir.attention import SAVED
from attn_graph.ir.layouts import result_spec
from attn_graph.mesh.heads import head_shapes
from attn_graph.mesh.plan import plans
from attn_graph.mesh.site import Site
from attn_graph.spec import TensorSpec, accumulator

Tensors = Sequence[torch.Tensor]
Context = Any  # autograd's own, on which torch puts what it likes


@torch.library.custom_op(
    "attn_graph::mesh", mutates_args=(), schema="(Tensor[] tensors, str plan) -> Tensor[]"
)
def call_plan(tensors: Tensors, plan: str) -> list[torch.Tensor]:
    """A call's results, then the other tensors saved for the backward."""
    with torch.no_grad():
        outputs, (o, lse, *more) = plans[plan].start(tensors)
    site = plans[plan].site
    saved: dict[str, torch.Tensor] = dict(zip(SAVED, (o, lse), strict=True))
    return [*outputs, *(saved[name] for name in result_names(site)[len(outputs) :]), *more]


@call_plan.register_fake
def describe_results(tensors: Tensors, plan: str) -> list[torch.Tensor]:
    """The results of fake tensors."""
    site, q = plans[plan].site, tensors[0]
    sharded = site.sharded
    _, numbers = sharded.whole
    rows: list[torch.Tensor] = []
    for name in result_names(site):
        whole = result_spec(sharded.graph, numbers[sharded.node.names.index(name)])
        rows.append(describe_spec(q, site.local_spec(whole, sharded.result_axes[name != "o"])))
    if sharded.method == "heads":
        *four, lse = head_shapes(site)
        return [*rows, *map(q.new_empty, four), q.new_empty(lse, dtype=accumulator(q.dtype))]
    return rows


@torch.library.custom_op(
    "attn_graph::mesh_backward",
    mutates_args=(),
    schema="(Tensor[] tensors, str plan, bool[] given) -> Tensor[]",
)
def pull_plan(tensors: Tensors, plan: str, given: Sequence[bool]) -> list[torch.Tensor]:
    """The gradients of the trained inputs. tensors: inputs, results, cotangents `given`."""
    site, count = plans[plan].site, len(tensors) - sum(given)
    inputs = len(site.sharded.open_inputs)
    results, cotangents = tensors[inputs:count], iter(tensors[count:])
    names = result_names(site)
    named = dict(zip(names, results, strict=False))
    saved = *tensors[:inputs], *(named[x] for x in SAVED), *results[len(names) :]
    grads = [next(cotangents) if each else None for each in given]
    with torch.no_grad():
        return [*plans[plan].pull(trained_inputs(site), saved, grads)]


def result_names(site: Site) -> tuple[str, ...]:
    """The outputs of a call, then o and lse if they are not outputs."""
    shown = site.sharded.output_names
    return *shown, *(name for name in SAVED if name not in shown)


def trained_inputs(site: Site) -> tuple[bool, ...]:
    return tuple(n in site.sharded.trained for n in site.sharded.open_inputs)


@pull_plan.register_fake
def describe_gradients(tensors: Tensors, plan: str, given: Sequence[bool]) -> list[torch.Tensor]:
    """The gradients of fake tensors: each lies as its input."""
    site = plans[plan].site
    pairs = zip(site.specs.values(), trained_inputs(site), strict=True)
    return [describe_spec(tensors[0], spec) for spec, trains in pairs if trains]


def describe_spec(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor of a spec, beside another one."""
    return x.new_empty_strided(spec.shape, spec.strides, dtype=spec.dtype)


def remember_call(ctx: Context, inputs: tuple[Tensors, str], output: Tensors) -> None:
    tensors, ctx.plan = inputs
    names = plans[ctx.plan].site.sharded.output_names
    ctx.mark_non_differentiable(*(x for x, n in zip(output, names, strict=False) if n not in SAVED))
    ctx.save_for_backward(*tensors, *output)


def pull_call(
    ctx: Context, grads: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], None]:
    """The gradients of the tensors of a call."""
    site = plans[ctx.plan].site
    pairs = [*zip(site.sharded.output_names, grads, strict=False)]
    given = [g is not None and name in SAVED for name, g in pairs]
    cotangents = [g for (_, g), each in zip(pairs, given, strict=True) if g is not None and each]
    made = iter(pull_plan([*ctx.saved_tensors, *cotangents], ctx.plan, given))
    return [next(made) if each else None for each in trained_inputs(site)], None


call_plan.register_autograd(pull_call, setup_context=remember_call)
