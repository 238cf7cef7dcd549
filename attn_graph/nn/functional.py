"""Attention as functions of tensors, without specs and plans."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from attn_graph.errors import (
    ArgumentError,
    GraphError,
    PlanMismatchError,
    TensorDtypeError,
    TensorError,
    TensorRankError,
    as_tensor_error,
    binds,
    show,
)
from attn_graph.ir.arguments import (
    EXTRA,
    RECEIVED,
    by_name,
    order_inputs,
    read_by,
    require_modifiers,
    statistic_names,
    two_segments,
)
from attn_graph.ir.layouts import plain_layouts
from attn_graph.ir.modifiers import Modifier
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.request import Fallback
from attn_graph.machine.tensors import ROLES, SEEDS
from attn_graph.machine.torch_switches import Precision
from attn_graph.masks import Align, Causal, Mask, Prefix
from attn_graph.nn.calls import (
    GRAPH_OPTIONS,
    PLAIN,
    Named,
    Options,
    Outputs,
    Values,
    attend_anew,
    attend_as,
    attend_into,
    cast_inputs,
    draw_seed,
    new_plan,
    not_a_tensor,
    read_number,
    require_tensors,
)
from attn_graph.nn.jagged import attend_jagged, pack_jagged, require_pytorchs
from attn_graph.plan import Plan
from attn_graph.plan.cache import Key
from attn_graph.printing.misfits import LETTERS, list_readings
from attn_graph.spec import FLOATS, TensorSpec, layout_problem, to_number

__all__ = ["attention", "scaled_dot_product_attention"]

TOP_LEFT: Mask = Causal("top_left")
NOTHING = Prefix(0)  # keeps no key
NAMELESS: Named = {}
Kept = tuple[Mask | None, Named]  # a mask by position, and one by tensors
FITTED = ("keep", "bias")  # tensors that broadcast to the scores
LED = ("q", "k", "v", *FITTED)  # tensors with leading axes that broadcast
DROPOUT = GRAPH_OPTIONS.index("dropout")


def pytorchs_code(*_: object, **__: object) -> str:
    """What to write in place of a call of one of PyTorch's functions with other arguments."""
    return (
        "its arguments are PyTorch's; for masks and options of this library write "
        "attn_graph.nn.functional.attention(q, k, v, mask=...)"
    )


