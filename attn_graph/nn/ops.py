"""torch.ops.attn_graph: attention as operators of PyTorch, for traced or transformed code.

`attention` takes tensors and the text of a plan or of an unplanned call, and plans at run time by
the kind of tensors; `attention_backward` takes its saved tensors, and cotangents. This module has
all that PyTorch needs of an operator: results for fake tensors, derivatives, batching.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nested._internal.nested_tensor import NestedTensor

from attn_graph.compiler import avoided, preferred
from attn_graph.errors import GraphError, PlanMismatchError, PlanTargetError
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import output_specs, result_spec
from attn_graph.ir.storage.scaling import stands_in
from attn_graph.ir.transforms.vjp import residuals
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import flop_formulas, has_tangent, is_traced
from attn_graph.machine.autograd import run_each, select_moving, split_tangents
from attn_graph.machine.likeness import NESTED, OWN_CLASSES
from attn_graph.machine.target import default_target
from attn_graph.machine.torch_switches import switches_that_count
from attn_graph.nn.calls import OPTIONS, make_graph, new_plan
from attn_graph.nn.packed_sizes import serves_sizes
from attn_graph.nn.results import (
    require_count,
    restore_graph,
    results_of,
    strides_as,
    strides_like,
)
from attn_graph.nn.tracing import register_masks
from attn_graph.plan import Plan
from attn_graph.plan.cache import Key, cache
from attn_graph.planner.forms.content import CallContent, read_content
from attn_graph.planner.forms.content import introduce as introduce
from attn_graph.rings import find, load
from attn_graph.spec import (
    TensorSpec,
    ValueType,
    accumulator,
    dense_strides,
    layout_problem,
    new_strides,
    normalise_strides,
    order_axes,
)
from attn_graph.spec.dims import bind

if TYPE_CHECKING:
    from attn_graph.lowering.problem import Facts

NAME = "attn_graph"
KINDS = ("cpu", "cuda")  # of devices
STRIDELESS = (  # PyTorch's dispatch keys of tensors without strides
    "NestedTensorCPU", "NestedTensorCUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU",
    "SparseCsrCUDA", "MkldnnCPU",
)  # fmt: skip

Context = Any  # autograd's own, with torch's attributes
Tensors = Sequence[Tensor]


def find_plan(tensors: Tensors, text: str) -> Plan:
    """The plan of a text for tensors of this kind; checked in full if it is new."""
    count = len(tensors)
    switches = switches_that_count(count > 0 and tensors[0].is_cpu)
    key: Key = (text, count, switches, preferred.get(), avoided.get())
    plan = cache.recent.get(key)
    if True in map(getattr, tensors, *NESTED):
        plan = None
    if plan is not None and plan.memo.call[0](*tensors):
        return plan
    known = plan if plan is not None and serves_sizes(plan, tensors) else cache.recall(key, tensors)
    plan = plan_anew(tensors, text) if known is None else known
    plan.admit(tuple(tensors))
    if known is None:
        cache.remember(key, tensors, plan)
    return plan


def plan_anew(tensors: Tensors, text: str) -> Plan:
    """The plan of a text for these tensors. Raises the errors of `compile` and of calls."""
    content = read_content(text)
    require_count(text, len(tensors))
    if isinstance(content, CallContent):
        options, named = content.restore(), dict(zip(content.inputs, tensors, strict=True))
        q, k, v = named.pop("q"), named.pop("k"), named.pop("v", None)
        plan = new_plan(q, k, v, named, tuple(options[name] for name in OPTIONS))
    else:
        here = default_target(tensors[0].device if tensors else None)
        if content.target != here.name:
            raise PlanTargetError(
                f"the plan is for {content.target}, but the tensors are on {here}"
            )
        graph, choice, among = content.restore()
        plan = find("plan_simplified")(Request(graph, here, choice, among))
    return plan


# The computation


def run_attention(tensors: Tensors, text: str, saves: bool = False) -> list[Tensor]:
    """The results of a call; with `saves` also the residuals of its backward."""
    plan = find_plan(tensors, text)
    with plan.named_in_profiles("forward"):  # autograd records nothing here: see record_attention
        if not saves:
            return [*plan.infer(*tensors)[0]]
        outputs, saved = plan.run(*tensors)
    results = results_of(text)
    hidden = [t for t, place in zip(saved, results.saved, strict=True) if place >= results.count]
    if not hidden:
        return [*outputs]
    layouts, sizes = plan.request.facts.once(result_layouts), plan.sizes_of(tensors)
    strides = [bind(s, sizes) for _, s in layouts[results.count :]]
    return [*outputs, *map(lay, hidden, strides)]


def run_gradient(
    tensors: Tensors, text: str, needs: Sequence[bool], given: Sequence[bool]
) -> list[Tensor]:
    """The gradients of the inputs marked in `needs`, each dense in the order of its input.

    tensors: the inputs, the saved results of `attention`, the cotangents marked in `given`.
    """
    count, known = len(needs), len(needs) + len(results_of(text).saved)
    inputs, cotangents = tensors[:count], iter(tensors[known:])
    grads = [next(cotangents) if each else None for each in given]
    with torch.no_grad():
        gradients = find_plan(inputs, text).pull(tuple(needs), tensors[:known], grads)
    wanted = (t for t, need in zip(inputs, needs, strict=True) if need)
    return [
        lay(g, dense_strides(t.shape, order_axes(t.shape, t.stride())))
        for g, t in zip(gradients, wanted, strict=True)
    ]


def lay(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor with these dense strides: a copy if it has others."""
    if x.stride() == strides:
        return x
    if normalise_strides(x.shape, x.stride()) == normalise_strides(x.shape, strides):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def result_layouts(facts: Facts) -> tuple[tuple[ValueType, tuple[int, ...]], ...]:
    graph = facts.graph
    more = (result_spec(graph, i) for i in residuals(graph) if i not in graph.outputs)
    specs = (*output_specs(graph), *more)
    return tuple((s.type, new_strides(s)) for s in specs)


