"""Attention on tensors by options: planned for tensors of a new kind, then remembered."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from attn_graph import compiler, masks
from attn_graph.compiler import avoided, preferred
from attn_graph.errors import GraphError, TensorDtypeError, TensorError, show
from attn_graph.ir import builder
from attn_graph.ir.arguments import require_modifiers, take_masks
from attn_graph.ir.builder import unknown_arguments
from attn_graph.ir.graph import ARGUMENTS, Graph, require_constant
from attn_graph.ir.inputs import find_needs, unread_dtypes
from attn_graph.ir.layouts import has_sizes, restore_layouts
from attn_graph.ir.storage.scaling import O_SCALE, PAIRS, SCALES
from attn_graph.machine.ambient import is_traced, require_untraced, teach_counters
from attn_graph.machine.imports import require_imports
from attn_graph.machine.likeness import NESTED
from attn_graph.machine.target import default_target
from attn_graph.machine.tensors import SEEDS, full_code, is_distributed, is_watched, read_array
from attn_graph.machine.torch_switches import switches_that_count
from attn_graph.nn.packed_sizes import PACKING, name_sizes, serves_sizes
from attn_graph.nn.sharding import attend_in_parts
from attn_graph.nn.tracing import fix
from attn_graph.plan import Plan
from attn_graph.plan.cache import Key, cache
from attn_graph.planner.arguments import CHOICE
from attn_graph.spec import FLOATS, NAMES, TensorSpec, layout_problem, to_number

# The options of a call, in this order: those of a graph, then those of `compile`.
GRAPH_OPTIONS = (
    *("mask", "scale", "align", "soft_cap", "alibi", "dropout", "stats", "max_lengths"),
    *("finite_pages", "all_rows", "outputs", "v", "modifiers"),
)
MODIFIERS = GRAPH_OPTIONS.index("modifiers")
PLAIN = (False, False, None, None, ())  # finite_pages to modifiers, of a call without them
OPTIONS = (*GRAPH_OPTIONS, *CHOICE)
USUAL_CHOICE = tuple(CHOICE.values())
SEGMENTS = ("q_segments", "kv_segments")  # inputs that a graph takes as a pair
NUMBERS = ("scale", "soft_cap", "dropout")  # options that are floats
SCALED = {**{scale: name for name, scale in PAIRS}, O_SCALE: "q"}  # the tensor with a scale's axes
CAST = frozenset(FLOATS) - {torch.float64}  # dtypes changed by autocast
MOST_SHOWN = 24  # letters of a list that a message repeats
MOST_SEED = 2**62  # bound of the numbers drawn for SEEDS

Outputs = Tensor | tuple[Tensor, ...]
Named = Mapping[str, Tensor]  # tensors after q, k and v by name, in the order of the inputs
Options = tuple[Any, ...]  # Any: a value for each of OPTIONS; without those of CHOICE, the default
Values = Tensor | None  # v; None if values lie within keys
Anew = Callable[[Tensor, Tensor, Values, Named, Options, Key | None], Outputs]


def attend_anew(
    q: Tensor, k: Tensor, v: Values, named: Named, options: Options, key: Key | None
) -> Outputs:
    """Attention on tensors of a new kind. It is remembered, unless `key` is None."""
    tensors = name_tensors(q, k, v, named)
    if options[MODIFIERS] != ():
        options = gather_masks(options)
    if not is_dynamo_compiling() and (
        unknown := unknown_arguments(named, options[0], options[MODIFIERS], CHOICE)
    ):
        raise GraphError(*unknown)
    if not all(isinstance(t, Tensor) for t in tensors.values()):
        tensors = {name: read_array(t) for name, t in tensors.items()}
        require_tensors(tensors)
        return attend_by_name(tensors, options)
    require_tensors(tensors)
    if any(map(is_distributed, tensors.values())):
        return attend_distributed(tensors, options)
    if is_dynamo_compiling():
        return attend_by_op(q, k, v, named, options)
    if any(t.is_neg() for t in tensors.values()):
        return attend_by_name({n: t.resolve_neg() for n, t in tensors.items()}, options)
    if is_traced() or q.is_meta or any(map(is_watched, tensors.values())):
        return attend_by_op(q, k, v, named, options)
    plan = new_plan(q, k, v, named, options)
    outputs = plan(**tensors)
    if key is not None:
        cache.remember(key, (*tensors.values(),), plan)
    return outputs


def name_tensors(q: Tensor, k: Tensor, v: Values, named: Named) -> dict[str, Tensor]:
    """All tensors of a call by name, in the order of a graph's inputs."""
    return {"q": q, "k": k, **named} if v is None else {"q": q, "k": k, "v": v, **named}


