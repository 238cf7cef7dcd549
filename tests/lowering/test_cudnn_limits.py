"""What cuDNN is said to take: each limit has a graph that it alone refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
from attn_graph.ir.storage.packed import Packed
from attn_graph.lowering.cudnn.graph import describe_call
from attn_graph.lowering.libraries.cudnn_case import Case, needs_padding_mask
from attn_graph.lowering.libraries.cudnn_limits import LIMITS, reasons
from attn_graph.lowering.libraries.cudnn_masks import CudnnBand, CudnnMask, mask_problems
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem
from attn_graph.machine.target import Version
from attn_graph.masks import Band, KeyLengths, QueryLengths
from attn_graph.masks.canonical import canonical_mask
from attn_graph.spec import TensorSpec

HALF, FLOAT = torch.float16, torch.float32
Lies = Callable[[Problem], Lying]
KNOWN: tuple[Version, Version] = ((9, 20, 0), (1, 28, 0))  # backend and frontend


def problem(
    *,
    B: int = 2,
    H: int = 4,
    G: int = 2,
    M: int = 256,
    N: int = 256,
    D: int = 64,
    E: int | None = None,
    backward: bool = False,
    dtype: torch.dtype = HALF,
    like: dict[str, TensorSpec] | None = None,
    data: Sequence[TensorSpec] = (),
    wants: Sequence[bool] | None = None,
    do: bool = True,
    dlse: bool = False,
    scales: Sequence[TensorSpec] = (),
    **fields: Any,  # of Attention
) -> Problem:
    """An attention, or its gradient, on dense tensors but for those in `like`.

    `data` is what modifiers, the mask and sinks read.
    """
    E = D if E is None else E
    shapes = {"q": (B, H, M, D), "k": (B, G, N, D), "v": (B, G, N, E)}
    made = {name: TensorSpec(shape, dtype) for name, shape in shapes.items()} | (like or {})
    node = Attention(**{"scale": 0.125, **fields})
    own = [made["q"], made["k"], made["v"], *data]
    if not backward:
        return evolve(Problem.of(node, own), scales=tuple(scales))
    o, lse = TensorSpec((B, H, M, E), dtype), TensorSpec((B, H, M), FLOAT)
    grad = AttentionGrad(node, node.trains if wants is None else tuple(wants), do, dlse)
    results = [made.get("o", o), made.get("lse", lse)]
    return Problem.of(grad, [*own, *results, *[made.get("do", o)] * do, *[lse] * dlse])


def names(
    given: Problem,
    sm: int = 90,
    backend: Version = KNOWN[0],
    frontend: Version = KNOWN[1],
    *,
    deterministic: bool = False,
    lies: Lies = Lying.dense,
) -> list[str]:
    """The limits that refuse a problem."""
    case = Case(lies(given), sm, backend, frontend, deterministic)
    pairs = [(limit, limit.violations(case)) for limit in LIMITS.at(case.place)]
    return [limit.name for limit, beyond in pairs if limit.reasons(beyond, case)]


def bias(*shape: int, dtype: torch.dtype = HALF, strides: Any = None) -> dict[str, Any]:
    """What makes a problem have a bias."""
    return {"modifiers": (Bias(),), "data": [TensorSpec(shape, dtype, strides)]}


def sinks(dtype: torch.dtype = FLOAT) -> dict[str, Any]:
    return {"sinks": True, "data": [TensorSpec((4,), dtype)]}


@final
@frozen
class Foreign(Modifier):
    """A modifier of one's own."""


CAUSAL = Band(None, 0)
BACK: dict[str, Any] = {"backward": True}
PAPERS = Alibi(True, "top_left")
CAP = SoftCap(30.0)
ROWS = TensorSpec((2, 4, 256, 12), HALF, (4 * 256 * 16, 256 * 16, 16, 1))
KEYS = TensorSpec((2, 2, 256, 12), HALF, (2 * 256 * 16, 256 * 16, 16, 1))
SCALAR = TensorSpec((), torch.int64)

N32 = TensorSpec((2,), torch.int32)
ENDED: dict[str, Any] = {"mask": KeyLengths(), "data": [N32]}
BOTH_ENDED: dict[str, Any] = {"mask": KeyLengths() & QueryLengths(), "data": [N32, N32]}
BIASED_KEYS: dict[str, Any] = {
    "modifiers": (Bias(),),
    "mask": KeyLengths(),
    "data": [TensorSpec((1, 4, 256, 256), HALF), N32],
    **BACK,
}