# Results for fake tensors


def fake_attention(tensors: Tensors, text: str, saves: bool = False) -> list[Tensor]:
    """Empty results. Raises the errors of calls, for sizes that may be symbolic."""
    content, results = read_content(text), results_of(text)
    let_inductor_call()
    require_count(text, len(tensors))
    devices = dict.fromkeys(str(t.device) for t in tensors)
    if len(devices) > 1:
        raise PlanMismatchError(f"expected tensors on one device, got {', '.join(devices)}")
    if isinstance(content, CallContent):
        every = [*fake_results(content, results.names, tensors)]
    else:
        from attn_graph.lowering.problem import facts_of  # waits for the first plan

        graph = restore_graph(text)
        require_specs(graph, tensors)
        every = [
            tensors[0].new_empty_strided(type_.shape, strides, dtype=type_.dtype)
            for type_, strides in facts_of(graph).once(result_layouts)
        ]
    return every if saves else every[: results.count]


def let_inductor_call() -> None:
    """Inductor, once it is loaded, calls the operator as it is.

    Where $CI is set it refuses all others that PyTorch's table decomposes (its `make_fallback`).
    """
    if (lowering := sys.modules.get("torch._inductor.lowering")) is not None:
        lowering.FALLBACK_ALLOW_LIST.add(OP.name().partition(".")[0])


