"""Arguments of `attention` that are read before its graph is built."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from inspect import signature
from operator import and_
from typing import TypeVar, final

import torch
from attrs import frozen

from attn_graph import masks
from attn_graph.errors import ArgumentError, GraphError, problems_of, show
from attn_graph.ir import ops
from attn_graph.ir.modifiers import Bias, Modifier, SoftCap
from attn_graph.ir.storage.scaling import KEY_SCALES, NARROW, O_SCALE, PAIRS, SCALES
from attn_graph.machine.tensors import SEEDS, STARTS
from attn_graph.printing.text import show_value
from attn_graph.spec import FLOATS, IN_PAIRS, QUANTISED, TensorSpec, ValueType


@final
@frozen
class Argument:
    """A tensor that an option of `attention` adds: what its readers have to know."""

    data: masks.Data  # its axes and dtypes
    each: masks.Data | None = None  # the same with an axis for the batch, if it may have one
    step: masks.Mask | Modifier | None = None  # applied in a call with it, if it is so for all
    adds: bool = False  # numbers to scores or to sums of rows, in q's dtype or float32; trained
    scales: str = ""  # the tensor whose axes it has, each a divisor
    flag: str = ""  # the command line's help, if its flag says nothing but its name

    def form(self, rank: int) -> masks.Data:
        """`each` for a tensor of as many axes, and else `data`."""
        return self.each if self.each is not None and len(self.each.axes) == rank else self.data


def read_in(step: masks.Mask | Modifier) -> dict[str, Argument]:
    """The tensors of a step, which a call with them has."""
    trains = step.trains if isinstance(step, Modifier) else ()
    return {n: Argument(data, step=step, adds=n in trains) for n, data in step.needs.items()}


BY_HEAD = masks.Data("h", FLOATS)
ARGUMENTS = {  # in the order of a graph's inputs; those of its mask and modifiers follow
    **read_in(Bias()),
    "alibi": Argument(BY_HEAD, masks.Data("bh", FLOATS), adds=True),
    **read_in(masks.Keep()),
    **read_in(masks.KeyLengths()),
    **read_in(masks.QueryLengths()),
    "sinks": Argument(BY_HEAD, adds=True, flag="A learned logit a head in the softmax."),
    **read_in(masks.SameSegment()),
    **dict.fromkeys(SEEDS, Argument(masks.Data("", torch.int64))),
    **dict.fromkeys(STARTS, Argument(masks.Data("n"))),
    "pages": Argument(masks.Data("bn")),
    **{x: Argument(masks.Data("", torch.float32), scales=of) for of, x in (*PAIRS, ("o", O_SCALE))},
}
EXTRA = (*ARGUMENTS,)
ADDENDS = tuple(name for name, x in ARGUMENTS.items() if x.adds)
PACKED = {  # the other way to write q, k and v of three axes
    "q": ", or give q_starts= if it is packed [T,H,D]",
    "k": ", or give kv_starts= if it is packed [T,G,D]",
    "v": ", or give kv_starts= if it is packed [T,G,E]",
}
JOINED = {  # to a mask, by &: the tensors each reads
    x.step: frozenset(x.step.needs) for x in ARGUMENTS.values() if isinstance(x.step, masks.Mask)
}
FROM_SCORE = "modifiers=m, **tensors, where m, tensors = from_flex_score(score_mod)"
T = TypeVar("T")


def order_inputs(named: Mapping[str, T]) -> dict[str, T]:
    """Inputs after q, k and v in the order of a graph's: those of EXTRA, then others as given."""
    return {name: named[name] for name in EXTRA if name in named} | dict(named)


def require_modifiers(modifiers: object) -> tuple[Modifier | masks.Mask, ...]:
    """Modifiers, and masks among them. Raises GraphError for anything but a sequence of them."""
    if isinstance(modifiers, Sequence):
        steps = tuple(step for step in modifiers if isinstance(step, Modifier | masks.Mask))
        if len(steps) == len(modifiers):
            return steps
    one = isinstance(modifiers, Modifier | masks.Mask)
    shown = show_value(modifiers) if one else show(modifiers)
    way_out = f"modifiers=({shown},)" if one else FROM_SCORE
    raise GraphError(
        f"attention: modifiers {shown} are not a sequence of Modifiers and Masks; write {way_out}"
    )


