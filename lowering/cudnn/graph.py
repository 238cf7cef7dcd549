"""An attention as a call of cuDNN's frontend: plain data, made without cuDNN.

cuDNN sees a packed tensor [T,H,D] as [B,H,M,D], with the first element of each batch entry: T is
not a part of the call, so one plan serves batches of any number of rows. It sees a pool of pages
[n,P,G,D] as [n,G,P,D], with the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, final

import torch
from attrs import evolve, frozen

from attn_graph.ir.modifiers import Alibi, Bias, SoftCap
from attn_graph.ir.storage.packed import STARTS
from attn_graph.ir.storage.scaling import WEIGHT_SCALE
from attn_graph.lowering.libraries.cudnn_masks import CudnnMask, translate_mask
from attn_graph.lowering.lying import SIDES, Lying
from attn_graph.lowering.problem import Problem
from attn_graph.spec import NAMES, TensorSpec, dense_like, dense_strides, new_strides

Option = float | bool | str | None
STATISTICS = {"lse": "stats", "max": "score_max"}  # the frontend's names
LEAST_STEP = 64  # rows: the grain of planned totals of backwards
GRAIN = 4  # bits of a planned total: it exceeds the number of rows by an eighth at most
TOTALS = {"rows": "max_total_seq_len_q", "keys": "max_total_seq_len_kv"}
TABLES = ("paged_attention_k_table", "paged_attention_v_table")  # one tensor


@final
@frozen
class Slot:
    """A tensor of a cuDNN graph.

    argument: the frontend's name for it. source: our name for the operand or result; "M" and "N"
    stand for int32 [B,1,1,1] filled with that size, a number for float32 [1,1,1,1]. Lengths are
    always dense int32 here, in any layout of the operand. strides: in elements. offsets: of a
    packed tensor, the argument with the starts of its sequences. step: of such offsets, the
    elements from row to row.
    """

    argument: str
    source: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offsets: str = ""
    step: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def plain(self) -> dict[str, Any]:  # Any: JSON
        """As JSON, without source."""
        packed = {"offsets": self.offsets} if self.offsets else {}
        return {
            "argument": self.argument,
            "shape": self.shape,
            "strides": self.strides,
            "dtype": NAMES[self.dtype],
            **packed,
        }

    def __str__(self) -> str:
        name = NAMES[self.dtype]
        sizes = ", ".join(map(str, self.shape))
        source = f"{self.source} * {self.step}" if self.step else self.source
        begin = f" from {self.offsets}" if self.offsets else ""
        return f"{self.argument}={source} {name}[{sizes}](strides={self.strides}){begin}"


@final
@frozen
class CudnnCall:
    """One call of the frontend, `sdpa`, `sdpa_fp8` or `sdpa_backward`: its tensors and options.

    Tensors are numbered in order, inputs before outputs, from 1: these are cuDNN's uids.
    """

    name: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    options: tuple[tuple[str, Option], ...]

    @property
    def set_options(self) -> dict[str, Option]:
        """The options other than None and False."""
        return {k: v for k, v in self.options if v is not None and v is not False}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All tensors, in the order of their numbers."""
        return self.inputs + self.outputs

    @property
    def plain(self) -> dict[str, Any]:  # Any: JSON
        """The call as JSON, for builder.py."""
        slots = [x.plain | {"uid": uid} for uid, x in enumerate(self.slots, start=1)]
        return {
            "name": self.name,
            "dtype": NAMES[self.inputs[0].dtype],
            "inputs": slots[: len(self.inputs)],
            "outputs": slots[len(self.inputs) :],
            "options": self.set_options,
        }

    def __str__(self) -> str:
        parts = [*map(str, self.inputs), *(f"{k}={v!r}" for k, v in self.set_options.items())]
        lines = "".join(f"  {line},\n" for line in parts)
        return f"{self.name}(\n{lines}) -> {', '.join(map(str, self.outputs))}"


def describe_call(
    problem: Problem, *, padded: bool = False, deterministic: bool = False, clears: bool = True
) -> CudnnCall:
    """The call for a problem with a mask in cuDNN's terms.

    padded: use a padding mask of full lengths even if no lengths are parts. clears: True if do is
    read as a dense copy, with 0 in rows without keys, if there may be any.
    """
    mask = translate_mask(problem)
    assert mask is not None  # the table of limits said so
    lengths = tuple(length_slots(problem, mask, padded))
    caps = [m.cap for m in problem.node.modifiers if isinstance(m, SoftCap)]
    options = {
        "attn_scale": problem.node.scale,
        "soft_cap": caps[0] if caps else None,
        **band_options(mask),
        "use_alibi_mask": any(isinstance(m, Alibi) for m in problem.node.modifiers),
        "use_padding_mask": bool(lengths),
    }
    if problem.grad is None:
        return forward_call(problem, lengths, options | {"generate_stats": True})
    options |= {"use_deterministic_algorithm": deterministic}
    return backward_call(problem, lengths, options, clears and problem.has_blind_rows)