def packed(
    *sides: str, total: int = 400, page: int = 0, finite: bool = True, q: TensorSpec | None = None
) -> Lies:
    """An attention with some sides packed, in `total` rows, or with k and v in pages of so many
    rows, declared finite or not. q: how it lies, if it is packed otherwise than dense."""

    def lay(given: Problem) -> Lying:
        rows, keys = (n if x in sides else None for x, n in (("q", given.M), ("k", given.N)))
        op = Packed(given.grad or given.node, rows, keys, bool(page), finite=finite)
        sizes = dict(zip("bhij", given.sizes, strict=True)) | {"g": given.G, "t": total, "u": total}
        sizes |= {"d": given.D, "e": given.E, "s": given.B + 1, "n": 99, "p": page, "w": 16}
        pairs = zip(op.op.takes, op.takes, given.specs, strict=False)
        own = [x if a == b else TensorSpec(b.shape(sizes), x.dtype) for a, b, x in pairs]
        tables = [TensorSpec(role.shape(sizes), torch.int32) for role in op.takes[len(own) :]]
        return Lying(op, (q or own[0], *own[1:], *tables))

    return lay


PACKED = packed("q", "k")
PACKED_KEYS = packed("k")
PAGES = packed(page=16)


# For each limit what it alone refuses: the problem, and where it is asked.
EIGHT = torch.float8_e4m3fn
SCALED = {"dtype": EIGHT, "scales": [TensorSpec((1, 1, 1, 1), FLOAT)] * 3}
NARROWED = {"dtype": EIGHT, "scales": [TensorSpec((1, 1, 1, 1), FLOAT)] * 4}
BLACKWELL = {"sm": 100}


ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "architecture": ({}, {"sm": 75}),
    "backend": ({}, {"backend": (9, 10, 1)}),
    "frontend": ({}, {"frontend": (1, 27, 0)}),
    "dtype": ({"dtype": FLOAT}, {}),
    "sizes": ({"M": 0, "N": 4}, {}),
    "modifiers": ({"modifiers": (Foreign(),)}, {}),
    "soft_caps": ({"modifiers": (CAP, CAP)}, {}),
    "soft_cap_order": (
        {"modifiers": (Bias(), CAP), "data": [TensorSpec((1, 4, 256, 256), HALF)]},
        {},
    ),
    "soft_cap_mask": ({"modifiers": (CAP,), "mask": CAUSAL}, {}),
    "soft_cap": ({"modifiers": (CAP,), **BACK}, {"sm": 80}),
    "soft_cap_bias_gradient": (
        {"modifiers": (CAP, Bias()), "data": [TensorSpec((1, 4, 256, 256), HALF)], **BACK},
        {},
    ),
    "soft_cap_way_round": ({"modifiers": (CAP,), "N": 192, **BACK}, {}),
    "biases": (
        {"modifiers": (Bias(), Bias()), "data": [TensorSpec((1, 1, 1, 256), HALF)] * 2},
        {},
    ),
    "alibis": ({"modifiers": (PAPERS, PAPERS), "mask": CAUSAL}, {}),
    "alibi": (
        {
            "modifiers": (Alibi(align="top_left"),),
            "mask": CAUSAL,
            "data": [TensorSpec((4,), FLOAT)],
        },
        {},
    ),
    "alibi_mask": ({"modifiers": (PAPERS,)}, {}),
    "dropout": ({"dropout": 0.1, "data": [SCALAR, SCALAR]}, {}),
    "statistics": ({"stats": ("lse", "max")}, {}),
    "statistics_rows": (
        {"stats": ("lse", "max"), "sinks": True, "data": [TensorSpec((4,), FLOAT)]},
        {"backend": (9, 24, 0)},
    ),
    "statistics_operands": (
        {**SCALED, "stats": ("lse", "max")},
        {**BLACKWELL, "backend": (9, 24, 0)},
    ),
    "mask": ({"mask": ag.Prefix(3) | CAUSAL}, {}),
    "band_right": ({"mask": Band(None, -1)}, {}),
    "band_left": ({"mask": Band(1, None), **BACK}, {}),
    "band_left_forward": ({"mask": Band(1, None)}, {}),
    "lse_gradient": ({"dlse": True, **BACK}, {}),
    "no_cotangent": ({"do": False, **BACK}, {}),
    "head_multiple": ({"D": 12, "like": {"q": ROWS, "k": KEYS, "v": KEYS}}, {}),
    "head_forward": ({"D": 584}, {}),
    "head_hopper": ({"D": 264, **BACK}, {}),
    "head_blackwell": ({"D": 136, **BACK}, {"sm": 100}),
    "head": ({"D": 136, **BACK}, {"sm": 89}),
    "head_9_11": ({"D": 160, "E": 96, **BACK}, {"backend": (9, 12, 0)}),
    "unit_last": ({"like": {"k": TensorSpec((2, 2, 256, 64), HALF, (65536, 32768, 128, 2))}}, {}),
    "aligned_rows": (
        {"like": {"k": TensorSpec((2, 2, 256, 64), HALF, (2 * 256 * 68, 256 * 68, 68, 1))}},
        {},
    ),
    "ended_broadcast": (
        {**ENDED, "like": {"k": TensorSpec((2, 2, 256, 64), HALF, (0, 256 * 64, 64, 1))}},
        {},
    ),
    "query_lengths": (
        {"mask": QueryLengths(), "data": [TensorSpec((2,), torch.int32)]},
        {},
    ),
    "scale": ({"scale": 0.0}, {}),
    "bias_dtype": (bias(1, 4, 256, 256, dtype=torch.bfloat16), {}),
    "bias_rows": (bias(1, 4, 256, 256, strides=(0, 256 * 256, 1, 256)), {}),
    "bias_column": ({**bias(1, 1, 256, 1), **BACK}, {"sm": 80}),
    "bias_gradient_192": ({**bias(1, 4, 256, 256), "D": 192, "E": 128, **BACK}, {"sm": 100}),
    "bias_column_in_order": ({**bias(1, 1, 256, 1), **BACK}, {"sm": 100}),
    "bias_gradient_dtype": ({**bias(1, 4, 256, 256, dtype=FLOAT), **BACK}, {}),
    "one_by_one": ({"M": 1, "N": 1, **BACK}, {}),
    "right_corner": ({"M": 100, "N": 60, "mask": Band(None, -40)}, {}),
    "window_longer": ({"M": 100, "N": 60, "mask": Band(-9, 0)}, {}),
    "right_corner_additions": (
        {
            **bias(1, 4, 256, 256),
            "mask": KeyLengths() & Band(None, 0, ("kv_lengths",)),
            "data": [TensorSpec((1, 4, 256, 256), HALF), TensorSpec((2,), torch.int32)],
        },
        {},
    ),
    "window_9_14_0": ({"N": 2048, "mask": Band(-9, None)}, {"backend": (9, 14, 0)}),
    "sinks_version": (sinks(), {"backend": (9, 12, 0)}),
    "sinks_decode": ({"M": 1, **sinks()}, {}),
    "sinks_in_order": ({**sinks(), **BACK}, {"deterministic": True}),
    "deterministic_blackwell": (
        BACK,
        {"sm": 100, "backend": (9, 17, 0), "deterministic": True},
    ),
    "deterministic_bias": (
        {**bias(1, 4, 256, 256), "wants": (True, True, True, False), **BACK},
        {"sm": 100, "deterministic": True},
    ),
    "deterministic_additions": (
        {"modifiers": (PAPERS,), "mask": CAUSAL, **BACK},
        {"sm": 100, "deterministic": True},
    ),
    "quantised_architecture": (NARROWED, {"sm": 120}),
    "quantised_output": (SCALED, {}),
    "quantised_query": ({**NARROWED, "M": 1}, {}),
    "quantised_corner": ({**NARROWED, "N": 300, "mask": Band(high=44)}, {}),
    "quantised_sinks": ({**NARROWED, "sinks": True, "data": [TensorSpec((4,), FLOAT)]}, {}),
    "quantised_version": (SCALED, {**BLACKWELL, "backend": (9, 12, 0)}),
    "quantised_dtypes": (
        {**SCALED, "like": {"v": TensorSpec((2, 2, 256, 64), torch.float8_e5m2)}},
        BLACKWELL,
    ),
    "quantised_scales": (
        {**SCALED, "scales": [TensorSpec((1, n, 1, 1), FLOAT) for n in (1, 1, 2)]},
        BLACKWELL,
    ),
    "quantised_heads": ({**SCALED, "D": 256}, BLACKWELL),
    "quantised_heads_hopper": ({**NARROWED, "D": 272}, {}),
    "quantised_modifiers": ({**SCALED, "modifiers": (CAP,)}, BLACKWELL),
    "packed_rows": (
        BOTH_ENDED,
        {
            "lies": packed("q", "k", q=TensorSpec((400, 4, 64), HALF, (64, 25600, 1))),
        },
    ),
    "packed_keys_alone": (
        ENDED,
        {
            "lies": packed("k", total=2**24),
        },
    ),
    "packed_keys_entries": (
        {**ENDED, **BACK, "like": {"q": TensorSpec((2, 4, 256, 64), HALF, (65544, 16384, 64, 1))}},
        {"sm": 120, "lies": PACKED_KEYS},
    ),
    "packed_keys_backward": ({**ENDED, **BACK}, {"sm": 121, "lies": PACKED_KEYS}),
    "page_size": (ENDED, {"lies": packed(page=48)}),
    "pages_absent": (ENDED, {"lies": packed(page=16, finite=False)}),
    "pages_backward": ({**ENDED, **BACK}, {"lies": PAGES}),
    "pages_soft_cap": ({"modifiers": (CAP,)}, {"lies": PAGES}),
    "packed_version": (BOTH_ENDED, {"sm": 80, "backend": (9, 18, 0), "lies": PACKED}),
    "packed_statistics": ({**BOTH_ENDED, **BACK}, {"sm": 80, "lies": PACKED}),
    "packed_one_query": (
        {**BOTH_ENDED, "B": 1, "M": 1, "data": [TensorSpec((1,), torch.int32)] * 2, **BACK},
        {"sm": 100, "lies": PACKED},
    ),
    "packed_in_order": (
        {**ENDED, **BACK},
        {"sm": 80, "deterministic": True, "lies": PACKED_KEYS},
    ),
    "packed_bias_gradient": (BIASED_KEYS, {"sm": 80, "lies": PACKED_KEYS}),
    "packed_sinks": (
        {
            "sinks": True,
            "mask": ENDED["mask"],
            "data": [N32, TensorSpec((4,), FLOAT)],
            **BACK,
        },
        {"lies": PACKED_KEYS},
    ),
}
# Limits that hold at another place too.
TOO = (
    ("soft_cap", *({"modifiers": (CAP,), **BACK}, {"sm": 120})),
    ("head", *({"D": 136, **BACK}, {"sm": 120})),
    ("bias_column", *({**bias(1, 1, 256, 1), **BACK}, {"sm": 120})),
    ("packed_statistics", *({**BOTH_ENDED, **BACK}, {"sm": 120, "lies": PACKED})),
    (
        "packed_in_order",
        *(
            {**ENDED, **BACK},
            {"sm": 120, "deterministic": True, "lies": PACKED_KEYS},
        ),
    ),
    ("packed_bias_gradient", *(BIASED_KEYS, {"sm": 100, "lies": PACKED_KEYS})),
)