def by_name(
    q: object = None, k: object = None, v: object = None, *others: object, **_: object
) -> str:
    """How to write the call of `attention` whose arguments after v have no name."""
    fourth = others[0] if others else None
    dtype = getattr(fourth, "dtype", None)
    if isinstance(fourth, masks.Mask):
        named = f", mask={show_value(fourth)}"
    elif isinstance(fourth, Modifier):
        named = f", modifiers=({show_value(fourth)},)"
    elif isinstance(fourth, float):
        named = f", scale={fourth}"
    elif dtype == torch.bool:
        named = ", keep=keep"
    elif dtype in FLOATS:
        named = ", bias=bias"
    else:
        named = ", mask=Causal()" if others else ""
    return f"write attention(q, k, v{named})"


def take_masks(
    mask: masks.Mask | None, steps: Iterable[Modifier | masks.Mask]
) -> tuple[masks.Mask | None, tuple[Modifier, ...]]:
    """A mask joined with those among steps, and the other steps: a masked place stays masked.

    Raises GraphError unless the mask is one.
    """
    parts = [step for step in steps if isinstance(step, masks.Mask)]
    if parts and mask is not None:
        masks.require_mask(None, None, mask)
        parts.insert(0, mask)
    whole = reduce(and_, parts) if parts else mask
    return whole, tuple(step for step in steps if isinstance(step, Modifier))


def read_by(mask: object, modifiers: Iterable[Modifier | masks.Mask]) -> set[str]:
    """The names of the tensors that a mask and modifiers read."""
    needs = mask.needs if isinstance(mask, masks.Mask) else ()
    return {*needs, *(name for step in modifiers for name in step.needs)}


RECEIVED = "received"  # the statistic of keys, of a pass of its own


def list_missing(part: masks.Mask | Modifier, given: Container[str]) -> list[str]:
    """Messages for the tensors of a modifier or of a mask's leaf, if they are not given."""
    missing = [name for name in part.needs if name not in given]
    text = f"attention: {show_value(part)} reads"
    if missing == [*masks.SameSegment().needs]:
        return [f"{text} {' and '.join(missing)}; pass segments=(x, x)"]
    return [f"{text} {name}; pass {name}=" for name in missing]