def band_options(mask: CudnnMask) -> dict[str, Option]:
    """The options for the band of a mask."""
    band = mask.diagonal
    if band.left is None and band.right is None:
        return {}
    return {
        "diagonal_alignment": band.align,
        "diagonal_band_left_bound": band.left,
        "diagonal_band_right_bound": band.right,
    }


def forward_call(
    problem: Problem, lengths: Sequence[Slot], options: dict[str, Option]
) -> CudnnCall:
    """The call of `sdpa`, or of `sdpa_fp8` for quantised tensors; options: as the frontend takes
    them."""
    output, scales = result_slot("o", "o", problem.o), list[Slot]()
    if problem.scales:  # of quantised tensors, then of weights and of o
        scales = [scale_slot(f"descale_{name}", f"{name}_scale") for name in "qkv"]
        scales += [scale_slot("descale_s", f"{1 / WEIGHT_SCALE}")]
        scales += [scale_slot("scale_s", f"{WEIGHT_SCALE}")]
        scales += [scale_slot("scale_o", "o_scale" if problem.narrow_o else "1.0")]
    inputs = (*operand_slots(problem), *scales, *lengths)
    largest = [scale_slot("amax_o", "amax")] if problem.narrow_o else []
    lse = lse_slot(problem)
    stats = (evolve(lse, argument=STATISTICS[x], source=x) for x in problem.node.stats)
    outputs = (output, *stats, *largest)
    return CudnnCall("sdpa_fp8" if scales else "sdpa", inputs, outputs, tuple(options.items()))


def backward_call(
    problem: Problem, lengths: Sequence[Slot], options: dict[str, Option], clears: bool
) -> CudnnCall:
    """The call of `sdpa_backward`; options: as the frontend takes them. clears: True if do is read
    as a dense copy."""
    assert problem.grad is not None
    given = problem.grad.split(problem.specs)
    results = [slot("o", "o", given.o)]
    if given.do:
        results.append(slot("dO", "do", dense_like(given.do) if clears else given.do))
    inputs = (*operand_slots(problem), *results, lse_slot(problem), *lengths)
    outputs = []  # dQ, dK and dV are always computed, those of bias and sinks if wanted
    for source, spec in zip("qkv", problem.specs, strict=False):
        due = problem.lay(f"d{source}", spec.shape, spec)
        outputs.append(result_slot(f"d{source.upper()}", f"d{source}", due))
    for role, spec, wants in zip(
        problem.node.roles, problem.specs, problem.grad.wants, strict=False
    ):
        if wants and role == "bias":
            strides = dense_strides(spec.shape)
            outputs.append(Slot("dBias", "dbias", spec.shape, strides, spec.dtype))
        if wants and role == "sinks":
            outputs.append(per_head_slot("dSink_token", "dsinks", problem.H))
    return CudnnCall("sdpa_backward", inputs, tuple(outputs), tuple(options.items()))


def operand_slots(problem: Problem) -> Iterator[Slot]:
    """The operands of the attention itself, except lengths."""
    yield from (slot(x, x, spec) for x, spec in zip("qkv", problem.specs, strict=False))
    parts = problem.by_role
    for modifier, data in zip(problem.node.modifiers, parts.modifiers, strict=True):
        if isinstance(modifier, Bias):
            yield slot("bias", "bias", data["bias"])
    if parts.sinks is not None:
        yield per_head_slot("sink_token", "sinks", problem.H)


def lse_slot(problem: Problem) -> Slot:
    """lse [B,H,M] as cuDNN has it: [B,H,M,1], packed, in float32."""
    shape = (problem.B, problem.H, problem.M, 1)
    return Slot("stats", "lse", shape, dense_strides(shape), torch.float32)


def length_slots(problem: Problem, mask: CudnnMask, padded: bool) -> Iterator[Slot]:
    """The lengths of a padding mask: cuDNN takes both or none."""
    if not mask.lengths and not padded:
        return
    shape = (problem.B, 1, 1, 1)
    for argument, name, full in (
        ("seq_len_q", "q_lengths", "M"),
        ("seq_len_kv", "kv_lengths", "N"),
    ):
        source = name if name in mask.lengths else full
        yield Slot(argument, source, shape, dense_strides(shape), torch.int32)