@binds(by_name)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    align: Align | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | bool | None = None,
    keep: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    offset: Tensor | int | None = None,
    stats: bool | Sequence[str] = False,
    q_starts: Tensor | None = None,
    kv_starts: Tensor | None = None,
    pages: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    o_scale: Tensor | None = None,
    max_lengths: tuple[int | None, int | None] | None = None,
    finite_pages: bool = False,
    all_rows: bool = False,
    modifiers: Sequence[Modifier | Mask] = (),
    outputs: Mapping[str, TensorSpec | str] | None = None,
    backends: Sequence[str | Backend] | None = None,
    avoid: Sequence[str | Backend] = (),
    deterministic: bool = False,
    precision: Precision | None = None,
    on_fallback: Fallback = "ignore",
    max_workspace: int | str | None = None,
    batch_invariant: bool = False,
    out: Tensor | Sequence[Tensor] | None = None,
    **data: Tensor,
) -> Outputs:
    """q [B,H,M,D], k [B,G,N,D], v [B,G,N,E] -> o [B,H,M,E], and the statistics of `stats`.

    Tensors [B,M,H,D], as flash-attn's, need `x.transpose(1, 2)`, and so does the result.

    Options are all of `attn_graph.attention`, with tensors in place of specs, and those of
    `attn_graph.compile` that choose the backend. `prefer`, `avoid` and PyTorch's switches apply as
    there. Plans are remembered by shape, dtype, strides and options: a repeated call costs a few
    microseconds more than `plan(q, k, v)`.

    v may be a number, 512 for the values k[..., :512]: kernels that can read k once. `outputs` has
    a TensorSpec with numbers or an order of axes, {"o": "bshd"}. `o_scale` is for quantised q, k
    and v: o has their dtype, amax is the last result, and nothing has a gradient.

    With q_starts, q and o are packed [T,H,D]; with pages, k and v are pools [n,P,G,D]. Plans then
    have named sizes, unless `data` has other tensors: new batches, tables and numbers of rows share
    a plan up to the next power of two. finite_pages, all_rows: as there, for libraries of others.

    q, k and v may be jagged nested tensors [B,H,j,D], k and v with the same offsets: they run as
    packed rows without a copy, holes too, and results are jagged with the lengths of q.

    stats may name "received" too: the sums of weights by key, [B,H,N], from a second pass, the
    gradient of o by values of a few columns; packed [H,S], in pages [H,n,P], in q's dtype, and
    differentiable. Keys in 8 bits, jagged tensors and DTensors have none: GraphError.

    out: a tensor, or with `stats` a tuple of them, to write the results to: see `Plan`.

    seed, offset: integers, or int64 tensors of one element on q's device, for `dropout`. Without
    either, both are drawn from that device's default generator, once a call. dropout=0 ignores
    them.

    Under autocast q, k, v and bias are cast as for PyTorch's own attention; slopes and sinks are
    not. Differentiable by each floating tensor, second derivatives and `torch.func.jvp` included;
    there are no third ones. Raises GraphError if tensors and options
    make no sense together, PlanMismatchError for tensors on several devices or a seed of another
    dtype, and NoBackendError if no backend supports the call.
    """
    whole, values = (v, None) if isinstance(v, Tensor) else read_values(v)
    for name, number in (("scale", scale), ("cap", soft_cap), ("rate", dropout)):
        if isinstance(number, bool):  # equal to 1.0, in keys too
            read_number(name, number)
    rate = read_number("rate", dropout) if isinstance(dropout, Tensor) else dropout
    options = (
        mask, scale, align, soft_cap, alibi is True, rate, stats, max_lengths, finite_pages,
        all_rows, None if outputs is None else plain_layouts(outputs), values, modifiers,
        backends, avoid, deterministic, precision, on_fallback, max_workspace, batch_invariant,
    )  # fmt: skip
    seeds: Sequence[Tensor | None] = (None, None)
    if rate and seed is None and offset is None:
        seeds = (*draw_seed(q.device).values(),)
    elif not (seed is None and offset is None) and (rate or reads_seed(mask, modifiers)):
        seeds = (number_on(q.device, seed), number_on(q.device, offset))
    slopes = None if isinstance(alibi, bool) else alibi
    each = (None, None) if segments is None else two_segments(segments, Tensor)
    given = (  # in the order of EXTRA
        bias, slopes, keep, kv_lengths, q_lengths, sinks, *each, *seeds,
        q_starts, kv_starts, pages, q_scale, k_scale, v_scale, o_scale,
    )  # fmt: skip
    named: dict[str, Tensor] = {}
    for name, x in zip(EXTRA, given, strict=True):
        if x is not None:
            named[name] = x
    if data:
        named = order_inputs({**named, **data})
    named_stats = stats is not False and stats is not True
    if named_stats and RECEIVED in statistic_names(stats, also=(RECEIVED,)):
        from attn_graph.nn.received import attend_received  # few calls need it

        return attend_received(out, q, k, whole, named, options)
    if out is not None:
        return attend_into(out, q, k, whole, named, options)
    attend = attend_jagged if getattr(q, "is_nested", False) else attend_as
    return attend(q, k, whole, named, options)


def read_values(v: Tensor | int) -> tuple[Tensor | None, int | None]:
    """v, or None and the number of values within each key. Raises TensorError for None."""
    if v is None:
        raise TensorError(f"attention: v {not_a_tensor(v)}")
    if isinstance(v, int | torch.SymInt) and not isinstance(v, bool):
        return None, operator.index(v)
    return cast(Tensor, v), None  # arrays of NumPy are read, and others refused, with the others


def number_on(device: torch.device, x: Tensor | int | None) -> Tensor | None:
    """A seed on a device; a tensor unchanged. Raises GraphError for a number beyond int64."""
    if not isinstance(x, int):
        return x
    if isinstance(x, bool) or not -(2**63) <= x < 2**63:
        raise GraphError(f"attention: the seed {x} is not a 64-bit integer")
    return torch.full((), x, dtype=torch.int64, device=device)


