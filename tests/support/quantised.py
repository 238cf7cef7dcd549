"""Graphs with quantised keys and values, from those without."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import assume
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.builder import Builder
from attn_graph.ir.storage.scaling import NARROW, PAIRS
from attn_graph.spec import IN_PAIRS, QUANTISED, dense_strides, memory_order
from attn_graph.testing.formula import expand_blocks, halves_of, output_roles
from tests.support.sequences import lay_like

Named = Mapping[str, torch.Tensor]
Own = dict[str, torch.Tensor]
FLOATS_BESIDE = (torch.float16, torch.bfloat16, torch.float32)  # of keys, q in another
kinds = st.sampled_from(QUANTISED)
all_kinds = st.sampled_from([*NARROW, *FLOATS_BESIDE])


def scale_spec(shape: tuple[int, ...], seed: int) -> ag.TensorSpec:
    """A scale with gaps, any axes of 1 or expanded, for rows or for blocks of rows and columns.

    Bits 0 to 3 of the seed choose axes of 1, bits 4 to 7 expanded ones, and 8 to 10 blocks: 0, of
    all columns; 1 to 7, of the least number above 1 that divides an axis, or of one column.
    """
    blocks = seed >> 8 & 7
    sizes = [1 if seed >> n & 1 else size for n, size in enumerate(shape[:-1])] + [1]
    if blocks & 3:
        sizes[-1] = shape[-1] // (1 if blocks & 2 else divisor(shape[-1]))
    if blocks & 4:
        sizes[:-1] = [n // divisor(n) if n > 1 else n for n in sizes[:-1]]
    steps = [s * (2 - 2 * (seed >> n + 4 & 1)) for n, s in enumerate(dense_strides(sizes))]
    return ag.TensorSpec(tuple(sizes), torch.float32, tuple(steps))


def divisor(n: int) -> int:
    """The least number above 1 that divides n; 1 of 0 and 1."""
    return next((x for x in range(2, n + 1) if n % x == 0), 1)


def quantise_graph(graph: ag.Graph, kind: torch.dtype, seed: int, names: str = "kv") -> ag.Graph:
    """The graph with k and v, or other `names`, in another dtype, before all steps times scales,
    its last inputs. With q among them it is to be in bfloat16, and o may be too: then amax comes
    last."""
    names, narrows = names.replace("o", ""), "o" in names
    b, specs = Builder(), {i.name: i.spec for i in graph.inputs}
    if kind == specs["q"].dtype:
        assume(False)
    kinds = {n: narrow_spec(specs[n], kind) for n in names}
    x = {n: b.input(n, kinds.get(n, spec)) for n, spec in specs.items()}
    pairs = [(n, name) for n, name in PAIRS if n in names]
    scales = {name: b.input(name, scale_spec(specs[n].shape, seed)) for n, name in pairs}
    at = [n for n, role in enumerate(output_roles(graph)) if role == "o"] if narrows else []
    shape = graph.output_types[at[0]].shape if at else ()
    o_scale = b.input("o_scale", scale_spec(shape, seed)) if at else None
    narrow = x["q"]
    for n, name in pairs:
        x[n] = x[n].dequantise(scales[name], x["q"])
    values = [*x.values()]
    for eqn in graph.eqns:
        values += b.emit(eqn.op, *(values[i] for i in eqn.args))
    results = [values[i] for i in graph.outputs]
    if o_scale is not None:
        results[at[0]], amax = results[at[0]].quantise(o_scale, narrow)
        results.append(amax)
    return b.build(*results)


def narrow_spec(spec: ag.TensorSpec, kind: torch.dtype) -> ag.TensorSpec:
    """A tensor of as many numbers in another dtype, with the same gaps but for those in pairs."""
    if kind != IN_PAIRS:
        return ag.TensorSpec(spec.shape, kind, spec.strides)
    if spec.shape[-1] % 2:
        assume(False)
    shape = (*spec.shape[:-1], spec.shape[-1] // 2)
    return ag.TensorSpec(shape, kind, dense_strides(shape, memory_order(spec)))


def quantise_tensors(graph: ag.Graph, tensors: Named, seed: int) -> tuple[Own, Own]:
    """Tensors for `quantise_graph`, and for the graph before: the same numbers, exact in any dtype,
    since scales are powers of two."""
    random, specs = torch.Generator().manual_seed(seed), {i.name: i.spec for i in graph.inputs}
    own, plain = dict(tensors), dict(tensors)
    for n, name in ((n, name) for n, name in PAIRS if name in specs):
        x, kind = tensors[n], specs[n].dtype
        first = x[..., : specs[n].shape[-1]]
        own[n] = lay_like((first * 4).nan_to_num(127).round().to(kind), specs[n])
        if kind in FLOATS_BESIDE:  # numbers of q's dtype and of this
            own[n].copy_((x * 4).to(torch.float8_e5m2).to(kind))
        elif kind.is_floating_point:
            own[n].copy_((x * 4).to(kind))
        elif kind == IN_PAIRS:
            four = (x * 4).nan_to_num(7).round().clamp(-8, 7).int() + 8
            own[n].copy_(four[..., ::2] + 16 * four[..., 1::2])
        power = torch.randint(-3, 2, specs[name].shape, generator=random)
        own[name] = lay_like(torch.exp2(power.float()), specs[name])
        numbers = halves_of(own[n]) if kind == IN_PAIRS else own[n].double()
        whole = numbers * expand_blocks(own[name], x.shape)
        plain[n] = lay_like(whole.to(x.dtype), ag.TensorSpec.like(x))
    return own, plain


def same_numbers(x: torch.Tensor, codes: torch.Tensor) -> bool:
    """True if x is what bytes of float8_e4m3fn mean, bit by bit but for those of NaN."""
    due = codes.view(torch.float8_e4m3fn).to(x.dtype)
    same = x.isnan() & due.isnan() | (x == due) & (x.signbit() == due.signbit())
    return bool(same.all())
