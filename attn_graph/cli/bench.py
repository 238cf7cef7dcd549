"""`attn-graph bench`: a graph by every backend of this machine, beside its roofline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

import click
import torch
from attrs import evolve
from rich.console import Console, RenderableType
from rich.text import Text

import attn_graph as ag
from attn_graph.cli.explain import deterministic, names, split_names
from attn_graph.cli.flags import graph_flags, graph_of
from attn_graph.cli.measured import Bench, Figure, measure_graph
from attn_graph.cli.words import (
    CODES,
    INTERRUPTED,
    answering,
    as_json,
    draw_to,
    example,
    no,
    out,
    show_json,
    show_text,
    table,
)
from attn_graph.errors import format_refusal
from attn_graph.machine.sizes import format_bytes
from attn_graph.masks.pictures import draw_bars, draw_roofline
from attn_graph.planner.cost import format_scaled
from attn_graph.spec import NAMES

Plot = Literal["roofline", "bars"]


def rate(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """A rate that can be divided by. Raises BadParameter for any other."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value} is no rate: it must be above 0 and finite")
    return value


def check_memory(graph: ag.Graph) -> None:
    """Raises UsageError where the inputs alone are more than the machine holds."""
    need = sum(i.spec.type.bytes for i in graph.inputs)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > there:
        raise click.UsageError(
            f"the inputs are {format_bytes(need)}, and this machine has {format_bytes(there)}"
        )


@click.command(
    short_help="Time a graph by every backend here.",
    epilog=CODES
    + "\n\n"
    + example("attn-graph bench --q 1,8,2048,64 --causal --window 255 --seconds 2 -o bench.svg"),
)
@graph_flags
@names
@deterministic
@click.option("--cpu", is_flag=True, help="On the CPU though there is a GPU.")
@click.option("--forward-only", is_flag=True, help="Without the gradient.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=2.0, show_default=True,
    help="About how long to measure, all runs together, warm-up not counted.",
)  # fmt: skip
@click.option(
    "--peak", type=float, callback=rate, help="flop/s of this machine, where it does not tell them."
)
@click.option(
    "--bandwidth",
    type=float,
    callback=rate,
    help="bytes/s of its memory, where it does not tell them.",
)
@out
@click.option(
    "--plot", type=click.Choice(["roofline", "bars"]),
    help="What to draw; by default the roofline, and bars where the machine's rates are unknown.",
)  # fmt: skip
@as_json
@answering
def bench(
    file: TextIO | None,
    backends: str | None,
    deterministic: bool,
    cpu: bool,
    forward_only: bool,
    seconds: float,
    peak: float | None,
    bandwidth: float | None,
    out: Path | None,
    plot: Plot | None,
    plain: bool,
    **flags: Any,  # Any: what click makes of each flag
) -> None:
    """How long a graph takes on this machine by each backend, forward and backward, on random
    tensors: medians of runs that take turns. Beside them what the graph's least flops make of
    that, and which fraction of the least time the machine allows, its roofline.

    The graph is said as explain takes it. Where data decide what a mask keeps, lengths are full,
    all is one segment, and half of all flags are set. Exits with 1 where no backend takes it.
    Ctrl-C shows what was measured until then.
    """
    graph = graph_of(file, flags)
    check_memory(graph)
    place = ag.Target.of("cpu") if cpu else ag.Target.here()
    dtype = graph_dtype(graph)
    rates = with_rates(place, dtype, peak, bandwidth)
    roofline = rates.peak(dtype) and rates.bandwidth
    if out and plot == "roofline" and not roofline:
        raise click.UsageError(f"{place} tells no rates: --peak and --bandwidth do, or --plot bars")
    with progress() as tell:
        found = measure_graph(
            graph,
            place,
            split_names(backends) or [backend.name for backend in ag.BACKENDS],
            rates=rates,
            deterministic=deterministic,
            backward=not forward_only,
            seconds=seconds,
            progress=tell,
        )
    if plain:
        show_json(found.to_dict())
    else:
        show_text(*bench_screen(found), wraps=False)
    if out and found.figures:
        draw_to(out, draw_figures(out, found, dtype, bars=plot == "bars" or not roofline))
    if found.interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    no(not found.figures)


def graph_dtype(graph: ag.Graph) -> str:
    return NAMES[graph.inputs[0].spec.dtype] if graph.inputs else "f32"


def with_rates(
    place: ag.Target, dtype: str, peak: float | None, bandwidth: float | None
) -> ag.Target:
    """The machine with the rates that are given, in place of its own."""
    peaks = ((dtype, peak),) if peak else place.peaks
    return evolve(place, peaks=peaks, bandwidth=bandwidth or place.bandwidth)


@contextmanager
def progress() -> Iterator[Callable[[str], None] | None]:
    """A line that says what goes on, where somebody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield status.update


def bench_screen(found: Bench) -> Iterator[RenderableType]:
    yield Text(str(found.graph))
    yield Text(f"target: {found.target}, {torch.get_num_threads()} threads")
    if found.figures:
        columns = ("backend", "pass", "time", "rate", "of the roofline", "times the fastest")
        yield table(columns, map(figure_row, found.figures, slower(found)), columns[2:])
    for each in found.refusals:
        yield Text(format_refusal(f"{each.backend}, {each.pass_}", each.reasons), "yellow")
    if found.interrupted:
        until = (
            "figures are of the runs until then" if found.figures else "nothing was measured yet"
        )
        yield Text(f"interrupted: {until}", "yellow")


def slower(found: Bench) -> Iterator[float]:
    """How many times the fastest of its pass each figure is."""
    for each in found.figures:
        yield each.seconds / min(f.seconds for f in found.figures if f.pass_ == each.pass_)


def figure_row(found: Figure, times: float) -> tuple[str, ...]:
    achieved = "not known" if found.achieved is None else f"{100 * found.achieved:.3g} %"
    took, rate = format_scaled(found.seconds, "s"), format_scaled(found.rate, "flop/s")
    return found.backend, found.pass_, took, rate, achieved, f"{times:.2f}"


def draw_figures(path: Path, found: Bench, dtype: str, *, bars: bool) -> Callable[[], None]:
    """What draws the figures."""
    title, peak, bandwidth = str(found.target), found.target.peak(dtype), found.target.bandwidth
    if bars or peak is None or bandwidth is None:
        rows = [
            (pass_, {f.backend: 1e3 * f.seconds for f in found.figures if f.pass_ == pass_})
            for pass_ in dict.fromkeys(f.pass_ for f in found.figures)
        ]
        return lambda: draw_bars(path, rows, title=title)
    points = {f"{f.backend} {f.pass_}": (f.work.intensity, f.rate) for f in found.figures}
    return lambda: draw_roofline(path, points, peak=peak, bandwidth=bandwidth, title=title)