def attend_by_name(tensors: Named, options: Options) -> Outputs:
    named = {**tensors}
    return attend_as(named.pop("q"), named.pop("k"), named.pop("v", None), named, options)


def gather_masks(options: Options) -> Options:
    """The options with the masks among modifiers joined to `mask`. Raises GraphError."""
    mask, *between = options[:MODIFIERS]
    mask, steps = take_masks(mask, require_modifiers(options[MODIFIERS]))
    return (mask, *between, steps, *options[MODIFIERS + 1 :])


def attend_by_op(q: Tensor, k: Tensor, v: Values, named: Named, options: Options) -> Outputs:
    if not is_dynamo_compiling():
        teach_counters()
    text = text_of_call(tuple(named), options)
    tensors = [q, k, *named.values()] if v is None else [q, k, v, *named.values()]
    outputs = torch.ops.attn_graph.attention(tensors, text)
    stats = options[GRAPH_OPTIONS.index("stats")]
    return tuple(outputs) if stats or O_SCALE in named else outputs[0]


def text_of_call(names: tuple[str, ...], options: Options) -> str:
    """The text that the operators read. names: the tensors after q, k and v, in order."""
    mask, scale, align, soft_cap, alibi, dropout, stats, *others = options[:MODIFIERS]
    steps, *choice = options[MODIFIERS:]
    if mask is not None:  # a mask that torch.compile compares by its value, not by its identity
        mask = mask.aligned(align)
    return content_of_call(
        *(names, mask, exact("scale", scale), align, exact("cap", soft_cap), fix(alibi)),
        *(exact("rate", dropout), fix(stats), *[fix(x) for x in others], tuple(steps)),
        *[fix(option) for option in choice],
    )


def attend_distributed(tensors: Named, options: Options) -> Outputs:
    """Attention on DTensors. Raises TensorError for modifiers and dropout."""
    given = named_options(options)
    if packed := PACKING & tensors.keys():
        raise TensorError(
            f"attention: {min(packed)} is given, but packed tensors and pages can't be divided "
            "among processes; pass local tensors"
        )
    if scales := {*SCALES} & tensors.keys():
        raise TensorError(
            f"attention: {min(scales)} is given, but quantised keys and values of DTensors are not "
            "divided; pass local tensors, or k * k_scale and v * v_scale"
        )
    if given["modifiers"]:
        raise TensorError(
            "attention: modifiers= of DTensors are not divided; pass local tensors, or soft_cap=, "
            "bias= and alibi="
        )
    if given["dropout"]:
        raise TensorError(
            "attention: dropout does not support DTensors: it depends on the place in the whole "
            "batch; drop elements of the output instead, or pass local tensors"
        )
    if given["outputs"] is not None:
        raise TensorError(
            "attention: outputs= is given, but results of DTensors lie as their parts do; pass "
            "local tensors, or leave it out"
        )
    if given["v"] is not None:
        raise TensorError(
            f"attention: v is {given['v']}, but values within keys of DTensors are not divided; "
            f"write k[..., :{given['v']}]"
        )
    whole = {"h": "slopes are those of all heads; pass alibi= as a DTensor [H]"}
    whole = whole if given["alibi"] else {}

    return attend_in_parts(tensors, given["mask"], whole, lambda own: attend_by_name(own, options))


def named_options(options: Options) -> dict[str, Any]:  # Any: the values of OPTIONS
    whole = options if len(options) == len(OPTIONS) else (*options, *USUAL_CHOICE)
    return dict(zip(OPTIONS, whole, strict=True))


def exact(name: str, number: float | None) -> str | None:
    """A float as a hexadecimal text with all its bits, which torch.compile treats as a constant."""
    return None if number is None else read_number(name, number).hex()


def read_number(name: str, number: object) -> float:
    """An option as a float. Raises GraphError for a differentiated tensor or another type.

    name: of the field it becomes.
    """
    require_constant(name, number)
    value = to_number(number)
    if not isinstance(value, float):
        raise GraphError(f"{ARGUMENTS.get(name, name)} {show(number)} must be a number")
    return value