def reads_seed(mask: object, modifiers: object) -> bool:
    """True for a user's mask or modifier with a tensor named like a seed. Traced code can't check
    this."""
    if is_dynamo_compiling():
        return False
    return not read_by(mask, require_modifiers(modifiers)).isdisjoint(SEEDS)


@binds(pytorchs_code)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A replacement for `torch.nn.functional.scaled_dot_product_attention`.

    query [...,M,D], key [...,N,D], value [...,N,E] -> [...,M,E], two axes or more, the leading ones
    broadcast. attn_mask broadcasts to [...,M,N]: booleans, True for places that may attend, or
    numbers to add to the scores, in query's dtype or float32. is_causal keeps j <= i, from the top
    left, in addition to attn_mask. enable_gqa: key and value have fewer heads (axis -3), a divisor
    of query's. Jagged nested tensors [B,H,j,D] run as packed rows, without attn_mask. Dropout takes
    its seeds from the default generator of the device, so `torch.manual_seed` fixes them; it drops
    other places than PyTorch.

    Raises TensorError, a RuntimeError like PyTorch's, if the tensors make no sense together. This
    includes keys and values of different lengths, which PyTorch accepts on CPUs.
    """
    kept = read_mask(attn_mask, is_causal)
    return attend_like_torch(query, key, value, kept, dropout_p, scale, enable_gqa, ())


def attend_like_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Kept,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    choice: Options,
) -> Tensor:
    """PyTorch's function by one of several backends.

    kept: from `read_mask`, or lengths in place of a mask. choice: values for CHOICE, or ()
    for the defaults.
    """
    if value is None:  # as calls of `attention` with a number have it
        raise TensorError(f"attention: value {not_a_tensor(value)}")
    named, options = read_options(kept, dropout_p, scale, choice)
    if options[DROPOUT]:
        named = {**named, **draw_seed(query.device)}
    mask = named.get("keep", named.get("bias", query))
    try:
        if getattr(query, "is_nested", False):
            require_pytorchs(query, key, named, enable_gqa)
            o = attend_jagged(query, key, value, named, options)
        elif getattr(query, "ndim", 4) < 4 or getattr(mask, "ndim", 4) < 4:
            o = attend_led(enable_gqa, query, key, value, named, options)
        else:
            anew = attend_grouped if enable_gqa else attend_plain
            o = attend_as(query, key, value, named, options, anew)
    except (ArgumentError, TensorError):
        raise
    except (GraphError, PlanMismatchError) as error:
        raise as_tensor_error(error) from error
    assert isinstance(o, Tensor)  # without statistics
    return o


def plan_like_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Kept,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    choice: Options,
) -> Plan:
    """The plan run by `attend_like_torch`. Raises its errors from before the computation."""
    named, options = read_options(kept, dropout_p, scale, choice)
    if query.is_nested:
        require_pytorchs(query, key, named, enable_gqa)
        return new_plan(*cast_inputs(*pack_jagged(query, key, value, named)), options)
    q, k, v, named = cast_inputs(query, key, value, named)
    assert v is not None  # as above
    four, more, _ = bring_to_four(enable_gqa, q, k, v, named)
    return new_plan(*pad_empty(*four), more, options)


def read_mask(attn_mask: Tensor | None, is_causal: bool) -> Kept:
    """PyTorch's mask arguments as a mask by position and tensors by name."""
    mask = TOP_LEFT if is_causal else None
    if attn_mask is None:
        return mask, NAMELESS
    if not isinstance(attn_mask, Tensor):
        kind, shown = type(attn_mask).__name__, show(attn_mask)
        edit = {"bool": "is_causal=True", "float": f"scale={shown}"}.get(kind)
        problem = f"is {shown}, not a tensor; write {edit}" if edit else not_a_tensor(attn_mask)
        raise ArgumentError(f"attention: attn_mask {problem}")
    return mask, {"keep" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def read_options(
    kept: Kept, dropout_p: float, scale: float | None, choice: Options
) -> tuple[Named, Options]:
    """The named tensors and the options of `attend_as`. Raises TensorError for a wrong rate."""
    mask, named = kept
    rate = to_number(dropout_p)
    if not isinstance(rate, float) or not 0 <= rate <= 1:
        raise TensorError(
            f"attention: dropout_p has to be a number between 0 and 1, got {show(dropout_p)}"
            + "; write is_causal=True" * isinstance(dropout_p, bool)
        )
    if rate == 1:  # drops everything, and leaves no gradient
        named, mask, rate = NAMELESS, NOTHING, 0.0
    number = scale if scale is None else to_number(scale)
    if isinstance(number, bool):
        raise TensorError(f"attention: scale has to be a number, got {number}")
    return named, (mask, number, None, None, False, rate, False, None, *PLAIN, *choice)


def attend_led(
    grouped: bool, q: Tensor, k: Tensor, v: Tensor, named: Named, options: Options
) -> Outputs:
    """Attention on PyTorch's tensors with leading axes of one element, up to four: these broadcast
    alike, and calls with four axes are remembered. Errors name the shapes of the caller."""
    anew, least = (attend_grouped, 3) if grouped else (attend_plain, 2)
    tensors = {"q": q, "k": k, "v": v, **named}
    most = max(getattr(q, "ndim", 4), getattr(k, "ndim", 4), getattr(v, "ndim", 4))
    if most > 4:
        return attend_as(q, k, v, named, options, anew)
    for name, x in tensors.items():
        lies = getattr(x, "layout", None) == torch.strided  # others are refused below
        if name in LED and lies and (2 if name in FITTED else least) <= x.ndim < 4:
            tensors[name] = x[(None,) * (4 - x.ndim)]
    q4, k4, v4 = tensors.pop("q"), tensors.pop("k"), tensors.pop("v")
    try:
        o = attend_as(q4, k4, v4, tensors, options, anew)
    except TensorError:
        bring_to_four(grouped, q, k, v, named)
        raise
    assert isinstance(o, Tensor)  # without statistics
    return o if most == 4 else o.squeeze((*range(4 - most),))


def attend_shaped(
    grouped: bool,
    q: Tensor,
    k: Tensor,
    v: Values,
    named: Named,
    options: Options,
    key: Key | None,
) -> Outputs:
    """Attention on PyTorch's tensors, brought to four axes; remembered if they have four.

    grouped: k and v have their own number of heads.
    """
    assert v is not None  # PyTorch's functions have no numbers of values
    four, more, shape = bring_to_four(grouped, q, k, v, named)
    D, E = q.shape[-1], v.shape[-1]
    same = map(operator.is_, (*four, *more.values()), (q, k, v, *named.values()))
    if D != 0 and E != 0 and all(same):
        return attend_anew(q, k, v, named, options, key)
    o = attend_as(*pad_empty(*four), more, options)
    assert isinstance(o, Tensor)  # without statistics
    return o[..., :E].reshape((*shape[:-1], E))


def bring_to_four(
    grouped: bool, q: Tensor, k: Tensor, v: Tensor, named: Named
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor], tuple[int, ...]]:
    """q, k and v with four axes; the named tensors to fit; the original shape of the scores.

    Raises TensorError for tensors that PyTorch refuses, or should.
    """
    require_axes(q, k, v, grouped)
    require_tensors(named)
    M, N = q.shape[-2], v.shape[-2]
    k2, v2 = equal_heads(q, k, v) if grouped else (k, v)
    *outer, H, G = common_axes(q, k2, v2, grouped)
    rank = max(q.ndim, k.ndim, v.ndim)
    shape = (*outer, H, M, N)[-rank:]
    more = {n: fit_mask(x, q.dtype, shape) if n in FITTED else x for n, x in named.items()}
    return (as_four(q, outer, H), as_four(k2, outer, G), as_four(v2, outer, G)), more, shape


