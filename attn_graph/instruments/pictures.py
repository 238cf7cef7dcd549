"""Pictures: masks as text, and masks, rooflines and timings as files, by matplotlib.

The figures take plain values and write a PNG, an SVG, or another format by the path's suffix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import fields, has

from attn_graph.errors import GraphError
from attn_graph.ir import ops
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.masks.joins import Mask, needs_of
from attn_graph.masks.places import Block
from attn_graph.printing import html
from attn_graph.printing.html import Html
from attn_graph.sparsity.tiles import check_block, check_tensors, classify_tiles
from attn_graph.spec import require_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "·▒█"  # nothing, some, all of a tile's places are kept
MOST_MARKS = 64  # characters across a picture, unless tiles are asked for
MOST_TILES = 2**22  # of a picture: a screen, or a page, has no more dots
MOST_POSITIONS = 2**20  # queries and keys of a mask's picture in a notebook
SIDE = 128  # queries and keys of a tile in a file, unless tiles are asked for
TALLEST = 6  # inches of all bars
DOTS = 200  # per inch of a PNG
LIGHT = ("#ffffff", "#90caf9", "#1565c0")  # a tile's colour: empty, mixed, full
DARK = ("#1e2129", "#3f6ea8", "#90caf9")
INK = "#c9d1d9"  # lines and text on dark pages
Tensors = Mapping[str, torch.Tensor]


def kinds(
    mask: Mask | None,
    M: int,
    N: int,
    tile: tuple[int, int],
    *,
    at: tuple[int, int] = (0, 0),
    data: Tensors | None = None,
) -> torch.Tensor:
    """0 for each empty tile, 1 for a mixed one, 2 for a full one; int8 [lines, columns].

    at: the batch entry and head. Without the tensors that decide, a tile is mixed unless it is
    empty, or full, for all their values. Raises GraphError for tensors that do not fit, an empty
    tile size, and more tiles than MOST_TILES.
    """
    tile, at = check_block("picture: tile", tile), check_block("picture: at", at, 0)
    if -(-M // tile[0]) * -(-N // tile[1]) > MOST_TILES:
        side = -(-max(M, N) // int(MOST_TILES**0.5))
        raise GraphError(
            f"picture: {M:,} x {N:,} places in tiles of {tile[0]} x {tile[1]} are more than "
            f"{MOST_TILES:,} tiles; pass tile=({side}, {side})"
        )
    b, h = at
    B, H = sizes_of_data(mask, data or {}, b + 1, h + 1)
    given = check_tensors(mask, (B, H, M, N), data or {})
    block = Block(range(b, b + 1), range(h, h + 1), range(M), H, M, N, given)
    return classify_tiles(mask, block, tile)


def sizes_of_data(mask: Mask | None, data: Tensors, B: int, H: int) -> tuple[int, int]:
    needs = needs_of(mask)
    sizes = {"b": B, "h": H}
    for name, tensor in data.items():
        axes = needs[name].axes if name in needs else ""
        for axis, n in zip(axes, tensor.shape, strict=False):
            if axis in sizes:
                sizes[axis] = max(sizes[axis], n)
    return sizes["b"], sizes["h"]


def picture(
    mask: Mask | None,
    M: int,
    N: int,
    *,
    tile: tuple[int, int] | None = None,
    at: tuple[int, int] = (0, 0),
    data: Tensors | None = None,
) -> str:
    """A mask as text: queries down, keys across, a mark for each tile.

    tile: queries and keys of a mark; by default the picture is 64 marks wide at most. at: the batch
    entry and head. data: tensors that the mask reads, by name. Raises GraphError as `kinds` does.
    """
    M, N = (require_size(f"picture: {name}", n) for name, n in (("M", M), ("N", N)))
    side = -(-max(M, N, 1) // MOST_MARKS)
    size = (side, side) if tile is None else tile
    lines = ["".join(MARKS[k] for k in line) for line in kinds(mask, M, N, size, at=at, data=data)]
    each = "place" if size == (1, 1) else f"tile of {size[0]} x {size[1]}"
    legend = f"{M:,} queries down, {N:,} keys across, a mark a {each}: {MARKS[2]} kept"
    legend += f", {MARKS[0]} not" if size == (1, 1) else f", {MARKS[1]} some, {MARKS[0]} none"
    return "\n".join([*lines, legend])


def picture_html(mask: Mask | None, M: int, N: int) -> html.Html:
    """The tiles of a mask as HTML, 64 along the longer side."""
    side = -(-max(M, N, 1) // MOST_MARKS)
    marks = kinds(mask, M, N, (side, side))
    each = "places" if side == 1 else f"tiles of {side} x {side}"
    legend = f"{M:,} queries down, {N:,} keys across; {each}: {count_kinds(marks)}"
    return html.tile_picture(marks.tolist(), legend)


def count_kinds(marks: torch.Tensor) -> str:
    """ "3 empty, 1 mixed, 2 full"."""
    return "{:,} empty, {:,} mixed, {:,} full".format(
        *(int((marks == kind).sum()) for kind in range(3))
    )


def telling_size(mask: Mask) -> int:
    """How many positions show each bound of a mask: four times the largest bound."""
    return max(MOST_MARKS, min(4 * max(whole_numbers(mask), default=0), MOST_POSITIONS))


def whole_numbers(value: object) -> Iterator[int]:
    """The integers in the fields of a mask and of its parts, without sign."""
    kind = type(value)
    if isinstance(value, int) and not isinstance(value, bool):
        yield abs(value)
    elif isinstance(value, tuple):
        for each in value:
            yield from whole_numbers(each)
    elif has(kind):
        yield from whole_numbers(tuple(getattr(value, x.name) for x in fields(kind) if x.init))


def figure(width: float, height: float, dark: bool = False) -> tuple[Figure, Axes]:
    """An empty figure, in inches, without a window. Raises ImportError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "pictures in files are drawn by matplotlib, which is not installed; "
            "pip install 'attn-graph[plot]'"
        ) from error
    inks: Any = {  # Any: matplotlib's type names every key
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with rc_context(inks) if dark else nullcontext():
        sheet = Figure(figsize=(width, height), layout="constrained")
        return sheet, sheet.subplots()


def write(sheet: Figure, path: str | Path, dark: bool = False) -> None:
    """Save a figure reproducibly; an SVG keeps its text as text."""
    from matplotlib import rc_context

    svg = Path(path).suffix.lower() == ".svg"
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "attn_graph"}):
        sheet.savefig(path, dpi=DOTS, transparent=dark, metadata={"Date": None} if svg else None)


