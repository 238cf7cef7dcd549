"""Inputs of `attention` that do not fit, by the names that a user wrote, before any equation; and
operands of an equation that are too few, or have too few axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch

from attn_graph import masks
from attn_graph.ir.arguments import ADDENDS, ARGUMENTS, PACKED, add_axes, pool_problems
from attn_graph.ir.graph import Op, op_name
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.storage.packed_inputs import packed_problems
from attn_graph.ir.storage.scaling import (
    NARROW,
    O_SCALE,
    PAIRS,
    SCALES,
    scales_fit,
    stands_in,
    takes_scale,
    whole_shape,
)
from attn_graph.machine.tensors import SEEDS, STARTS
from attn_graph.printing.misfits import (
    cast_problem,
    count_axes,
    list_readings,
    misfit,
    rank_problem,
)
from attn_graph.spec import FLOATS, IN_PAIRS, NAMES, ValueType, cast_code
from attn_graph.spec.dims import are_numbers

Types = Mapping[str, ValueType]
Needs = dict[str, masks.Data]
Fault = tuple[tuple[str, ...], str]  # the tensors with one fault, and its message
NEEDS = {  # what a tensor has to be, whatever the mask; operations tell it of the others
    name: x.data for name, x in ARGUMENTS.items() if name not in (*SEEDS, O_SCALE)
}


def find_needs(mask: object, steps: Iterable[Modifier | masks.Mask], slopes: int = 1) -> Needs:
    """What each tensor after q, k and v has to be. slopes: the axes of `alibi`."""
    needs = NEEDS | {"alibi": ARGUMENTS["alibi"].form(slopes)}
    for part in (*steps, mask):
        needs |= part.needs if isinstance(part, masks.Mask | Modifier) else {}
    return {name: data for name, data in needs.items() if name not in ("q", "k", "v")}


def input_problems(x: Types, needs: Needs, most: tuple[int | None, int | None]) -> list[str]:
    """Why the inputs do not fit: each tensor's dtype, or else its axes, or else its sizes."""
    kinds: tuple[Callable[[], Iterator[Fault]], ...] = (
        lambda: dtype_faults(x, needs),
        lambda: ((("q", "k", "v"), text) for text in (*packed_problems(x), *pool_problems(x))),
        lambda: rank_faults(x, needs),
        lambda: main_faults(x),
        lambda: size_faults(x, needs, most),
    )
    named, texts = set[str](), list[str]()
    for faults in kinds:
        new = [(names, text) for names, text in faults() if named.isdisjoint(names)]
        named |= {name for names, _ in new for name in names}
        texts += [text for _, text in new]
    return texts


def dtype_faults(x: Types, needs: Needs) -> Iterator[Fault]:
    """Tensors of a dtype that they can't have."""
    main = stands_in(x["q"].dtype)
    if x["q"].dtype == IN_PAIRS:
        fault = f"q is {IN_PAIRS}, 4 bits, as k and v alone may be; pass q in a float dtype"
        yield (*"qkv",), f"attention: {fault}"
        return
    if main not in FLOATS:
        yield from join_faults((n, cast_problem(n, x[n].dtype, FLOATS)) for n in "qkv" if n in x)
        return
    alone = "q_scale" in x and "k_scale" not in x  # as `scale_problems` says
    wrong = [n for n in "kv" if n in x and not alone and x[n].dtype not in (main, *NARROW)]
    by_kernels = " (k_scale= and v_scale= of 1.0 have kernels convert both)"
    yield from join_faults(
        (
            n,
            f"is {x[n].dtype}, and q is {main}{by_kernels * takes_scale(x[n].dtype, main)}; "
            f"write {cast_code(n, main)}",
        )
        for n in wrong
        if not (dict(PAIRS)[n] in x and takes_scale(x[n].dtype, main))
    )
    allowed = {name: allowed_dtypes(name, data, main) for name, data in needs.items()}
    yield from join_faults(
        (name, cast_problem(name, x[name].dtype, dtypes))
        for name, dtypes in allowed.items()
        if name in x
    )
    yield from join_faults(
        (scale, f"is for a tensor in 8 bits, and its own is {x[name].dtype}; leave it out")
        for name, scale in PAIRS
        if scale in x and name in x and not takes_scale(x[name].dtype, main)
    )


