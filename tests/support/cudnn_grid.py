"""Graphs to ask cuDNN about: every boundary that its table of limits has, and drawn mixtures.

Sizes are those of real use, not of tests that compute: nothing here is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, final

import torch
from attrs import fields, frozen
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from attn_graph import masks as m
from attn_graph.ir import builder
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import simplify
from attn_graph.ir.vjp import backward, result_spec, wanted_inputs
from attn_graph.lowering.cudnn.backend import read_problem
from attn_graph.lowering.cudnn.sequences import Sequences
from attn_graph.lowering.problem import Problem
from attn_graph.spec import FLOATS, NAMES, TensorSpec
from attn_graph.testing.strategies import Shape, maybe

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
I32, I64 = torch.int32, torch.int64
DRAWN, SEED = 160, 0
POOL = 5000  # pages

# Layouts of [B,H,S,D]: orders of the axes, and strides that no order gives.
Sizes = tuple[int, int, int, int]
ORDERS = ("bhsd", "bshd", "sbhd", "hbsd", "shbd", "hsbd", "bhds", "sbdh")


def rows(B: int, H: int, S: int, step: int) -> Sizes:
    """Strides of rows that start `step` elements apart."""
    return H * S * step, S * step, step, 1


STRIDES: dict[str, Callable[[int, int, int, int], Sizes]] = {
    "bs3hd": lambda B, H, S, D: (S * 3 * H * D, D, 3 * H * D, 1),  # q, k, v side by side
    "sbh3d": lambda B, H, S, D: (H * 3 * D, 3 * D, B * H * 3 * D, 1),
    "gap 8": lambda B, H, S, D: rows(B, H, S, D + 8),
    "gap 4": lambda B, H, S, D: rows(B, H, S, D + 4),
    "gap 1": lambda B, H, S, D: rows(B, H, S, D + 1),
    "rows of 16": lambda B, H, S, D: rows(B, H, S, (D + 15) // 16 * 16),
    "heads apart": lambda B, H, S, D: (H * (S * D + 64), S * D + 64, D, 1),
    "heads 4 apart": lambda B, H, S, D: (H * (S * D + 4), S * D + 4, D, 1),
    "batch 4 apart": lambda B, H, S, D: (H * S * D + 4, S * D, D, 1),
    "one batch": lambda B, H, S, D: (0, S * D, D, 1),
    "one head": lambda B, H, S, D: (S * D, 0, D, 1),
    "one matrix": lambda B, H, S, D: (0, 0, D, 1),
    "one row": lambda B, H, S, D: (H * D, D, 0, 1),
    "one number": lambda B, H, S, D: (0, 0, 0, 0),
    "overlapping": lambda B, H, S, D: (H * S * 8, S * 8, 8, 1),
    "every second": lambda B, H, S, D: (H * S * D * 2, S * D * 2, D * 2, 2),
    "keys first": lambda B, H, S, D: (H * S * D, S * D, 1, S),
}
LAYOUTS = (*ORDERS, *STRIDES)


def laid(shape: Sizes, dtype: torch.dtype, layout: str) -> TensorSpec:
    """A spec in one of the layouts."""
    if layout in ORDERS:
        return TensorSpec(shape, dtype, layout=layout)
    return TensorSpec(shape, dtype, STRIDES[layout](*shape))


Asked = tuple[Problem, Sequences | None]


@final
@frozen(kw_only=True)
class Entry:
    """A graph of the grid. G, N and E are H, M and D unless told; layouts of k, v, do as q's.

    bias: its axes that are not 1, of "bhij". alibi: "own" for slopes that are an input. wants:
    the operands whose gradients are wanted. `stats` makes lse an output, so that it has a
    cotangent. packed: the sides that are packed, "q", "k" or "qk", in `total` rows each, 3/4 of
    those of all entries unless told; `gaps`: with lengths beside starts. page: rows of a page.
    """

    B: int = 2
    H: int = 4
    G: int | None = None
    M: int = 256
    N: int | None = None
    D: int = 64
    E: int | None = None
    dtype: torch.dtype = HALF
    layout: str = "bhsd"
    k_layout: str | None = None
    v_layout: str | None = None
    do_layout: str | None = None
    mask: m.Mask | None = None
    q_lengths: torch.dtype | None = None
    kv_lengths: torch.dtype | None = None
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    bias_layout: str = "bhsd"
    alibi: bool | str = False
    align: m.Align | None = None
    sinks: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    stats: bool = False
    wants: tuple[str, ...] | None = None
    deterministic: bool = False
    packed: str = ""
    total: int | None = None
    gaps: bool = False
    page: int = 0
    table: torch.dtype = I32

    @property
    def shape(self) -> Shape:
        G, N, E = (self.H if self.G is None else self.G, self.N, self.E)
        sizes = (self.B, self.H, G, self.M, self.M if N is None else N, self.D)
        return Shape(*sizes, self.D if E is None else E)

    @property
    def graph(self) -> Graph:
        """The attention, simplified as planning does."""
        size, k_layout = self.shape, self.k_layout or self.layout
        q = self.operand(size.q, self.layout, "q" in self.packed)
        k = self.operand(size.k, k_layout, "k" in self.packed, self.page)
        v = self.operand(size.v, self.v_layout or k_layout, "k" in self.packed, self.page)
        options = {
            "mask": self.mask,
            "align": self.align,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "dropout": self.dropout,
            "stats": self.stats,
        }
        return simplify(builder.attention(q, k, v, **options, **self.data, **self.places))  # type: ignore[arg-type]  # options of many types

    def operand(self, shape: Sizes, layout: str, packed: bool, page: int = 0) -> TensorSpec:
        """q, k or v: packed [T,H,D], in pages [n,P,H,D], or [B,H,S,D]."""
        B, H, S, D = shape
        if packed:
            _, head, row, last = laid((1, H, self.rows(S), D), self.dtype, layout).strides
            return TensorSpec((self.rows(S), H, D), self.dtype, (row, head, last))
        if page:
            outer, head, row, last = laid((POOL, H, page, D), self.dtype, layout).strides
            return TensorSpec((POOL, page, H, D), self.dtype, (outer, row, head, last))
        return laid(shape, self.dtype, layout)

    def rows(self, most: int) -> int:
        """T of a side whose sequences have at most so many rows."""
        return self.B * most * 3 // 4 if self.total is None else self.total

    @property
    def places(self) -> dict[str, Any]:  # Any: options of `attention`
        """Where packed sequences begin, and which pages there are."""
        found, ends = dict[str, Any](), TensorSpec((self.B,), I32)
        most: list[int | None] = [None, None]
        for n, (side, size) in enumerate((("q", self.shape.M), ("kv", self.shape.N))):
            if side[0] in self.packed:
                found[f"{side}_starts"] = TensorSpec((self.B + 1,), I32)
                most[n] = size
        if self.gaps:
            found |= dict.fromkeys(m.LENGTHS, ends)
        if self.page:
            found["pages"] = TensorSpec((self.B, -(-self.shape.N // self.page)), self.table)
        return found | ({"most": tuple(most)} if self.packed else {})

    @property
    def data(self) -> dict[str, Any]:  # Any: options of `attention`
        """What is given beside q, k and v."""
        size, found = self.shape, dict[str, Any]()
        if self.bias is not None:
            full = zip("bhij", size.full("bhij"), strict=True)
            B, H, M, N = (n if x in self.bias else 1 for x, n in full)
            found["bias"] = laid((B, H, M, N), self.bias_dtype or self.dtype, self.bias_layout)
        if self.alibi:
            found["alibi"] = TensorSpec((self.H,), FLOAT) if self.alibi == "own" else True
        if self.sinks:
            found["sinks"] = TensorSpec((self.H,), FLOAT)
        for name in m.LENGTHS:
            if dtype := getattr(self, name):
                found[name] = TensorSpec((self.B,), dtype)
        return found

    @property
    def problems(self) -> tuple[Asked, Asked]:
        """The attention and its gradient."""
        graph = self.graph
        cotangents = [result_spec(graph, i) for i in graph.outputs]
        if self.do_layout:
            cotangents[0] = laid(cotangents[0].shape, self.dtype, self.do_layout)  # type: ignore[arg-type]  # four axes
        inputs = wanted_inputs(graph, self.wants and self.present(self.wants, graph))
        forward, back = (read_problem(x) for x in (graph, backward(graph, inputs, cotangents)))
        assert forward is not None
        assert back is not None
        return forward, back

    @staticmethod
    def present(wants: tuple[str, ...], graph: Graph) -> list[str]:
        return [i.name for i in graph.inputs if i.name in wants]

    def __str__(self) -> str:
        """What differs from the plainest attention."""
        told = ((x.name, getattr(self, x.name), x.default) for x in fields(Entry))
        texts = (f"{name}={NAMES.get(x, x)}" for name, x, default in told if x != default)
        return ", ".join(texts) or "nothing else"


# Boundaries, axis by axis

CAUSAL, RIGHT = m.Causal("top_left"), m.Causal("bottom_right")
WINDOW_ENDS: tuple[tuple[int | None, int], ...] = ((16, 0), (None, 5), (7, 5))
ALIGNS: tuple[m.Align, ...] = ("top_left", "bottom_right")
WINDOWS = tuple(m.Window(*ends, align) for align in ALIGNS for ends in WINDOW_ENDS)
MASKS = (None, CAUSAL, RIGHT, *WINDOWS, m.Window(16, None, "top_left"))
QKV = ("q", "k", "v")
WIDTHS = (8, 16, 24, 40, 56, 64, 72, 120, 128, 136, 184, 192, 200, 248, 256, 264, 512, 520)
NARROW = (1, 4, 12, 20, 100, 252)  # no multiples of 8
PAIRS = (
    *((64, 128), (128, 64), (192, 128), (128, 192), (256, 64), (8, 256), (136, 72), (256, 128)),
    *((128, 256), (192, 64), (192, 136), (184, 120), (264, 64), (64, 264), (64, 100), (100, 64)),
)
HEADS = ((1, 1), (4, 1), (8, 2), (6, 3), (5, 5), (32, 8), (7, 1), (128, 1))
LENGTHS = (1, 2, 7, 8, 63, 64, 65, 127, 128, 129, 192, 257, 500, 1216, 4096)
UNEQUAL = (
    *((1, 2), (1, 64), (1, 192), (2, 1), (64, 1), (5, 3), (64, 128), (256, 192), (192, 256)),
    *((1000, 1), (1024, 4096), (8, 320)),
)
LARGE: tuple[dict[str, Any], ...] = (
    {"B": 70000, "H": 1, "M": 128},
    {"B": 1, "H": 70000, "M": 128},
    {"B": 300, "H": 300, "M": 64},
    {"B": 4, "H": 64, "M": 2**17, "D": 128},
    {"B": 1, "H": 1, "M": 2**20, "mask": CAUSAL},
    {"B": 1, "H": 2, "M": 64, "N": 2**20},
)
ENDS: tuple[dict[str, Any], ...] = ({"kv_lengths": I32}, {"q_lengths": I32}, {
    "kv_lengths": I64, "q_lengths": I32,
})  # fmt: skip


def spelled() -> Iterator[Entry]:
    """Every boundary value of every axis."""
    yield from sizes()
    yield from layouts()
    yield from masked()
    yield from biased()
    yield from sloped()
    yield from sunk()
    yield from ended()
    yield from ordered()
    yield from capped()
    yield from others()
    yield from packed()
    yield from paged()
    yield from decoded()


def sizes() -> Iterator[Entry]:
    yield from (Entry(dtype=x) for x in FLOATS)
    yield from (Entry(D=x, dtype=BRAIN) for x in WIDTHS + NARROW)
    yield from (Entry(D=x, layout="rows of 16") for x in NARROW)
    yield from (Entry(D=d, E=e, mask=x) for d, e in PAIRS for x in (None, CAUSAL))
    yield from (Entry(H=h, G=g) for h, g in HEADS)
    yield from (Entry(B=x) for x in (0, 1, 3, 16))
    yield from (Entry(B=1, H=2, M=x, mask=y) for x in (0, *LENGTHS) for y in (None, CAUSAL))
    yield from (Entry(**x) for x in LARGE)
    yield Entry(N=0)


def layouts() -> Iterator[Entry]:
    for x in LAYOUTS:
        yield Entry(layout=x)
        yield Entry(k_layout=x, H=8, G=2)
        yield Entry(v_layout=x, layout="bshd", dtype=BRAIN)
        yield Entry(do_layout=x)
    yield Entry(layout="bshd", M=1, N=256)
    yield Entry(layout="bshd", H=1)
    yield Entry(layout="sbhd", B=1)


def masked() -> Iterator[Entry]:
    yield from (Entry(H=2, M=x, N=y, mask=z) for x, y in UNEQUAL for z in MASKS)
    lows, highs = (None, -255, -1, 0, 1, 5), (None, -5, -1, 0, 1, 5, 300)
    bands = ((x, y) for x, y in product(lows, highs) if x is None or y is None or x <= y)
    yield from (Entry(mask=m.Band(*x)) for x in bands)
    wide = ((-10, 128), (-10, 100), (None, 120), (20, 128), (None, 128), (128, None))
    yield from (Entry(M=128, N=n, mask=m.Band(*x)) for n in (128, 256) for x in wide)
    unstated = (m.Prefix(100), m.Prefix(100) | CAUSAL, ~CAUSAL)
    yield from (Entry(mask=x) for x in (*unstated, CAUSAL & m.Window(64, None, "top_left")))


def biased() -> Iterator[Entry]:
    axes = ["".join(x) for x in product(*(("", letter) for letter in "bhij"))]
    for wants in (None, QKV):
        yield from (Entry(bias=x, wants=wants) for x in axes)
        yield from (Entry(bias=x, bias_dtype=FLOAT, wants=wants) for x in ("bhij", "ij", "bj"))
        odd = ("gap 1", "keys first", "one matrix", "one row", "one number", "every second")
        yield from (Entry(bias="bhij", bias_layout=x, wants=wants) for x in odd)
        uneven = ((1, 77), (77, 1), (1, 128), (257, 129))
        yield from (Entry(bias="bhij", H=8, G=2, M=x, N=y, wants=wants) for x, y in uneven)
    cases = product(
        ("bhij", "ij"), (CAUSAL, RIGHT, WINDOWS[0]), ((256, 256), (200, 333), (64, 192))
    )
    yield from (Entry(bias=x, dtype=BRAIN, mask=y, M=a, N=b) for x, y, (a, b) in cases)
    yield from (Entry(bias="hij", D=192, E=128, wants=x) for x in (None, QKV))


def sloped() -> Iterator[Entry]:
    """With ALiBi."""
    for x, (a, b) in product((None, CAUSAL, RIGHT, *WINDOWS), ((256, 256), (100, 333), (300, 100))):
        yield Entry(alibi=True, align="top_left", mask=x, M=a, N=b)
    yield from (Entry(alibi=True, align=x, mask=CAUSAL, M=100, N=256) for x in ALIGNS)
    yield from (Entry(alibi=True, mask=CAUSAL, bias="hij", M=x, H=6) for x in (64, 200))
    yield from (Entry(alibi="own", mask=CAUSAL, wants=x) for x in (None, QKV))


def sunk() -> Iterator[Entry]:
    """With sinks."""
    pairs, wants = ((256, 256), (1, 100), (2, 100), (1, 1)), (None, QKV)
    for x, (a, b), y in product((None, CAUSAL, RIGHT, WINDOWS[0]), pairs, wants):
        yield Entry(sinks=True, mask=x, M=a, N=b, wants=y)
    sizes = (40, 128, 192, 256)
    yield from (Entry(sinks=True, bias="hij", H=8, G=2, D=x, mask=CAUSAL) for x in sizes)


def ended() -> Iterator[Entry]:
    """With lengths at which the sequences end."""
    pairs = ((256, 256), (300, 100), (1, 64), (1, 1), (64, 192))
    for x, (a, b), lengths in product(MASKS[:5], pairs, ENDS):
        yield Entry(mask=x, M=a, N=b, **lengths)
    for x, y, z in product((None, "bhij", "b"), (False, True), (False, True)):
        yield Entry(mask=CAUSAL, bias=x, alibi=y, sinks=z, **ENDS[2])
        yield Entry(mask=RIGHT, bias=x, sinks=z, M=100, N=300, **ENDS[int(y)])
    yield Entry(mask=CAUSAL | m.KeyLengths(), kv_lengths=I32)


def ordered() -> Iterator[Entry]:
    """Deterministic."""
    biases = ((None, None), ("hij", None), ("hij", QKV))
    for x, (bias, wants), y, z in product((64, 128, 192), biases, (False, True), (False, True)):
        plain: dict[str, Any] = {"D": x, "H": 8, "G": 2, "bias": bias, "wants": wants, "sinks": z}
        yield Entry(deterministic=True, alibi=y, mask=CAUSAL, **plain)
    yield from (Entry(deterministic=True, M=x, N=y) for x, y in UNEQUAL)
    yield from (Entry(deterministic=True, D=x) for x in WIDTHS)


def capped() -> Iterator[Entry]:
    """With a soft cap."""
    yield from (Entry(soft_cap=30.0, D=x, dtype=y) for x in WIDTHS for y in (HALF, BRAIN))
    yield from (Entry(soft_cap=30.0, D=x, E=y) for x, y in PAIRS)
    yield from (Entry(soft_cap=30.0, M=x, N=y, H=8, G=2) for x, y in (*UNEQUAL, (1, 1), (200, 333)))
    yield from (Entry(soft_cap=30.0, mask=x) for x in MASKS[1:])
    for x, y, z in product((None, QKV), ("bhij", "ij", "bj", ""), (False, True)):
        yield Entry(soft_cap=30.0, bias=y, wants=x, deterministic=z)
    yield from (Entry(soft_cap=30.0, bias="ij", bias_dtype=FLOAT, wants=x) for x in (None, QKV))
    yield from (
        Entry(soft_cap=30.0, sinks=True, M=x, wants=y) for x in (1, 100) for y in (None, QKV)
    )
    yield from (Entry(soft_cap=x) for x in (1e-3, 0.5, 1e4))
    yield from (Entry(soft_cap=30.0, layout=x) for x in ("bshd", "bs3hd", "gap 8", "one batch"))
    yield from (Entry(soft_cap=30.0, **x) for x in (*ENDS, {"alibi": True, "mask": CAUSAL}))


def others() -> Iterator[Entry]:
    yield from (Entry(scale=x) for x in (0.0, -1.0, 1.0, 1e-6, 1e4))
    yield from (Entry(stats=True), Entry(dropout=0.1))


ROWS: dict[str, Any] = {"packed": "qk", "B": 4, "M": 512, "layout": "bshd", "align": "top_left"}
TRAINED: dict[str, Any] = {**ROWS, "H": 8, "D": 128, "mask": CAUSAL, "dtype": BRAIN}


def packed() -> Iterator[Entry]:
    """Sequences one after another."""
    yield from (
        Entry(**{**ROWS, "packed": x, "gaps": y}) for x in ("q", "k", "qk") for y in (False, True)
    )
    yield from (Entry(**ROWS, D=x) for x in (8, 12, 64, 72, 96, 128, 192, 256, 264, 512))
    yield from (Entry(**ROWS, D=x, E=y) for x, y in PAIRS)
    yield from (Entry(**ROWS, H=h, G=g, D=x) for h, g in HEADS for x in (64, 72))
    yield from (Entry(**{**ROWS, "B": x}) for x in (1, 2, 5, 17))
    yield from (Entry(**ROWS, total=x) for x in (1, 63, 64, 1000, 2000))
    yield from (Entry(**{**ROWS, "dtype": x}) for x in FLOATS)
    yield from (Entry(**ROWS, mask=x) for x in MASKS)
    yield from (
        Entry(**{**ROWS, "M": x, "N": y}, mask=z) for x, y in UNEQUAL for z in (None, CAUSAL, RIGHT)
    )
    layouts = ("bshd", "bs3hd", "bhsd", "gap 8", "gap 4", "one row", "every second")
    yield from (Entry(**{**ROWS, "layout": x}) for x in layouts)
    yield from (Entry(**{**ROWS, "packed": x}, k_layout=y) for x in ("q", "k") for y in layouts)
    for x, y, z in product(("q", "k", "qk"), (None, QKV), ("bhij", "hij", "j")):
        yield Entry(**{**TRAINED, "packed": x}, bias=z, wants=y)
    for x, y, z in product(("q", "k", "qk"), (False, True), (64, 72)):
        yield Entry(**{**TRAINED, "packed": x, "D": z, "G": 2}, deterministic=y)
        yield Entry(**{**TRAINED, "packed": x, "D": z}, alibi=True, deterministic=y)
        yield Entry(**{**TRAINED, "packed": x, "D": z, "G": 4}, bias="hij", deterministic=y)
    yield from (Entry(**TRAINED, sinks=True, wants=x) for x in (None, QKV))
    yield from (Entry(**ROWS, soft_cap=30.0, mask=x) for x in (None, CAUSAL))
    yield from (Entry(**TRAINED, dropout=0.1), Entry(**TRAINED, stats=True))
    yield from (Entry(**{**ROWS, "packed": "k", "M": x}, total=2**24) for x in (1, 64))
    yield Entry(**{**ROWS, "B": 1, "M": 2**17, "H": 128, "D": 128}, total=2**17)


PAGED: dict[str, Any] = {"B": 4, "H": 32, "G": 8, "D": 128, "dtype": BRAIN, "N": 4096}
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 3, 48)


def paged() -> Iterator[Entry]:
    """Keys and values in pages."""
    ended: dict[str, Any] = {**PAGED, "kv_lengths": I32}
    yield from (Entry(**ended, M=x, page=y) for x in (1, 512) for y in PAGES)
    yield from (Entry(**PAGED, M=x, page=16) for x in (1, 512))
    yield from (Entry(**ended, M=x, page=16, mask=y) for x in (1, 2, 8, 512) for y in MASKS)
    for x in (1, 2, 512):
        yield Entry(**ended, M=x, page=64, packed="q", mask=RIGHT)
        yield Entry(**ended, M=x, page=64, sinks=True)
        yield Entry(**ended, M=x, page=64, bias="hij")
        yield Entry(**ended, M=x, page=64, soft_cap=30.0)
        yield Entry(**PAGED, M=x, page=64, soft_cap=30.0)
        yield Entry(**ended, M=x, page=64, alibi=True, mask=CAUSAL, align="top_left")
        yield Entry(**ended, M=x, page=64, table=I64, stats=True)
        for d, e in (
            (64, 64),
            (192, 128),
            (256, 256),
            (264, 264),
            (512, 512),
            (576, 512),
            (72, 40),
        ):
            yield Entry(**{**ended, "D": d, "E": e}, M=x, page=64)
        for h, g in HEADS:
            yield Entry(**{**ended, "H": h, "G": g}, M=x, page=64)
        for y in ("bshd", "bs3hd", "gap 8", "gap 4", "every second"):
            yield Entry(**ended, M=x, page=16, k_layout=y)


def decoded() -> Iterator[Entry]:
    """One query each, of few and of many keys."""
    for B, (h, g), N in product(
        (1, 3, 8, 9, 64), ((32, 8), (8, 1), (65, 65)), (512, 640, 4096, 32768)
    ):
        yield Entry(B=B, H=h, G=g, M=1, N=N, D=128, dtype=BRAIN, kv_lengths=I32)
    yield from (
        Entry(B=2, H=40, G=2, M=1, N=8192, D=x, E=y) for x, y in ((8, 8), (64, 40), (256, 192))
    )
    yield Entry(H=8, M=1, N=4096, soft_cap=30.0)
    yield Entry(H=8, M=1, N=4096, bias="hij", kv_lengths=I32)
    yield Entry(H=8, M=1, N=4096, mask=m.Window(99, 0, "bottom_right"), kv_lengths=I32)


# Mixtures. All is drawn from short lists: these draws are the same wherever they are drawn.


def one_of(*values: Any) -> SearchStrategy[Any]:  # Any: what a field of Entry holds
    return st.sampled_from(values)


@st.composite
def mixtures(draw: DrawFn) -> Entry:
    """All axes at once, each mostly within its limits."""
    G, M = draw(one_of(1, 2, 3, 4)), draw(one_of(64, 1, 2, 5, 100, 128, 192, 256, 333))
    left, right = draw(one_of(0, 1, 16, 79)), draw(one_of(None, 0, 3))
    window = m.Window(left, right, draw(one_of(*ALIGNS)))
    alibi = draw(one_of(*[False] * 6, True))
    return Entry(
        B=draw(one_of(1, 2, 5)),
        H=G * draw(one_of(1, 2, 4)),
        G=G,
        M=M,
        N=draw(one_of(M, M, 1, 3, 64, 100, 128, 192, 320, 448, 1000)),
        D=draw(one_of(64, 64, 8, 40, 72, 128, 128, 192, 256)),
        E=draw(one_of(None, None, None, 64, 80, 128, 256)),
        dtype=draw(one_of(HALF, BRAIN)),
        layout=draw(one_of("bhsd", "bshd", "sbhd", "bs3hd", "gap 8")),
        k_layout=draw(one_of(None, "bshd", "one batch", "gap 8")),
        mask=draw(one_of(None, CAUSAL, RIGHT, window, window, m.Window(None, 4, "top_left"))),
        q_lengths=draw(one_of(None, None, None, I32)),
        kv_lengths=draw(one_of(None, None, None, I32)),
        bias=draw(maybe(one_of("bhij", "hij", "ij", "bj", "j"))),
        bias_dtype=draw(one_of(None, FLOAT)),
        alibi=alibi,
        align="top_left" if alibi else None,
        sinks=draw(one_of(False, False, False, True)),
        wants=draw(one_of(None, QKV, (*QKV, "sinks"))),
        deterministic=draw(one_of(False, False, False, True)),
    )


def drawn() -> list[Entry]:
    """Mixtures by hypothesis, always the same ones."""
    found = []

    @seed(SEED)
    @settings(
        max_examples=DRAWN,
        phases=[Phase.generate],
        derandomize=False,  # the seed above counts
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(mixtures())
    def collect(entry: Entry) -> None:
        found.append(entry)

    collect()
    return found


def grid() -> tuple[Entry, ...]:
    """All of it, each entry once."""
    return (*dict.fromkeys((*spelled(), *drawn())),)