@pytest.mark.parametrize(
    ("limit", "given", "asked"),
    [*((limit.name, *ALONE[limit.name]) for limit in LIMITS.rows), *TOO],
)
def test_each_limit_is_all_that_refuses_some_problem(
    limit: str, given: dict[str, Any], asked: dict[str, Any]
) -> None:
    assert names(problem(**given), **asked) == [limit]


def test_plain_attention_is_taken_in_both_passes_everywhere() -> None:
    for backward in (False, True):
        for sm in (80, 89, 90, 100, 120):
            case = Case(Lying.dense(problem(backward=backward, mask=CAUSAL)), sm, *KNOWN)
            assert not [*reasons(case)]


def sentences(given: Problem, asked: dict[str, Any]) -> list[str]:
    where = {"sm": 90, "backend": KNOWN[0], "frontend": KNOWN[1], **asked}
    case = Case(where.pop("lies", Lying.dense)(given), **where)
    return [*map(str, LIMITS.reasons(case, case.place))]


def keeps(stated: CudnnBand, i: int, j: int, shift: int) -> bool:
    """Whether cuDNN's band keeps a place."""
    at = i + (shift if stated.align == "bottom_right" else 0)
    above = stated.left is None or j > at - stated.left
    return above and (stated.right is None or j <= at + stated.right)