# Two objects for good: calls are remembered by them.
attend_plain, attend_grouped = (partial(attend_shaped, grouped) for grouped in (False, True))


def require_axes(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    """Raise TensorError for tensors that PyTorch refuses, or should."""
    least = 3 if grouped else 2
    for name, t in zip(ROLES, (q, k, v), strict=True):
        if not isinstance(t, Tensor):
            raise ArgumentError(f"attention: {name} {not_a_tensor(t)}")
        if problem := layout_problem(t):
            raise TensorError(f"attention: {name} {problem}")
        if t.ndim < least:
            kind = TensorRankError if grouped else TensorError
            raise kind(f"attention: {name} {[*t.shape]} has {t.ndim} axes and needs {least}")
        if t.is_complex() or (t.is_floating_point() and not is_known(t.dtype)):
            raise TensorDtypeError(f"attention: {name} is {t.dtype}, and known are {FLOATS}")
    if k.shape[-2] != v.shape[-2] or k.shape[-1] != q.shape[-1]:
        raise TensorError(
            f"attention: query {[*q.shape]}, key {[*k.shape]} and value {[*v.shape]} disagree: key "
            "needs the last size of query, and the last but one of value"
        )


def is_known(dtype: torch.dtype) -> bool:
    return dtype in FLOATS


is_known._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result


def equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with equal heads; if they differ, some are repeated in a copy."""
    H, a, b = (x.shape[-3] for x in (q, k, v))
    if a == b == H:
        return k, v
    if not a or not b or H % a or H % b:
        raise TensorError(f"attention: query has {H} heads, and key {a} and value {b}: no divisors")
    G = math.lcm(a, b)
    return repeat_heads(k, G // a), repeat_heads(v, G // b)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, -3)


def common_axes(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[int, ...]:
    """The broadcast axes before the heads, then H and G."""
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v)]
    try:
        outer = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        (H,) = heads[:1] if grouped else torch.broadcast_shapes(*((h,) for h in heads))
    except RuntimeError as error:
        shapes = (f"{n} {[*x.shape]}" for n, x in zip(ROLES, (q, k, v), strict=True))
        raise TensorError(
            f"attention: {', '.join(shapes)} do not broadcast; enable_gqa=True shares heads"
        ) from error
    return (*outer, H, heads[1] if grouped or heads[1] == heads[2] == 1 else H)


def as_four(x: Tensor, outer: Sequence[int], heads: int) -> Tensor:
    """x [...,M,D] as [B,heads,M,D], with B the product of `outer`; x itself if it fits."""
    shape = (*outer, heads, *x.shape[-2:])
    if len(outer) == 1 and x.shape == shape:
        return x
    whole = x.expand(shape)
    return whole.flatten(0, -4) if outer else whole.unsqueeze(0)


def fit_mask(mask: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A mask for scores of this shape with four axes, each full or 1. Raises TensorError."""
    if mask.ndim < 2:
        raise TensorRankError(f"attention: attn_mask {[*mask.shape]} needs the two axes M and N")
    if mask.dtype not in (torch.bool, torch.float32, dtype):
        known = " or ".join(map(str, dict.fromkeys((torch.bool, torch.float32, dtype))))
        raise TensorError(f"attention: attn_mask is {mask.dtype}; it has to be {known}")
    # Of symbols, `n not in (1, full)` is one question, and Inductor's cache loses its answer.
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > len(shape) or any(n != 1 and n != full for n, full in sizes):
        named = dict(zip(LETTERS, shape, strict=False)) if len(shape) == len(LETTERS) else {}
        ways = list_readings("attn_mask", mask.shape, named) if mask.ndim < len(named) else ""
        raise TensorError(
            f"attention: attn_mask {[*mask.shape]} does not broadcast to scores {[*shape]}{ways}"
        )
    if len(shape) > 4 and mask.ndim > 3:
        return mask.expand(*shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    return mask if mask.ndim == 4 else mask[(None,) * (4 - mask.ndim)]


def pad_empty(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a head size of 1, filled with zeros, in place of 0."""
    if not q.shape[-1]:
        q, k = (F.pad(x, (0, 1)) for x in (q, k))
    return q, k, v if v.shape[-1] else F.pad(v, (0, 1))