def draw_mask(
    path: str | Path,
    mask: Mask | None,
    M: int,
    N: int,
    *,
    tile: tuple[int, int] | None = None,
    at: tuple[int, int] = (0, 0),
    data: Tensors | None = None,
    dark: bool = False,
) -> None:
    """Write a picture of a mask's tiles: white if empty, light if mixed, dark if full.

    tile: by default 64 along the longer side, but none larger than 128 x 128 within MOST_TILES.
    dark: for dark pages: full tiles are the lightest, the background is transparent. Other
    arguments: as of `picture`. Raises ImportError without matplotlib.
    """
    longer = max(M, N, 1)
    side = max(min(SIDE, -(-longer // MOST_MARKS)), -(-longer // int(MOST_TILES**0.5)))
    tile = tile or (side, side)
    marks = kinds(mask, M, N, tile, at=at, data=data)
    shades = DARK if dark else LIGHT
    colours = [[shades[k] for k in line] for line in marks.tolist()]
    sheet, axes = figure(5, 1.2 + min(max(4.2 * M / max(N, 1), 1), 8), dark)
    axes.imshow(to_rgb(colours), extent=(0, N, M, 0), interpolation="nearest", aspect="auto")
    each = "places" if tile == (1, 1) else f"tiles of {tile[0]} x {tile[1]}"
    axes.set_title(f"{mask}\n{count_kinds(marks)} {each}", fontsize=8, wrap=True)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    names = ("masked", None, "kept") if tile == (1, 1) else ("empty", "mixed", "full")
    add_legend(sheet, {name: x for name, x in zip(names, shades, strict=True) if name}, dark)
    write(sheet, path, dark)


def add_legend(sheet: Figure, colours: Mapping[str, str], dark: bool) -> None:
    """A square of each colour with its name, below all."""
    from matplotlib.patches import Patch

    ink = INK if dark else "black"
    squares = [Patch(facecolor=x, edgecolor=ink, label=name) for name, x in colours.items()]
    sheet.legend(
        handles=squares, loc="outside lower center", ncols=len(squares), fontsize=8,
        frameon=False, labelcolor=ink,
    )  # fmt: skip


def to_rgb(colours: list[list[str]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(bytes.fromhex(colour[1:])) for colour in line] for line in colours]


def draw_roofline(
    path: str | Path,
    points: Mapping[str, tuple[float, float]],
    *,
    peak: float,
    bandwidth: float,
    title: str = "",
) -> None:
    """Write a roofline plot: the rate a machine allows at each intensity, and rates reached.

    points: flop/B and flop/s by name. peak: flop/s. bandwidth: bytes/s. Raises ImportError without
    matplotlib.
    """
    sheet, axes = figure(6, 4)
    ridge = peak / bandwidth
    across = [x for x, _ in points.values() if x > 0]
    low, high = min([ridge, *across]) / 4, max([ridge, *across]) * 4
    axes.loglog([low, ridge, high], [low * bandwidth, peak, peak], color="black")
    for name, (intensity, rate) in points.items():
        axes.loglog([intensity], [rate], "o", label=name)
    axes.set_xlabel("flop / byte")
    axes.set_ylabel("flop / s")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    if points:
        axes.legend(fontsize=8)
    write(sheet, path)


def draw_bars(
    path: str | Path,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    unit: str = "ms",
    title: str = "",
    line: float | None = None,
    dark: bool = False,
) -> None:
    """Write a bar chart: a group of bars for each row, a bar with its figure for each name in it,
    at most as high as a screen.

    rows: each job with a figure in `unit` for each name; one may be absent, and a row without any
    is a heading. line: bars begin at this figure, on a logarithmic axis. dark: for dark pages.
    Raises ImportError without matplotlib.
    """
    sheet, axes = figure(7, 1 + min(0.5 * max(1, len(rows)), TALLEST), dark)
    names = list(dict.fromkeys(name for _, figures in rows for name in figures))
    height = 0.8 / max(1, len(names))
    for n, name in enumerate(names):
        places = [i + n * height for i, (_, figures) in enumerate(rows) if name in figures]
        ends = [figures[name] - (line or 0) for _, figures in rows if name in figures]
        bars = axes.barh(places, ends, height, left=line or 0, label=name)
        each = (figures[name] for _, figures in rows if name in figures)
        texts = [f"{x:.2f}" if x < 10 else f"{x:.3g}" for x in each]
        axes.bar_label(bars, texts, padding=3, fontsize=7, color=INK if dark else "black")
    middles = [i + 0.4 - height / 2 for i in range(len(rows))]
    axes.set_yticks(middles, [job for job, _ in rows], fontsize=8)
    for (_, figures), tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set_fontweight("normal" if figures else "bold")
    axes.set_ylim(len(rows), -height)
    axes.margins(x=0.1)  # for the figures at the ends
    if line is not None:
        axes.set_xscale("log", subs=[2, 5])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.axvline(line, color=INK if dark else "black", linewidth=1)
    axes.set_xlabel(unit)
    axes.set_title(title)
    if len(names) > 1:
        axes.legend(fontsize=8, frameon=False, labelcolor=INK if dark else "black")
    write(sheet, path, dark)


def picture_masks(graph: Graph) -> Iterator[Html]:
    """The tiles of each mask before any data, as HTML; equal ones once."""
    masks = dict.fromkeys(each for eqn in graph.eqns for each in masks_of(graph, eqn))
    yield from (picture_html(*each) for each in masks)


def masks_of(graph: Graph, eqn: Eqn) -> Iterator[tuple[Mask, int, int]]:
    """The mask of an equation, if it has one, with the numbers of queries and keys."""
    op, node = eqn.op, eqn.op.attention
    shapes = [x.shape for x in op.padded([graph.types[i] for i in eqn.args])[:2]]
    if node is not None and node.mask is not None:
        yield node.mask, shapes[0][2], shapes[1][2]
    elif isinstance(op, ops.Mask):
        yield op.mask, shapes[0][2], shapes[0][3]
