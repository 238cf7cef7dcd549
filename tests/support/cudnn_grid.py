"""Graphs to ask cuDNN about: every boundary that its table of limits has, and drawn mixtures.

Sizes are those of real use, not of tests that compute: nothing here is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from attn_graph import masks as m
from attn_graph.ir.storage.scaling import FLOATS_OF_8
from attn_graph.spec import FLOATS
from attn_graph.testing.strategies import maybe
from tests.support.cudnn_entries import (
    ALIGNS,
    BRAIN,
    CAUSAL,
    FLOAT,
    HALF,
    HEADS,
    I32,
    I64,
    LAYOUTS,
    LENGTHS,
    MASKS,
    NARROW,
    PAIRS,
    QKV,
    RIGHT,
    UNEQUAL,
    WIDTHS,
    WINDOWS,
    Entry,
)
from tests.support.cudnn_packed_grid import decoded, packed, packed_mixtures, paged

DRAWN, DRAWN_PACKED, SEED = 160, 80, 0
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
    yield from largest()
    yield from quantised()
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


def largest() -> Iterator[Entry]:
    """With the largest score of each query."""
    own: dict[str, Any] = {"stats": ("lse", "max")}
    yield from (Entry(**own, D=x) for x in WIDTHS)
    yield from (Entry(**own, D=x, E=y) for x, y in PAIRS)
    yield from (Entry(**own, H=h, G=g) for h, g in HEADS)
    yield from (Entry(**own, mask=x, M=a, N=b) for a, b in UNEQUAL for x in MASKS)
    yield from (Entry(**own, layout=x) for x in ("bshd", "sbhd", "bs3hd", "gap 8", "one head"))
    yield from (Entry(**own, dtype=BRAIN, alibi=x, mask=CAUSAL) for x in (False, True))
    yield from (Entry(**own, soft_cap=30.0, D=x) for x in (64, 128))
    yield from (Entry(**own, bias="bhij"), Entry(**own, sinks=True), Entry(**own, kv_lengths=I32))
    yield Entry(**own, packed="qk", layout="bshd")


def quantised() -> Iterator[Entry]:
    """In 8 bits, o in 16 or in 8. Not asked: what cuDNN refuses of 16 bits alone, for a reason that
    we do not know to be theirs alone: sinks beside one query, and windows past the keys."""
    kinds = product(FLOATS_OF_8, FLOATS_OF_8, (False, True))
    yield from (Entry(dtype=x, v_dtype=y, narrow=z, stats=True) for x, y, z in kinds)
    for narrow in (False, True):
        own: dict[str, Any] = {"dtype": FLOATS_OF_8[0], "narrow": narrow, "H": 8, "G": 2}
        yield from (Entry(**own, D=x) for x in WIDTHS)
        yield from (Entry(**own, D=x, E=y) for x, y in PAIRS)
        yield from (Entry(**own, D=256, M=x, N=512) for x in (1, 2, 77))
        yield from (Entry(**own, D=256, mask=x, kv_lengths=I32) for x in MASKS[:3])
        yield Entry(**own, D=256, sinks=True)
        yield from (Entry(**{**own, "H": h, "G": g}) for h, g in HEADS)
        yield from (Entry(**own, mask=x, M=a, N=b) for a, b in UNEQUAL for x in MASKS[:3])
        yield from (Entry(**own, mask=x, M=100, N=300) for x in MASKS[3:])
        yield from (Entry(**own, mask=x, kv_lengths=I32) for x in MASKS)
        yield from (Entry(**own, mask=x, sinks=True) for x in (None, CAUSAL, RIGHT))
        yield from (Entry(**own, layout=x) for x in ("bshd", "sbhd", "bs3hd", "gap 8", "one head"))


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


def drawn(entries: SearchStrategy[Entry] | None = None, count: int = DRAWN) -> list[Entry]:
    """Mixtures by hypothesis, always the same ones."""
    found = []

    @seed(SEED)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        derandomize=False,  # the seed above counts
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(mixtures() if entries is None else entries)
    def collect(entry: Entry) -> None:
        found.append(entry)

    collect()
    return found


def grid() -> tuple[Entry, ...]:
    """All of it, each entry once."""
    packed_ones = drawn(packed_mixtures(), DRAWN_PACKED)
    return (*dict.fromkeys((*spelled(), *drawn(), *packed_ones)),)