def content_of_call(names: tuple[str, ...], *options: object) -> str:
    """The text of a call. options: as Options, floats as from `exact`."""
    from attn_graph.planner.forms.content import write_call

    given = named_options(options)
    numbers = {n: None if given[n] is None else float.fromhex(given[n]) for n in NUMBERS}
    return write_call(names, given | numbers)


content_of_call._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result


def attend_as(
    q: Tensor, k: Tensor, v: Values, named: Named, options: Options, anew: Anew = attend_anew
) -> Outputs:
    """Attention with these options.

    anew: checks the tensors and computes it, if they are of a new kind.
    """
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _is_tracing()
    ):
        return anew(*cast_inputs(q, k, v, named), options, None)
    if _is_any_autocast_enabled():
        q, k, v, named = cast_inputs(q, k, v, named)
    names = tuple(named)
    tensors = (q, k, *named.values()) if v is None else (q, k, v, *named.values())
    switches = switches_that_count(getattr(q, "is_cpu", False))
    key: Key = (options, anew, names, switches, preferred.get(), avoided.get())
    try:
        plan = cache.recent.get(key)
    except TypeError:  # an option has no hash
        return attend_by_value(q, k, v, named, options, None, anew)
    if plan is not None:
        check, wants = plan.memo.call
        if True in map(getattr, tensors, *NESTED):
            require_tensors(name_tensors(q, k, v, named))
        known = check(*tensors)
        if not known and serves_sizes(plan, tensors):
            known, (_, wants) = True, plan.memo.unsized
        if known:
            if profiler._is_profiler_enabled:
                return plan.run_profiled(tensors, wants)
            return plan.run_known(tensors, wants)
        plan = cache.recall(key, tensors)
    if plan is not None:
        return plan(*tensors)
    return attend_by_value(q, k, v, named, options, key, anew)


def attend_into(
    out: Tensor | Sequence[Tensor], q: Tensor, k: Tensor, v: Values, named: Named, options: Options
) -> Outputs:
    """Attention with these options, its results in the caller's tensors."""
    require_untraced()
    if getattr(q, "is_nested", False):
        raise TensorError("attention: q is nested, and out= takes dense results; leave out= out")
    tensors = {name: read_array(t) for name, t in name_tensors(q, k, v, named).items()}
    require_tensors(tensors)
    tensors = {name: x.resolve_neg() for name, x in tensors.items()}
    q, k, v = tensors.pop("q"), tensors.pop("k"), tensors.pop("v", None)
    q, k, v, named = cast_inputs(q, k, v, tensors)
    options = tuple(map(plain_option, options))
    given = (*name_tensors(q, k, v, named).values(),)
    key: Key = (options, attend_into, tuple(named), switches_that_count(q.is_cpu))
    key = (*key, preferred.get(), avoided.get())
    plan = cache.recent.get(key)
    if plan is None or not (plan.memo.call[0](*given) or serves_sizes(plan, given)):
        plan = cache.recall(key, given)
    if plan is None:
        options = gather_masks(options)
        if unknown := unknown_arguments(named, options[0], options[MODIFIERS], CHOICE):
            raise GraphError(*unknown)
        plan = new_plan(q, k, v, named, options)
        cache.remember(key, given, plan)
    return plan(*given, out=out)


def attend_by_value(
    q: Tensor,
    k: Tensor,
    v: Values,
    named: Named,
    options: Options,
    key: Key | None,
    anew: Anew,
) -> Outputs:
    """Attention with options remembered by value.

    A list equals a tuple, and a tensor of one number, which may change later, equals its number.
    """
    require_imports()
    plain = tuple(map(plain_option, options))
    if any(map(operator.is_not, plain, options)):
        return attend_as(q, k, v, named, plain, anew)
    return anew(q, k, v, named, options, key)


def plain_option(option: object) -> object:
    """An option as a value: lists as tuples, tensors as numbers unless differentiated."""
    if isinstance(option, list | tuple):
        parts = tuple(map(plain_option, option))
        same = type(option) is tuple and all(map(operator.is_, parts, option))
        return option if same else parts
    return to_number(option) if isinstance(option, Tensor) else option