def statistic_names(stats: object, also: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The requested statistics. Raises GraphError for unknown or repeated ones. also: names of
    others that are known."""
    if isinstance(stats, bool):
        return ("lse",) * stats
    if isinstance(stats, str) or not isinstance(stats, Iterable):
        name = stats if stats in (*ops.ROW_RESULTS, RECEIVED) else "lse"
        raise GraphError(
            f'attention: stats {show(stats)} is not a sequence of names; write stats=("{name}",)'
        )
    names, known = tuple(stats), (*ops.ROW_RESULTS, *also)
    if RECEIVED in names and RECEIVED not in also:
        raise GraphError(
            f'attention: stats "{RECEIVED}" is a pass of its own; ask '
            "attn_graph.nn.functional.attention for it, or compile that pass: vjp(graph, "
            'wants=("v",), cotangents=("o",)) of a graph whose v has H / G columns'
        )
    if unknown := [name for name in names if name not in known]:
        raise GraphError(f"attention: stats {show(unknown[0])} is none of {', '.join(known)}")
    if len({*names}) < len(names):
        raise GraphError(f"attention: stats {names} name one statistic twice")
    return names


def option_problems(
    mask: object, align: masks.Align | None, scale: float | None, soft_cap: float | None
) -> Iterator[str]:
    """Options that make no sense by themselves."""
    if mask is not None:
        yield from problems_of(lambda: masks.require_mask(None, None, mask))  # type: ignore[arg-type]  # it may be anything
    yield from problems_of(lambda: masks.Causal(align))
    if scale is not None:
        yield from problems_of(lambda: ops.Scores(scale))
    if soft_cap is not None:
        yield from problems_of(lambda: SoftCap(soft_cap))


def two_segments(segments: object, kind: type[T]) -> tuple[T, T]:
    """q_segments and kv_segments. Raises GraphError for anything but a pair of this kind."""
    match segments:
        case (q, kv) if isinstance(q, kind) and isinstance(kv, kind):
            return q, kv
    raise GraphError(
        f"attention: segments {show(segments)} is not a pair of {kind.__name__}; write "
        "segments=(x, x) if queries and keys share them, or (q_segments, kv_segments)"
    )


def add_axes(role: str, count: int) -> str:
    """How to write q, k or v with `count` more axes; "" for others."""
    if role not in PACKED or count not in (1, 2):
        return ""
    starts = PACKED[role] if count == 1 else ""
    return f"; write {role}[{', '.join(['None'] * count)}]{starts}"


def require_parameters(fn: Callable[..., object], names: Iterable[str]) -> None:
    """Raise ArgumentError unless a function can be called with these names."""
    given = dict.fromkeys(names)
    try:
        signature(fn).bind(**given)
    except TypeError as error:
        read = ", ".join(signature(fn).parameters)
        raise ArgumentError(
            f"graph: the function reads {read or 'nothing'}, and specs are given for "
            f"{', '.join(given) or 'nothing'}; write one spec for each, q=TensorSpec(...)"
        ) from error
    except ValueError:  # a function in C, whose signature is not known
        return


def scale_problems(x: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Quantised tensors without scales, and scales of q, k or v without those of k and v."""
    given = [name for name in SCALES if name in x]
    within = "v" not in x
    missing = [name for name in KEY_SCALES[: 2 - within] if given and name not in x]
    if O_SCALE in x and SCALES[0] not in x:
        yield "attention: o_scale is given, and q_scale is not; o is quantised like q"
    if within and given not in ([], ["k_scale"]):
        yield (
            f"attention: v is a number of the first elements of k, and {', '.join(given)} are "
            "given; such values have k_scale alone: for other scales pass a tensor for v"
        )
    elif within and given and x["k_scale"].shape[-1:] != (1,):
        yield (
            f"attention: k_scale {x['k_scale']} has scales of columns, and v is a number of the "
            "first elements of k; pass a scale of rows, [...,1], or a tensor for v"
        )
    elif within and x["k"].dtype == IN_PAIRS:
        yield (
            f"attention: k is {x['k'].dtype}, of two numbers a byte, and v is a number of the "
            "first elements of k; pass a tensor for v, k[..., :E // 2]"
        )
    elif missing:
        yield (
            f"attention: {given[0]} is given, and {missing[0]} is not; k and v are quantised "
            "together, alone or with q"
        )
    kinds = {"q": QUANTISED}
    if "q" in x and x["q"].dtype == IN_PAIRS:  # bytes of something else
        kinds |= {"k": QUANTISED, "v": QUANTISED}
    quantised = [(n, scale) for n, scale in PAIRS if n in x and x[n].dtype in kinds.get(n, NARROW)]
    if lacking := [pair for pair in quantised if pair[1] not in {*given, *missing}]:
        names, scales = (" and ".join(each) for each in zip(*lacking, strict=True))
        code = scales.replace("scale", "scale=")
        verb = "is" if len(lacking) == 1 else "are"
        yield f"attention: {names} {verb} quantised; pass {code} in torch.float32"


def pool_problems(x: Mapping[str, ValueType]) -> Iterator[str]:
    """A pool whose heads and rows are probably swapped. x: the types of all inputs."""
    q, k = x["q"], x["k"]
    if "pages" not in x or len(k.shape) != 4 or len(q.shape) not in (3, 4):
        return
    heads, rows, own = q.shape[1], k.shape[1], k.shape[2]
    if (
        all(type(x) is int and x > 0 for x in (heads, rows, own))
        and heads % own
        and not heads % rows
    ):
        yield (
            f"pages: k {k} is read as [pages, rows, heads, D], and its {own} heads do not divide "
            f"q's {heads}; if it is [pages, heads, rows, D], pass k.transpose(1, 2)"
        )


def whole_mask(
    mask: masks.Mask | None,
    given: Mapping[str, object],
    align: masks.Align | None,
    rows: object,
    keys: object,
) -> masks.Mask | None:
    """The mask joined with a leaf for each given tensor that it does not read itself.

    rows, keys: the packed or paged sides. Their lengths end the sequences whatever the mask reads.
    """
    if mask is not None:
        masks.require_mask(None, None, mask)
    ends = {masks.QueryLengths(): rows, masks.KeyLengths(): keys}
    for leaf, names in JOINED.items():
        parts = [] if mask is None else masks.flatten_join(masks.And, mask)
        reads = leaf in parts if ends.get(leaf) else names & masks.needs_of(mask).keys()
        if names <= given.keys() and not reads:
            mask = leaf if mask is None else mask & leaf
    return None if mask is None else mask.aligned(align)
