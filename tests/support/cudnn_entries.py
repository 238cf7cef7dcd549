"""What a graph to ask cuDNN about is, and the values that its fields take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from attrs import fields, frozen

from attn_graph import masks as m
from attn_graph.ir import builder
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.scaling import FLOATS_OF_8, O_SCALE, SCALES
from attn_graph.ir.transforms.vjp import backward, wanted_inputs
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.spec import NAMES, TensorSpec
from attn_graph.testing.strategies import Shape

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
I32, I64 = torch.int32, torch.int64
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


@final
@frozen(kw_only=True)
class Entry:
    """A graph of the grid. G, N and E are H, M and D unless told; layouts of k, v, do as q's.

    bias: its axes that are not 1, of "bhij". alibi: "own" for slopes that are an input. wants:
    the operands whose gradients are wanted. `stats` makes lse an output, so that it has a
    cotangent. packed: the sides that are packed, "q", "k" or "qk", in `total` rows each, 3/4 of
    those of all entries unless told; `gaps`: with lengths beside starts. page: rows of a page.
    In a dtype of 8 bits each tensor has one scale, o too if it is `narrow`; v may have its own.
    """

    B: int = 2
    H: int = 4
    G: int | None = None
    M: int = 256
    N: int | None = None
    D: int = 64
    E: int | None = None
    dtype: torch.dtype = HALF
    v_dtype: torch.dtype | None = None
    narrow: bool = False
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
    stats: bool | tuple[str, ...] = False
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
        v = TensorSpec(v.shape, self.v_dtype or self.dtype, v.strides)
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
        _, H, S, D = shape
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
        options, ends = dict[str, Any](), TensorSpec((self.B,), I32)
        most: list[int | None] = [None, None]
        for n, (side, size) in enumerate((("q", self.shape.M), ("kv", self.shape.N))):
            if side[0] in self.packed:
                options[f"{side}_starts"] = TensorSpec((self.B + 1,), I32)
                most[n] = size
        if self.gaps:
            options |= dict.fromkeys(m.LENGTHS, ends)
        if self.page:
            options["pages"] = TensorSpec((self.B, -(-self.shape.N // self.page)), self.table)
        return options | ({"max_lengths": tuple(most)} if self.packed else {})

    @property
    def data(self) -> dict[str, Any]:  # Any: options of `attention`
        """What is given beside q, k and v."""
        size, options = self.shape, dict[str, Any]()
        if self.bias is not None:
            full = zip("bhij", size.full("bhij"), strict=True)
            B, H, M, N = (n if x in self.bias else 1 for x, n in full)
            options["bias"] = laid((B, H, M, N), self.bias_dtype or self.dtype, self.bias_layout)
        if self.alibi:
            options["alibi"] = TensorSpec((self.H,), FLOAT) if self.alibi == "own" else True
        if self.sinks:
            options["sinks"] = TensorSpec((self.H,), FLOAT)
        if self.dtype in FLOATS_OF_8:
            names = (*SCALES, *[O_SCALE] * self.narrow)
            options |= dict.fromkeys(names, TensorSpec((1, 1, 1, 1), FLOAT))
        for name in m.LENGTHS:
            if dtype := getattr(self, name):
                options[name] = TensorSpec((self.B,), dtype)
        return options

    @property
    def problems(self) -> tuple[Lying, ...]:
        """The attention and its gradient, which 8 bits and the largest scores have none of."""
        graph = self.graph
        forward = facts_of(graph).once(Lying.for_libraries)
        assert forward is not None
        if self.dtype in FLOATS_OF_8 or forward.op.without_gradient:
            return (forward,)
        cotangents = [result_spec(graph, i) for i in graph.outputs]
        if self.do_layout:
            cotangents[0] = laid(cotangents[0].shape, self.dtype, self.do_layout)  # type: ignore[arg-type]  # four axes
        inputs = wanted_inputs(graph, self.wants and self.present(self.wants, graph))
        back = facts_of(backward(graph, inputs, cotangents)).once(Lying.for_libraries)
        assert back is not None
        return forward, back

    @staticmethod
    def present(wants: tuple[str, ...], graph: Graph) -> list[str]:
        return [i.name for i in graph.inputs if i.name in wants]

    def __str__(self) -> str:
        """What differs from the plainest attention."""
        given = ((x.name, getattr(self, x.name), x.default) for x in fields(Entry))
        texts = (f"{name}={NAMES.get(x, x)}" for name, x, default in given if x != default)
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