def new_plan(q: Tensor, k: Tensor, v: Values, named: Named, options: Options) -> Plan:
    """The plan for tensors of this kind. Raises GraphError and NoBackendError."""
    tensors = name_tensors(q, k, v, named)
    given = named_options(options)
    dtypes = {name: t.dtype for name, t in tensors.items()}
    if any(dtype not in NAMES for dtype in dtypes.values()):
        needs = find_needs(given["mask"], given["modifiers"])
        raise TensorDtypeError(*unread_dtypes(dtypes, needs))
    specs = {name: TensorSpec.like(t) for name, t in tensors.items()}
    target = default_target(q.device)
    graph = make_graph(specs, given, caches=target.kind == "cpu")  # cuDNN plans for one size
    # Calls pass tensors by position. A plan that is only explained has its seeds by itself.
    assert [i.name for i in graph.inputs if i.name in tensors] == [*tensors]
    choice = {name: given[name] for name in CHOICE}
    return compiler.compile(graph, target=target, **choice)


def make_graph(
    specs: Mapping[str, TensorSpec],
    options: Mapping[str, Any],  # Any: the values of OPTIONS
    caches: bool = False,
    names: bool = True,
) -> Graph:
    """The graph of a call. specs: of all its tensors. options: by name. caches: see `name_sizes`,
    which names the sizes if `names`.

    Raises GraphError.
    """
    free = SEEDS if options["dropout"] else ()  # the graph has these by itself
    given: dict[str, Any] = {name: options[name] for name in GRAPH_OPTIONS}
    named = name_sizes(specs, caches) if names and not has_sizes(options["outputs"]) else specs
    if options["outputs"] is not None:
        given["outputs"] = restore_layouts(options["outputs"])
    given |= {name: spec for name, spec in named.items() if name not in free}
    if given.keys() >= {*SEGMENTS}:
        given["segments"] = tuple(given.pop(name) for name in SEGMENTS)
    try:
        return builder.attention(**given)
    except GraphError:
        if named is not specs:  # by numbers, without names unknown to the caller
            make_graph(specs, options, names=False)
        raise


def require_tensors(tensors: Named) -> None:
    """Raise TensorError for all that attention can't read: it takes strided tensors."""
    texts: list[str] = []
    for name, t in tensors.items():
        if isinstance(t, Tensor):
            problem = layout_problem(t)
        else:
            problem = not_a_tensor(t, tensors.get(SCALED.get(name, "")))
        if problem:
            texts.append(f"attention: {name} {problem}")
    if texts:
        raise TensorError(*texts)


def not_a_tensor(x: object, scaled: object = None) -> str:
    """That a value is not a tensor, and what to pass in its place. scaled: the one of a scale."""
    way_out = ""
    kind = type(x).__name__
    if isinstance(x, int | float) and isinstance(scaled, Tensor):
        way_out = f"; write {full_code((1,) * scaled.ndim, x, scaled.device.type)}"
    elif isinstance(x, int | float | list | tuple):
        text = show(x)
        way_out = f"; write torch.tensor({text if len(text) < MOST_SHOWN else '...'})"
    elif isinstance(x, masks.Mask):
        way_out = (
            "; write is_causal=True, or attn_graph.nn.functional.attention(q, k, v, mask=...) for "
            "masks of this library"
        )
    return f"is {'an' if kind[0] in 'aeiou' else 'a'} {kind}, not a tensor{way_out}"


def draw_seed(device: torch.device) -> dict[str, Tensor]:
    """A seed and an offset for dropout, from the default generator of a device."""
    numbers = torch.randint(MOST_SEED, (2,), dtype=torch.int64, device=device)
    return dict(zip(SEEDS, numbers.unbind(), strict=True))


def cast_inputs(
    q: Tensor, k: Tensor, v: Values, named: Named
) -> tuple[Tensor, Tensor, Values, Named]:
    """q, k, v and the bias, cast as autocast does for PyTorch's own attention."""
    if "bias" in named:
        named = {**named, "bias": cast_input(named["bias"])}
    return cast_input(q), cast_input(k), None if v is None else cast_input(v), named


def cast_input(x: Tensor) -> Tensor:
    """A tensor in the dtype of autocast, if it is on for its device; float64 stays."""
    kind = x.device.type
    if x.dtype not in CAST or x.is_meta or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