def allowed_dtypes(name: str, data: masks.Data, main: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of a tensor beside q, k and v of one; those of addends are that or float32."""
    if name in ADDENDS and data.dtypes == FLOATS:
        return tuple(dict.fromkeys((torch.float32, main)))
    return data.dtypes


def unread_dtypes(dtypes: Mapping[str, torch.dtype], needs: Needs) -> Iterator[str]:
    """Messages for tensors of a dtype that no input of a graph has."""
    for name, dtype in dtypes.items():
        if dtype not in NAMES:
            known = needs[name].dtypes if name in needs else FLOATS
            yield f"attention: {name} {cast_problem(name, dtype, known)}"


def rank_faults(x: Types, needs: Needs) -> Iterator[Fault]:
    """Tensors with too many or too few axes."""
    wrong = [name for name in "qkv" if name in x and not has_due_axes(x, name)]
    ranks = {len(x[name].shape) for name in wrong}
    if len(wrong) > 1 and len(ranks) == 1:
        (rank,) = ranks
        code = ", ".join(f"{name}[{', '.join(['None'] * (4 - rank))}]" for name in wrong)
        packed = ", or give q_starts= if they are packed [T,H,D]" if rank == 3 else ""
        ways = f"; write {code}{packed}" if rank in (2, 3) else ""
        yield tuple(wrong), f"attention: {join_names(wrong)} have {rank} axes and need 4{ways}"
    else:
        for name in wrong:
            rank = len(x[name].shape)
            axes = "1 axis" if rank == 1 else f"{rank} axes"
            way_out = one_query_each(x) if name == "q" else ""
            way_out = way_out or add_axes(name, 4 - rank)
            yield (name,), f"attention: {name} {x[name]} has {axes} and needs 4{way_out}"
    given = [name for name in needs if name in x and name not in SCALES]
    yield from join_faults((name, axes_fault(x, name, needs[name])) for name in given)


def one_query_each(x: Types) -> str:
    """How to write q [B,H,D], one query of each sequence; "" if keys are of another number."""
    q, k = x["q"].shape, x["k"].shape
    if "kv_starts" in x:
        return "; give q_starts= for packed queries [T,H,D]"
    of = next(x[n].shape for n in ("pages", "kv_lengths", "k") if n in x)
    if len(q) != 3 or q[:1] != of[:1] or q[-1:] != k[-1:]:
        return ""
    return "; write q[:, :, None] for one query of each sequence" + PACKED["q"]


def axes_fault(x: Types, name: str, data: masks.Data) -> str:
    """That a tensor has too many or too few axes; "" if it has not."""
    shape, sizes = x[name].shape, sizes_of(x, (None, None))
    full: Sequence[Any] | None = None  # Any: sizes, or their names
    if len(shape) == len(data.axes):
        return ""
    if name in STARTS:
        full = ("B + 1",)
    elif name == "pages":
        full = sizes.get("b", "B"), "C"
    elif sizes.keys() >= {*data.axes} - {*"xyn"}:
        full = data.shape(sizes)
    return rank_problem(name, shape, data.axes, full, sizes, data.broadcasts)


def main_faults(x: Types) -> Iterator[Fault]:
    """Heads, head sizes, batches and keys of q, k and v that disagree."""
    if not all(has_due_axes(x, name) for name in "qkv" if name in x):
        return
    q, k, B = x["q"], x["k"], batch_of(x)
    D = whole_shape(k)[-1]
    axis, H = 2 if "pages" in x else 1, q.shape[1]
    heads = {n: x[n].shape[axis] for n in "kv" if n in x}
    dense = [n for n in "kv" if n in x and len(x[n].shape) == 4 and "pages" not in x]
    yield from join_faults(
        (n, f"has {count_axes('h', G)} (axis {axis}), not a divisor of q's {H} heads")
        for n, G in heads.items()
        if are_numbers(H, G) and not divides(G, H)
    )
    if q.shape[-1] != D:
        fault = misfit(len(k.shape) - 1, "d", D, q.shape[-1])
        pairs = f"; {k.dtype} has two numbers a byte, so write k.view(dtype) if it has other ones"
        yield from join_faults([("k", fault + pairs * (k.dtype == IN_PAIRS))])
    yield from join_faults(
        (
            n,
            misfit(0, "b", x[n].shape[0], B)
            + f"; write {n}.expand({B}, -1, -1, -1)" * (x[n].shape[0] == 1),
        )
        for n in dense
        if B is not None and x[n].shape[0] != B
    )
    if dense == ["k", "v"] and x["v"].shape[2] != k.shape[2]:
        yield from join_faults([("v", misfit(2, "j", x["v"].shape[2], k.shape[2]))])


def divides(G: int, H: int) -> bool:
    """True if q may have H heads beside G of k or v."""
    return H % G == 0 if G else not H


def has_due_axes(x: Types, name: str) -> bool:
    """True if q, k or v has as many axes as its packing has; others are refused elsewhere."""
    rank = len(x[name].shape)
    if name == "q":
        return rank == (3 if "q_starts" in x else 4)
    if "kv_starts" in x:
        return rank == 3
    return rank == 4 or (rank == 3 and "q_starts" in x and "pages" not in x)


def size_faults(x: Types, needs: Needs, most: tuple[int | None, int | None]) -> Iterator[Fault]:
    """Sizes of further tensors other than those of q, k and v."""
    sizes = sizes_of(x, most)
    B = sizes.get("b")
    fits = [n for n, data in needs.items() if n in x and len(x[n].shape) == len(data.axes)]
    for name in {*STARTS, "pages"} & {*fits}:
        if B is not None and (own := x[name].shape[0] - (name in STARTS)) != B:
            more = "; it has one more element than sequences" if name in STARTS else ""
            yield from join_faults([(name, misfit(0, "b", own, B) + more)])
    if x.get("q_segments") == x.get("kv_segments") and sizes.get("i") == sizes.get("j"):
        fits = [name for name in fits if name != "kv_segments"]  # one tensor for both
    # Queries, and keys, may be packed rows of sequences whose most rows nobody gave.
    packed = {"i": "q_starts" in x}
    packed["j"] = packed["i"] and "pages" not in x and len(x["k"].shape) == 3
    loose = [axis for axis, size in zip("ij", most, strict=True) if packed[axis] and size is None]
    yield from join_faults(
        (name, needs[name].size_problem(name, x[name].shape, sizes, loose))
        for name in fits
        if name not in (*STARTS, "pages", *SCALES)
        and sizes.keys() >= {*needs[name].axes} - {*"xyn"}
    )
    yield from join_faults(
        (scale, scale_fault(scale, x[scale].shape, whole_shape(x[name]), scale_axes(x, name)))
        for name, scale in PAIRS
        if scale in x and name in x
    )


def scale_fault(name: str, scale: tuple[int, ...], of: tuple[int, ...], axes: str) -> str:
    """The fault of a scale with other axes than its tensor; "" if it fits. axes: the tensor's."""
    if scales_fit(scale, of):
        return ""
    names, ways = {x: x for x in (*axes, "1")}, ""
    if all(n == 1 for n in scale):
        ways = f"; write {name}.reshape({', '.join('1' * len(of))})"
    elif len(scale) < len(of) == len(names):
        ways = list_readings(name, scale, dict(zip(names, (*of[:-1], 1), strict=True)), names)
    pairs = enumerate(zip(scale, of, strict=False))
    wrong = [axis for axis, (own, size) in pairs if not own or size % own]
    if len(scale) == len(of) and wrong and not ways:
        axis = wrong[0]
        return (
            f"has {scale[axis]} on axis {axis}, not a divisor of {of[axis]}, as a tensor "
            f"{[*of]} needs; {[*of[:-1], 1]} is one for each row"
        )
    return (
        f"has shape {[*scale]}, and a tensor {[*of]} needs {len(of)} axes, each a divisor of its "
        f"own: {[*of[:-1], 1]} for rows{ways}"
    )


def scale_axes(x: Types, name: str) -> str:
    """The names of the sizes of q, k or v but the last: "BHM", "nPG", "TG"."""
    if name != "q" and "pages" in x:
        return "nPG"
    heads, rows = "HM" if name == "q" else "GN"
    return f"B{heads}{rows}" if len(x[name].shape) == 4 else f"T{heads}"


def batch_of(x: Types) -> int | None:
    """The number of batch entries, or of packed sequences; None if q's axes are wrong."""
    if "q_starts" in x:
        return x["q_starts"].shape[0] - 1 if len(x["q_starts"].shape) == 1 else None
    return x["q"].shape[0] if len(x["q"].shape) == 4 else None


def sizes_of(x: Types, most: tuple[int | None, int | None]) -> dict[str, int]:
    """The sizes of the scores' axes, by letter of "bhij", as far as q, k and v give them."""
    sizes: dict[str, int] = {}
    if not all(has_due_axes(x, name) for name in "qk"):
        return sizes
    q, k = x["q"].shape, x["k"].shape
    B = batch_of(x)
    sizes = {} if B is None else {"b": B}
    rows = q[0] if most[0] is None else most[0]
    sizes |= {"h": q[1], "i": q[2] if len(q) == 4 else rows}
    if "pages" in x:
        table = x["pages"].shape
        return sizes | ({"j": table[1] * k[1]} if len(table) == 2 else {})
    return sizes | {"j": k[2] if len(k) == 4 else k[0] if most[1] is None else most[1]}


def join_faults(faults: Iterable[tuple[str, str]]) -> Iterator[Fault]:
    """Messages for tensors and their faults; tensors with the same one share a message."""
    names: dict[str, list[str]] = {}
    for name, fault in faults:
        if fault:
            names.setdefault(re.sub(rf"\b{name}\b", "{}", fault), []).append(name)
    for fault, own in names.items():
        text, sep, code = fault.partition("; write ")
        if len(own) > 1:
            text = re.sub("^is ", "are ", re.sub("^has ", "have ", text))
            text = text.replace(", and needs ", ", and need ")
        edits = ", ".join(code.replace("{}", name) for name in own) if sep else ""
        text = text.replace("{}", own[0])
        yield tuple(own), f"attention: {join_names(own)} {text}{sep}{edits}"


def join_names(names: Iterable[str]) -> str:
    """ "q, k and v"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def count_read(op: Op) -> int:
    """How many operands, from the first, `infer` reads: those that it names, or all."""
    needed = [x for x in signature(op.infer).parameters.values() if x.default is x.empty]
    return sum(x.kind is not x.VAR_POSITIONAL for x in needed) or len(op.ranks)


def rank_problems(op: Op, types: Sequence[ValueType], *, partial: bool = False) -> list[str]:
    """Operands whose count, or whose number of axes, does not fit the op."""
    ranks = op.ranks
    pairs = [*zip(types, ranks, strict=False)]
    misfits = [rank for type_, rank in pairs if rank is not None and len(type_.shape) != rank]
    if not misfits and (partial or len(types) == len(ranks)):
        return []
    who, roles = op_name(type(op)), dict(enumerate(op.roles))
    if len(types) != len(ranks) and not partial:
        return [f"{who}: {len(types)} operands given, {len(ranks)} needed"]
    return [
        f"{who}: {roles.get(place, place)} {type_} has {len(type_.shape)} axes and needs {rank}"
        f"{add_axes(str(roles.get(place)), rank - len(type_.shape))}"
        for place, (type_, rank) in enumerate(pairs)
        if rank is not None and len(type_.shape) != rank
    ]