@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 4), (3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("plain", [False, True])
def test_a_band_means_the_same_in_cudnns_terms(M: int, N: int, plain: bool) -> None:
    bounds = (None, *range(-M - 1, N + 2))
    for low, high in ((low, high) for low in bounds for high in bounds):
        if low is not None and high is not None and low > high:
            continue
        mask = canonical_mask(Band(low, high), M, N)
        stated = CudnnMask.of(mask, M, N, plain=plain)
        assert stated is not None
        for i, j in ((i, j) for i in range(M) for j in range(N)):
            kept = (low is None or j - i >= low) and (high is None or j - i <= high)
            assert keeps(stated.diagonal, i, j, N - M) == kept, (low, high, stated)


def test_masks_with_no_words_in_cudnn_have_reasons() -> None:
    ragged = Band(None, 0, ("kv_lengths",))
    for mask in (ag.Prefix(2), ~CAUSAL, ragged, CAUSAL & ragged & KeyLengths()):
        assert CudnnMask.of(mask, 4, 4) is None
        assert mask_problems(mask)


def test_lengths_are_told_whichever_are_given() -> None:
    for mask in (KeyLengths(), QueryLengths(), KeyLengths() & QueryLengths()):
        data = [TensorSpec((2,), torch.int32)] * len(mask.needs)
        call = describe_call(problem(mask=mask, data=data))
        sources = {x.argument: x.source for x in call.inputs}
        key = "kv_lengths" if "kv_lengths" in mask.needs else "N"
        query = "q_lengths" if "q_lengths" in mask.needs else "M"
        assert (sources["seq_len_q"], sources["seq_len_kv"]) == (query, key)


def test_a_padding_mask_goes_round_known_errors() -> None:
    def asked(given: Problem, sm: int = 90, backend: Version = (9, 20, 0)) -> bool:
        return needs_padding_mask(Case(Lying.dense(given), sm, backend, KNOWN[1]))

    half = problem(N=192, **BACK)
    assert asked(half)
    assert not asked(half, backend=(9, 26, 0))
    assert not asked(half, sm=100)
    assert not asked(problem(N=192))
    assert not asked(problem(M=192, N=192, mask=CAUSAL, **BACK))
    assert asked(problem(M=193, N=192, mask=CAUSAL, **BACK))
    assert asked(problem(M=1, **BACK), backend=(9, 26, 0))
    sources = [x.source for x in describe_call(half, padded=True).inputs]
    assert {"M", "N"} <= {*sources}


def test_a_call_prints_as_the_frontend_takes_it(golden: Any) -> None:
    golden(
        "\n".join(
            str(describe_call(problem(mask=Band(-7, 0), backward=backward, **bias(1, 4, 256, 256))))
            for backward in (False, True)
        )
    )


def test_a_plan_tells_what_cudnn_says_on_a_machine_without_it() -> None:
    """By the table, for the versions that are there, or else for those of today."""
    x = TensorSpec((2, 4, 256, 72), HALF)
    graph = ag.attention(x, x, x, mask=ag.Causal(), dropout=0.5)
    libraries = (("nvidia-cudnn-frontend", "1.28.0"), ("nvidia-cudnn-cu13", "9.20.0.48"))
    target = ag.Target("h200", "cuda", 90, (), libraries)
    plan = ag.compile(graph, target=target, backends=("cudnn", "math"))
    (reason,) = map(str, dict(plan.refusals)["cudnn"])
    assert reason.startswith("draws dropout from a generator of its own, and the graph's, of rate")
    with pytest.raises(ag.NoBackendError) as error:
        ag.compile(graph, target=ag.Target("v100", "cuda", 70), backends=("cudnn",))
    ((_, refused),) = error.value.refusals
    told = tuple(map(str, refused))
    assert told[0].startswith("needs nvidia-cudnn-frontend, which is not installed; pip install")
    assert told[1].startswith("needs cuDNN, which is not installed; PyTorch's CUDA build brings it")
    assert told[2] == "needs compute capability sm_80, and the target has sm_70"
