"""Helpers of generated code in FlashAttention 4's kernels, and its interface to the package.

Values are vectors of registers, of one element or several, and numbers passed to a kernel.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import select_

from attn_graph.lowering.fa4.dialect import in_place

Value = Any  # a vector, or a number


def elementwise(form: Callable[..., Value], dtype: Value, *values: Value) -> Value:
    """A vector of `form` applied to each element; numbers broadcast."""
    like = next(x for x in values if isinstance(x, cute.TensorSSA))
    out = cute.make_rmem_tensor(cute.size(like.shape), dtype)
    for k in range(cute.size(like.shape)):
        out[k] = form(*(x[k] if isinstance(x, cute.TensorSSA) else x for x in values))
    return out.load()


def kind(*values: Value) -> Value:
    """The type of a choice between values."""
    vectors = [x.dtype for x in values if isinstance(x, cute.TensorSSA)]
    known = [x for x in vectors if x is not Boolean]
    if Float32 in known or any(isinstance(x, float) for x in values):
        return Float32
    return Int64 if Int64 in known else Int32 if known or not vectors else Boolean


def pick(condition: Value, yes: Value, no: Value) -> Value:
    """`yes` if the condition holds, else `no`."""
    dtype = kind(yes, no)
    return elementwise(
        lambda c, a, b: dtype(select_(Boolean(c), dtype(a), dtype(b))),
        dtype,
        condition,
        yes,
        no,
    )


def smaller(a: Value, b: Value) -> Value:
    return pick(a < b, a, b)


def larger(a: Value, b: Value) -> Value:
    return pick(a > b, a, b)


def magnitude(x: Value) -> Value:
    return pick(x < 0, x * -1, x)


def invert(x: Value) -> Value:
    """Logical not: on vectors of booleans `~` is an operation on integers."""
    return elementwise(lambda a: Boolean(a) ^ Boolean(True), Boolean, x)


def false_everywhere(x: Value) -> Value:
    return elementwise(lambda a: Boolean(False), Boolean, x)


def true_everywhere(x: Value) -> Value:
    return elementwise(lambda a: Boolean(True), Boolean, x)


def as_float(x: Value) -> Value:
    """As float32."""
    return x.to(Float32) if isinstance(x, cute.TensorSSA) else Float32(x)


def as_long(x: Value) -> Value:
    """As a 64-bit integer."""
    return x.to(Int64) if isinstance(x, cute.TensorSSA) else Int64(x)


def inside(x: Value, count: Value) -> Value:
    """The last of `count` places, for places past it."""
    return smaller(x, count - 1)


def between(x: Value, count: Value) -> Value:
    """The nearest of `count` places."""
    return larger(smaller(x, count - 1), 0)


def gather(tensor: Value, dtype: Value, places: tuple[Value, ...]) -> Value:
    """The elements of a tensor at places, some of them vectors."""
    vectors = [x for x in places if isinstance(x, cute.TensorSSA)]
    count, single = cute.size(vectors[0].shape) if vectors else 1, len(places) == 1
    out = cute.make_rmem_tensor(count, dtype)
    for k in range(count):
        at = [x[k] if isinstance(x, cute.TensorSSA) else x for x in places]
        out[k] = dtype(tensor[at[0] if single else tuple(at)])
    return out.load()


def read_int(tensor: Value, *places: Value) -> Value:
    """Integers, from below 32 bits widened to 32."""
    wide = tensor.element_type.width >= 32
    return gather(tensor, tensor.element_type if wide else Int32, places)


def read_float(tensor: Value, *places: Value) -> Value:
    """Numbers as float32."""
    return gather(tensor, Float32, places)


def read_bool(tensor: Value, *places: Value) -> Value:
    """Booleans, stored as bytes."""
    return gather(tensor, Int32, places) != 0


OWN = (pick, smaller, larger, magnitude, invert, false_everywhere, true_everywhere)
READ = (as_float, as_long, inside, between, read_int, read_float, read_bool)
NAMES: dict[str, Any] = {  # Any: functions of the library's and of the DSL's
    "cute": cute,
    "floor_div": operator.floordiv,  # rounded down as Python's
    **{function.__name__: function for function in (*OWN, *READ)},
}


def package_functions(texts: Mapping[str, str], shared: int) -> dict[str, Callable[..., Value]]:
    """The functions of these texts as the package calls them, by the names of its arguments.

    shared: see `in_place`.
    """
    own = {name: make_function(text) for name, text in texts.items()}
    made: dict[str, Callable[..., Value]] = {}
    if "keep" in own:
        made["mask_mod"] = mask_function(own["keep"], texts["keep"])
    if "change" in own:
        made["score_mod"] = score_function(own["change"], texts["change"], shared)
    if "back" in own:
        made["score_mod_bwd"] = gradient_function(own["back"], texts["back"], shared)
    return made


def make_function(text: str) -> Callable[..., Value]:
    """The function defined by a text. Tracebacks can read its source."""
    name = f"<attn_graph {sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = dict(NAMES)
    exec(compile(text, name, "exec"), names)
    function: Callable[..., Value] = names[text.split("(")[0][4:]]
    return function


def name_function(function: Callable[..., Value], *texts: object) -> Callable[..., Value]:
    """The function, with a hash of its texts: the package tells functions apart by it."""
    digest = sha256("\n".join(map(str, texts)).encode()).hexdigest()
    function.__cute_hash__ = digest  # type: ignore[attr-defined]  # read by the package
    return function


def mask_function(keep: Callable[..., Value], text: str) -> Callable[..., Value]:
    """`keep` as a mask_mod."""

    def mask_mod(b, h, i, j, info, data, numbers=None):  # type: ignore[no-untyped-def]
        return keep(b, h, i, j, info.seqlen_q, info.seqlen_k, data, numbers)

    return name_function(mask_mod, text)


def score_function(change: Callable[..., Value], text: str, shared: int) -> Callable[..., Value]:
    """`change` as a score_mod."""

    def score_mod(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors=None, aux_scalars=None):  # type: ignore[no-untyped-def]
        h, i = in_place(h, q_idx, shared)
        ends = seqlen_info.seqlen_q, seqlen_info.seqlen_k
        return change(s, b, h, i, kv_idx, *ends, aux_tensors, aux_scalars)

    return name_function(score_mod, text, shared)


def gradient_function(back: Callable[..., Value], text: str, shared: int) -> Callable[..., Value]:
    """`back` as a score_mod_bwd."""

    def score_mod_bwd(ds, s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors=None, aux_scalars=None):  # type: ignore[no-untyped-def]
        h, i = in_place(h, q_idx, shared)
        ends = seqlen_info.seqlen_q, seqlen_info.seqlen_k
        return back(ds, s, b, h, i, kv_idx, *ends, aux_tensors, aux_scalars)

    return name_function(score_mod_bwd, text, shared)