def fake_results(content: CallContent, names: Sequence[str], tensors: Tensors) -> Iterator[Tensor]:
    """Each as declared, or o in the memory order of q and the others in C order."""
    # Raises GraphError for tensors that make no sense together, by example sizes of symbols.
    specs = {name: example_spec(x) for name, x in zip(content.inputs, tensors, strict=True)}
    known = {name: spec for name, spec in specs.items() if spec is not None}
    if len(known) == len(specs):
        make_graph(known, content.restore())
    q, declared = tensors[0], dict(content.outputs or ())
    wide = stands_in(q.dtype)
    rows = (q.shape[1], q.shape[0]) if "q_starts" in content.names else q.shape[:3]
    o = (*q.shape[:-1], tensors[2].shape[-1] if content.v is None else content.v)
    narrow = q.dtype if "amax" in names else wide
    types = {"o": (o, narrow), "wide": (o, wide), "amax": ((), torch.float32)}
    for name in names:
        shape, dtype = types.get(name, (rows, accumulator(wide)))
        if name in declared:
            yield q.new_empty_strided(shape, strides_as(declared[name], shape), dtype=dtype)
        elif shape is o:
            strides = strides_like(shape, q.shape, q.stride())
            yield q.new_empty_strided(shape, strides, dtype=dtype)
        else:
            yield q.new_empty(shape, dtype=dtype)


def require_specs(graph: Graph, tensors: Tensors) -> None:
    """Raise PlanMismatchError for tensors that differ from the graph's inputs."""
    differences = [
        f"{i.name}: expected {i.spec}, got {t.dtype} {[*t.shape]} with strides {[*t.stride()]}"
        for i, t in zip(graph.inputs, tensors, strict=True)
        if (t.dtype, *t.shape) != (i.spec.dtype, *i.spec.shape)
        or normalise_strides(t.shape, t.stride()) != i.spec.strides
    ]
    if differences:
        raise PlanMismatchError(*differences)


def example_spec(t: Tensor) -> TensorSpec | None:
    """A tensor's spec, with examples for symbolic sizes; None if a symbol has none."""
    sizes = [example_of(n) for n in (*t.shape, *t.stride())]
    numbers = [n for n in sizes if n is not None]
    if len(numbers) < len(sizes):
        return None
    return TensorSpec(numbers[: t.ndim], t.dtype, numbers[t.ndim :])


def example_of(size: int | torch.SymInt) -> int | None:
    """A size, or the example of a symbol while traced; None if it has none."""
    if isinstance(size, torch.SymInt):
        return size.node.hint if size.node.has_hint() else None
    return size


def fake_backward(
    tensors: Tensors, text: str, needs: Sequence[bool], given: Sequence[bool]
) -> list[Tensor]:
    wanted = [t for t, need in zip(tensors, needs, strict=False) if need]
    lies = (strides_like(t.shape, t.shape, t.stride()) for t in wanted)
    return [t.new_empty_strided(t.shape, s) for t, s in zip(wanted, lies, strict=True)]


# Derivatives. Functions of one level of torch.func, like PyTorch's own operators: they see only the
# tensors of that level, and the levels around it record their calls.


@contextmanager
def below_autograd() -> Iterator[None]:
    """A context in which the calls of a Function are recorded by levels of torch.func around it.

    A Function turns recording and forward mode off, for those levels as well.
    """
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _AutoDispatchBelowAutograd():
        yield