def per_head_slot(argument: str, source: str, H: int) -> Slot:
    """A float32 for each head: our [H] as cuDNN's [1,H,1,1]."""
    shape = (1, H, 1, 1)
    return Slot(argument, source, shape, dense_strides(shape), torch.float32)


def scale_slot(argument: str, source: str) -> Slot:
    """One float32."""
    return Slot(argument, source, (1, 1, 1, 1), (1, 1, 1, 1), torch.float32)


def result_slot(argument: str, source: str, spec: TensorSpec) -> Slot:
    """A result with its own strides."""
    strides, given = new_strides(spec), slot(argument, source, spec)
    return given if strides == spec.strides else evolve(given, strides=strides)


def slot(argument: str, source: str, spec: TensorSpec) -> Slot:
    """An operand with its own strides. Axes of size 1 get the stride of a dense outermost axis."""
    pairs = [*zip(spec.shape, spec.strides, strict=True)]
    reach = max([1, *[n * s for n, s in pairs]])
    strides = [s if n > 1 else reach for n, s in pairs]
    if spec.shape[-1] == 1:
        strides[-1] = 1
    return Slot(argument, source, spec.shape, tuple(strides), spec.dtype)


def pack_call(call: CudnnCall, lying: Lying) -> CudnnCall:
    """The call on packed tensors and pages, of the same on padded ones."""
    own = tuple(pack_slot(x, lying, dense=x.source in lying.copied) for x in call.inputs)
    outputs = tuple(pack_slot(x, lying, dense=True) for x in call.outputs)
    packed = (x for x in (*own, *outputs) if x.offsets)
    starts = dict.fromkeys(start_slot(x, lying) for x in packed)
    bounds = {TOTALS[side]: round_total(T) for side, T in lying.totals.items()}
    options = call.options + (tuple(bounds.items()) if call.name == "sdpa_backward" else ())
    tables: tuple[Slot, ...] = ()
    if lying.pages is not None:
        B, pages = lying.pages.shape
        shape, strides = (B, 1, pages, 1), dense_strides((B, 1, pages, 1))
        tables = tuple(Slot(x, "pages", shape, strides, torch.int32) for x in TABLES)
        options += (("paged_attention_max_seq_len_kv", pages * lying.page),)
    return CudnnCall(call.name, (*own, *starts, *tables), outputs, options)


def pack_slot(x: Slot, lying: Lying, *, dense: bool) -> Slot:
    """A packed slot [B,H,M,D] with the offsets of its sequences, or [n,G,P,D] of a pool; any other
    unchanged.

    dense: True for copies and results of the call: [T,H,D] without gaps. lse is [T,H].
    """
    if x.source in lying.pools:
        pool = lying.pools[x.source]
        (n, P, G, D), (outer, row, head, last) = pool.shape, pool.strides
        return slot(
            x.argument, x.source, TensorSpec((n, G, P, D), pool.dtype, (outer, head, row, last))
        )
    side = SIDES.get(x.source, "")
    if side not in lying.totals:
        return x
    _, H, M, D = x.shape
    row, head, last = H * D, D, 1
    if not dense and x.source != "lse":
        head, last = x.strides[1] if H > 1 else D, x.strides[3]
        row = x.strides[2] if M > 1 else max(x.strides[0], row)
    strides = (M * row, head, row, last)
    return evolve(x, strides=strides, offsets=f"{STARTS[side]}_{row}")


def start_slot(x: Slot, lying: Lying) -> Slot:
    """The offsets of a packed slot: the first element of each sequence, and the end of the last.

    cuDNN has no int64 kernel for them if only keys are packed.
    """
    source, step = STARTS[SIDES[x.source]], x.strides[2]
    shape, dtype = (x.shape[0] + 1, 1, 1, 1), torch.int32 if lying.T is None else torch.int64
    return Slot(x.offsets, source, shape, dense_strides(shape), dtype, step=step)


def round_total(T: int) -> int:
    """T, rounded up a little: cuDNN sizes the backward's workspace by it, and one plan serves all
    totals of equal rounding."""
    return round_up_to(T, max(LEAST_STEP, 1 << max(0, T.bit_length() - GRAIN)))


def round_up_to(n: int, step: int) -> int:
    return -(-n // step) * step
