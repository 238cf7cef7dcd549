"""Graphs on packed tensors, on pages and of single queries to ask cuDNN about."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from attn_graph import masks as m
from attn_graph.spec import FLOATS
from tests.support.cudnn_entries import (
    BRAIN,
    CAUSAL,
    HALF,
    HEADS,
    I32,
    I64,
    MASKS,
    PAIRS,
    QKV,
    RIGHT,
    UNEQUAL,
    Entry,
)

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
    one: dict[str, Any] = {**ROWS, "B": 1, "M": 1, "N": 64, "total": 48}
    yield from (Entry(**{**one, "packed": x, "B": y}) for x in ("q", "k", "qk") for y in (1, 2))
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
    for x, in_order, D in product(("q", "k", "qk"), (False, True), (64, 72)):
        own: dict[str, Any] = {**TRAINED, "packed": x, "D": D, "deterministic": in_order}
        yield Entry(**{**own, "G": 2})
        yield Entry(**own, alibi=True)
        yield Entry(**{**own, "G": 4}, bias="hij")
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


@st.composite
def packed_mixtures(draw: DrawFn) -> Entry:
    """All of that at once, each mostly within its limits. Drawn from short lists, as `mixtures`."""

    def one_of(*values: Any) -> Any:  # what a field of Entry holds
        return draw(st.sampled_from(values))

    G, page = one_of(1, 2, 3, 4), one_of(0, 0, 16, 64, 128)
    sides = one_of("q", "") if page else one_of("q", "k", "qk", "qk")
    window = m.Window(one_of(0, 1, 16, 79), one_of(None, 0, 3), one_of("top_left", "bottom_right"))
    alibi = one_of(*[False] * 6, True)
    return Entry(
        B=one_of(1, 2, 5),
        H=G * one_of(1, 2, 4),
        G=G,
        M=one_of(64, 1, 2, 100, 256, 333),
        N=one_of(128, 384, 4096) if page else one_of(64, 1, 128, 192, 320, 448, 1000),
        D=one_of(64, 8, 40, 72, 128, 192, 256),
        E=one_of(None, None, None, 64, 80, 128),
        dtype=one_of(HALF, BRAIN),
        layout=one_of("bshd", "bshd", "bs3hd"),
        k_layout=one_of(None, "bshd", "gap 8"),
        mask=one_of(None, CAUSAL, RIGHT, window, window),
        kv_lengths=I32 if page else None,
        packed=sides,
        total=one_of(None, 100, 1000),
        gaps="k" in sides and "q" in sides and one_of(False, True),
        page=page,
        bias=one_of(*[None] * 6, "hij", "j"),
        alibi=alibi,
        align="top_left" if alibi else one_of("top_left", "bottom_right"),
        sinks=one_of(False, False, False, True),
        wants=one_of(None, QKV),
        deterministic=one_of(False, False, True),
    )