class OpFunction(_SingleLevelFunction):
    """A call of `attention` that autograd records."""

    @staticmethod
    def forward(ctx: Context, text: str, saves: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results of the op; inputs, o and lse are saved."""
        with below_autograd():
            every = OP(tensors, text, True)
        results = results_of(text)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(every[place] for place in results.saved))
        ctx.mark_non_differentiable(*(every[place] for place in results.constants))
        ctx.text, ctx.count = text, results.count
        return tuple(every if saves else every[: results.count])

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = grads[: ctx.count]  # o and lse after these move with the gradients that read them
        graph = results_of(ctx.text).graph
        fixed = graph.carried if graph else ()
        needs = [need and n not in fixed for n, need in enumerate(ctx.needs_input_grad[2:])]
        tensors = [*ctx.saved_tensors, *(g for g in used if g is not None)]
        gradients = OP_BACKWARD(tensors, ctx.text, needs, [g is not None for g in used])
        each = iter(gradients)
        return None, None, *(next(each) if need else None for need in needs)


class OpBackwardFunction(_SingleLevelFunction):
    """A call of `attention_backward` that autograd records; its own gradient is a plan's."""

    @staticmethod
    def forward(
        ctx: Context, text: str, needs: Sequence[bool], given: Sequence[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.call = text, needs, given
        with below_autograd():
            return tuple(OP_BACKWARD(tensors, text, needs, given))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of each tensor that needs one; o and lse move with the others."""
        tensors, (text, needs, given) = ctx.saved_tensors, ctx.call
        inputs = tensors[: len(needs)]
        plan = plan_anew(inputs, text).bound_to(inputs)
        own = find("write_gradient")(plan, tensors, needs, given)
        fixed = restore_graph(own).carried
        wants = [need and n not in fixed for n, need in enumerate(ctx.needs_input_grad[3:])]
        used = [g for g in grads if g is not None]
        made = iter(OP_BACKWARD([*tensors, *used], own, wants, [g is not None for g in grads]))
        return None, None, None, *(next(made) if want else None for want in wants)


def push_op(tensors: Tensors, text: str, saves: bool) -> list[Tensor]:
    """`attention` on tensors with tangents: a call of the plan of forward mode."""
    if records(tensors):
        raise GraphError(
            "within a dispatch mode, tensors can't both require grad and have tangents: "
            "leave the mode, or nest transforms of torch.func"
        )
    primals, tangents = split_tangents(tensors)
    plan = plan_anew(primals, text).bound_to(primals)
    moved = select_moving(plan.graph.carried, tangents)
    results = results_of(text)
    every = OP([*primals, *moved.values()], find("write_tangents")(plan, moved, saves))
    layouts = plan.request.facts.once(result_layouts)
    count = len(layouts) if saves else results.count
    each = iter(every[count:])
    return [
        x if place in results.constants else forward_ad.make_dual(x, next(each))
        for place, x in enumerate(every[:count])
    ]


def records(tensors: Tensors) -> bool:
    """True if autograd records a call on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def is_bare(tensors: Tensors) -> bool:
    """True if nothing stands between autograd and the computation: no dispatch is needed."""
    return not is_traced() and all(
        type(t) in OWN_CLASSES and t.device.type in KINDS and not t.is_neg() for t in tensors
    )


def record_attention(tensors: Tensors, text: str, saves: bool = False) -> list[Tensor]:
    """`attention` under autograd."""
    if has_tangent(tensors):
        return push_op(tensors, text, saves)
    if records(tensors):
        with enable_single_level_autograd_function():
            return [*OpFunction.apply(text, saves, *tensors)]  # type: ignore[attr-defined]  # of torch's C base class
    if is_bare(tensors):
        return run_attention(tensors, text, saves)
    with _AutoDispatchBelowAutograd():
        return OP(tensors, text, saves)  # type: ignore[no-any-return]  # of torch


def record_backward(
    tensors: Tensors, text: str, needs: Sequence[bool], given: Sequence[bool]
) -> list[Tensor]:
    """`attention_backward` under autograd."""
    if has_tangent(tensors):
        inputs = tensors[: len(needs)]
        plan = plan_anew(inputs, text).bound_to(inputs)
        return push_op(tensors, find("write_gradient")(plan, tensors, needs, given), False)
    if records(tensors):
        with enable_single_level_autograd_function():
            return [*OpBackwardFunction.apply(text, needs, given, *tensors)]  # type: ignore[attr-defined]  # as above
    if is_bare(tensors):
        return run_gradient(tensors, text, needs, given)
    with _AutoDispatchBelowAutograd():
        return OP_BACKWARD(tensors, text, needs, given)  # type: ignore[no-any-return]  # of torch


# vmap


def batch_attention(
    info: Any,  # PyTorch's, with the size of the mapped axis
    dims: Any,  # for each argument the mapped axis, or None, or a list of these
    tensors: Tensors,
    text: str,
    saves: bool = False,
) -> tuple[list[Tensor], list[int]]:
    return batch_op(OP, info.batch_size, dims[0], tensors, (), text, saves)


def batch_backward(
    info: Any,  # as above
    dims: Any,  # as above
    tensors: Tensors,
    text: str,
    needs: Sequence[bool],
    given: Sequence[bool],
) -> tuple[list[Tensor], list[int]]:
    return batch_op(OP_BACKWARD, info.batch_size, dims[0], tensors, needs, text, needs, given)


def batch_op(
    op: Callable[..., list[Tensor]],
    size: int,
    dims: Sequence[int | None],
    tensors: Tensors,
    needs: Sequence[bool],
    text: str,
    *more: object,
) -> tuple[list[Tensor], list[int]]:
    """An operator's results under vmap, and the mapped axis of each. more: its other arguments."""
    batching, content = load("nn.batching"), read_content(text)
    names = content.inputs if isinstance(content, CallContent) else ()  # a plan is not folded
    mapped = batching.Mapped(size, tensors, dims, names)
    results: tuple[list[Tensor], list[int]]
    results = batching.map_call(op, content, mapped, needs, text, *more)
    return results


def map_older(name: str, tensors: Tensors, *more: Any) -> list[Tensor | None]:  # Any: of the op
    """An operator under PyTorch's older vmap."""
    op = getattr(getattr(torch.ops, NAME), name)
    return run_each(lambda each: op(each, *more), tensors)


# Counting


def count_flops(plan: Plan) -> int:
    """The flops of a plan, without masked places; masks decided by tensors count as full."""
    return plan.cost().forward.flops


def forward_flops(
    tensors: Tensors, text: str, saves: bool = False, *, out_val: object = None
) -> int:
    return count_flops(find_plan(tensors, text).bound_to(tensors))


def backward_flops(
    tensors: Tensors,
    text: str,
    needs: Sequence[bool],
    given: Sequence[bool],
    *,
    out_val: object = None,
) -> int:
    inputs, wants = tensors[: len(needs)], [n for n, need in enumerate(needs) if need]
    return count_flops(find_plan(inputs, text).bound_to(inputs).backward(wants))


# Registration


def refuse_layouts(library: torch.library.Library, name: str) -> None:
    """Register kernels of an operator that refuse tensors without strides."""

    def refuse(tensors: Sequence[Tensor], *rest: object) -> None:
        told = ((n, layout_problem(t)) for n, t in enumerate(tensors))
        raise PlanMismatchError(
            *(f"{name}: tensor {n} {problem}" for n, problem in told if problem)
        )

    def refuse_jagged(
        cls: object, func: object, types: object, args: tuple[Sequence[Tensor]], kwargs: object
    ) -> None:
        refuse(*args)

    for key in STRIDELESS:
        library.impl(name, refuse, key)
    torch.library.register_torch_dispatch(
        f"{library.ns}::{name}", NestedTensor, refuse_jagged, lib=library
    )


def define_op(
    name: str,
    signature: str,
    run: Callable[..., object],
    record: Callable[..., object],
    fake: Callable[..., object],
    batch: Callable[..., object],
) -> None:
    LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    for kind in KINDS:
        LIBRARY.impl(name, run, kind.upper())
    LIBRARY.impl(name, record, "Autograd")
    LIBRARY.impl(name, partial(map_older, name), "Batched")
    torch.library.register_fake(f"{NAME}::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"{NAME}::{name}", batch, lib=LIBRARY)
    refuse_layouts(LIBRARY, name)


LIBRARY = torch.library.Library(NAME, "DEF")
define_op(
    "attention",
    "(Tensor[] tensors, str text, bool saves=False) -> Tensor[]",
    run_attention,
    record_attention,
    fake_attention,
    batch_attention,
)
define_op(
    "attention_backward",
    "(Tensor[] tensors, str text, bool[] needs, bool[] given) -> Tensor[]",
    run_gradient,
    record_backward,
    fake_backward,
    batch_backward,
)
flop_formulas[torch.ops.attn_graph.attention] = forward_flops
flop_formulas[torch.ops.attn_graph.attention_backward] = backward_flops
OP = torch.ops.attn_graph.attention.default
OP_BACKWARD = torch.ops.attn_graph.attention_backward.default
register_masks()
