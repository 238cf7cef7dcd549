"""`attn-graph mask`: a picture of a mask, and how many of its tiles need not be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import attn_graph as ag
from attn_graph.cli.flags import mask_flags, mask_of, reads
from attn_graph.cli.words import CODES, answering, drawn, example, out, show
from attn_graph.pictures import draw_mask, picture

BLOCK = (128, 128)


@click.command(
    short_help="A picture of a mask and its tiles.",
    epilog=CODES
    + "\n\n"
    + example(
        'attn-graph mask 4096 4096 "Causal() & (Window(512) | Prefix(64))"',
        "attn-graph mask 4096 4096 --causal --window 512 --block 64x128 -o mask.svg",
    ),
)
@click.argument("queries", metavar="M", type=click.IntRange(1))
@click.argument("keys", metavar="N", type=click.IntRange(1))
@click.argument("expression", metavar="[MASK]", required=False)
@mask_flags
@click.option(
    "--block", metavar="QUERIESxKEYS", callback=reads(2, "a tile"),
    help="Of a tile, by default 128x128; if given, also of each mark of the text.",
)  # fmt: skip
@out
@answering
def mask(
    queries: int,
    keys: int,
    expression: str | None,
    block: tuple[int, int] | None,
    out: Path | None,
    **flags: Any,  # Any: what click makes of each flag
) -> None:
    """A picture of a mask of M queries and N keys, and how many of its tiles are empty, mixed and
    full: kernels skip the empty ones, and need no mask in the full ones.

    MASK is as the library prints masks, and as one writes them: Causal(), Window(64), Prefix(4),
    KeyLengths(), QueryLengths(), SameSegment(), Keep(), joined with &, | and ~. Flags are joined
    to it with &. What lengths and segments decide is shown as mixed.
    """
    found = mask_of(flags, expression)
    whole = found.aligned(flags["align"]) if found else None
    counted = ag.tiles(whole, queries, keys, block=block or BLOCK)
    if out is None:
        show(picture(whole, queries, keys, tile=block), wraps=False)
    else:
        drawn(out, lambda: draw_mask(out, whole, queries, keys, tile=block))
    show(f"{whole or 'no mask'}: {counted}{shares(counted)}", wraps=False)


def shares(found: ag.Tiles) -> str:
    """How much of the score matrix is left to compute."""
    left = found.mixed + found.full
    return f"; {100 * left / found.total:.3g} % to compute" if found.total else ""
