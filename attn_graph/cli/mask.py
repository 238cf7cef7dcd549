"""`attn-graph mask`: a picture of a mask, and how many of its tiles need not be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from attrs import asdict

import attn_graph as ag
from attn_graph.cli.flags import Sizes, mask_flags, mask_of, reads_sizes
from attn_graph.cli.output import (
    as_json,
    as_usage_errors,
    draw_to,
    epilog,
    out,
    show_json,
    show_text,
)
from attn_graph.instruments.pictures import draw_mask, picture


@click.command(
    short_help="A picture of a mask and its tiles.",
    epilog=epilog(
        'attn-graph mask 4096 4096 "Causal() & (Window(512) | Prefix(64))"',
        "attn-graph mask 4096 4096 --causal --window 512 --block 64x128 -o mask.svg",
    ),
)
@click.argument("queries", metavar="M", type=click.IntRange(1))
@click.argument("keys", metavar="N", type=click.IntRange(1))
@click.argument("expression", metavar="[MASK]", required=False)
@mask_flags
@click.option(
    "--block", metavar="QUERIESxKEYS", callback=reads_sizes("a tile", 1, 2),
    help="Size of a tile, by default 128x128; one number for both sides. Marks follow it.",
)  # fmt: skip
@out
@as_json
@as_usage_errors
def mask(
    queries: int,
    keys: int,
    expression: str | None,
    block: Sizes | None,
    out: Path | None,
    plain: bool,
    **flags: Any,  # Any: what click makes of each flag
) -> None:
    """A picture of a mask of M queries and N keys, with the numbers of its empty, mixed and full
    tiles: kernels skip empty tiles, and need no mask in full ones.

    MASK is a mask as you write it in Python: Causal(), Window(64), Prefix(4), KeyLengths(),
    QueryLengths(), SameSegment(), Keep(), joined with &, | and ~. Flags are joined to it with &.
    Places decided by lengths and segments are shown as mixed.
    """
    joined = mask_of(flags, expression)
    whole = None if joined is None else joined.aligned(flags["align"])
    rows, columns = ((block or (128,)) * 2)[:2]
    tile = (rows, columns) if block else None  # of a picture
    tiles = ag.tiles(whole, queries, keys, block=(rows, columns))
    share = (tiles.mixed + tiles.full) / tiles.total if tiles.total else 0.0
    if out is not None:
        draw_to(out, lambda: draw_mask(out, whole, queries, keys, tile=tile))
    if plain:
        content = {"mask": None if whole is None else str(whole), "queries": queries, "keys": keys}
        numbers = asdict(tiles) | {"total": tiles.total}
        show_json(content | {"tiles": numbers, "computed": share})
        return
    if out is None:
        show_text(picture(whole, queries, keys, tile=tile), wraps=False)
    text = f"{tiles}; {100 * share:.3g} % to compute"
    show_text(f"{'no mask' if whole is None else whole}: {text}", wraps=False)
