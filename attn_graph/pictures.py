"""Pictures: masks as text, and masks, rooflines and timings as files, by matplotlib.

The figures take plain values and write PNG, SVG or what else the path's suffix says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attn_graph.counts import checked, classify_tiles
from attn_graph.errors import GraphError
from attn_graph.keys import Block
from attn_graph.masks import Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "·▒█"  # nothing, some, all of a tile's places are kept
MOST_MARKS = 64  # characters across a picture, unless tiles are asked for
MOST_KINDS = 2**22  # tiles of a picture: more is more than a screen, or a page, has dots
SIDE = 128  # queries and keys of a tile in a file, unless tiles are asked for
DOTS = 200  # per inch of a PNG
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
    """For each tile of batch entry and head `at`, 0: empty, 1: mixed, 2: full [lines, columns].

    Where tensors that decide are not given, a tile is mixed unless it is one for whatever they
    hold. Raises GraphError for tensors that do not fit, and a tile without places.
    """
    if min(tile) < 1 or min(at) < 0:
        raise GraphError(f"picture: tile {tile} must be at least (1, 1), and at {at} (0, 0)")
    if -(-M // tile[0]) * -(-N // tile[1]) > MOST_KINDS:
        side = -(-max(M, N) // int(MOST_KINDS**0.5))
        raise GraphError(
            f"picture: {M} x {N} places are too many tiles of {tile[0]} x {tile[1]}; "
            f"the most are {MOST_KINDS}, as of {side} x {side}"
        )
    b, h = at
    B, H = entries(mask, data or {}, b + 1, h + 1)
    given = checked(mask, (B, H, M, N), data or {})
    block = Block(range(b, b + 1), range(h, h + 1), range(M), H, M, N, given)
    return classify_tiles(mask, block, tile)


def entries(mask: Mask | None, data: Tensors, B: int, H: int) -> tuple[int, int]:
    """How many batch entries and heads there are by the tensors, at least B and H."""
    needs = mask.needs if mask else {}
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
    """Which places a mask keeps, as text: queries down, keys across, a mark a tile.

    tile: queries and keys a mark, by default as few as make a picture of 64 marks; (1, 1) where
    that is each place. at: the batch entry and the head. data: tensors that the mask reads, by
    name. Raises GraphError as `kinds` does.
    """
    side = -(-max(M, N, 1) // MOST_MARKS)
    size = (side, side) if tile is None else tile
    lines = ["".join(MARKS[k] for k in line) for line in kinds(mask, M, N, size, at=at, data=data)]
    each = "place" if size == (1, 1) else f"tile of {size[0]} x {size[1]}"
    legend = f"{M} queries down, {N} keys across, a mark a {each}: {MARKS[2]} kept"
    legend += f", {MARKS[0]} not" if size == (1, 1) else f", {MARKS[1]} some, {MARKS[0]} none"
    return "\n".join([*lines, legend])


def figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of so many inches, that no window shows. Raises ImportError."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "pictures in files are drawn by matplotlib, which is not installed; "
            "pip install 'attn-graph[plot]'"
        ) from error
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots()


def draw_mask(
    path: str | Path,
    mask: Mask | None,
    M: int,
    N: int,
    *,
    tile: tuple[int, int] | None = None,
    at: tuple[int, int] = (0, 0),
    data: Tensors | None = None,
) -> None:
    """Write a picture of a mask's tiles: white is empty, light is mixed, dark is full.

    tile: by default 128 x 128, or as large as leaves no more than can be drawn. The other
    arguments are those of `picture`. Raises ImportError without matplotlib.
    """
    made, axes = figure(5, 5.4)
    side = max(SIDE, -(-max(M, N) // int(MOST_KINDS**0.5)))
    tile = tile or (side, side)
    found = kinds(mask, M, N, tile, at=at, data=data)
    axes.imshow(
        found.tolist(), cmap="Blues", vmin=0, vmax=2, extent=(0, N, M, 0), interpolation="nearest"
    )
    counts = [int((found == kind).sum()) for kind in range(3)]
    told = "{} empty, {} mixed, {} full".format(*counts)
    axes.set_title(f"{mask}\n{told} tiles of {tile[0]} x {tile[1]}", fontsize=8, wrap=True)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    made.savefig(path, dpi=DOTS)


def draw_roofline(
    path: str | Path,
    points: Mapping[str, tuple[float, float]],
    *,
    peak: float,
    bandwidth: float,
    title: str = "",
) -> None:
    """Write a roofline plot: the rate that a machine allows at each intensity, and what was done.

    points: flop/B and flop/s by name. peak: flop/s. bandwidth: bytes/s. Raises ImportError without
    matplotlib.
    """
    made, axes = figure(6, 4)
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
    made.savefig(path, dpi=DOTS)


def draw_bars(
    path: str | Path,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    unit: str = "ms",
    title: str = "",
) -> None:
    """Write a bar chart: a group of bars for each row, a bar for each name in it, most on top.

    rows: what was run, and a figure for each that ran it, in `unit`; one may be absent. Raises
    ImportError without matplotlib.
    """
    made, axes = figure(7, 1 + 0.5 * max(1, len(rows)))
    names = list(dict.fromkeys(name for _, figures in rows for name in figures))
    height = 0.8 / max(1, len(names))
    for n, name in enumerate(names):
        places = [i + n * height for i, (_, figures) in enumerate(rows) if name in figures]
        axes.barh(
            places, [figures[name] for _, figures in rows if name in figures], height, label=name
        )
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(rows))], [job for job, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title)
    if names:
        axes.legend(fontsize=8)
    made.savefig(path, dpi=DOTS)
