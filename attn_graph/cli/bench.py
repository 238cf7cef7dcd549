"""`attn-graph bench`: times a graph by every backend of this machine, beside its roofline."""

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
from attn_graph.cli.output import (
    INTERRUPTED,
    as_json,
    as_usage_errors,
    draw_to,
    epilog,
    exit_no_if,
    make_table,
    out,
    show_json,
    show_text,
)
from attn_graph.cli.timings import Bench, measure_graph
from attn_graph.errors import refusal_lines
from attn_graph.instruments.pictures import draw_bars, draw_roofline
from attn_graph.machine.sizes import format_bytes
from attn_graph.planner.cost import format_scaled
from attn_graph.spec import NAMES

Plot = Literal["roofline", "bars"]


def rate(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """A click callback for a rate. Raises BadParameter unless it is above 0 and finite."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value} is not a rate: it must be above 0 and finite")
    return value


def check_memory(graph: ag.Graph) -> None:
    """Raise UsageError if the inputs alone exceed the machine's memory."""
    need = sum(i.spec.type.bytes for i in graph.inputs)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > there:
        raise click.UsageError(
            f"the inputs are {format_bytes(need)}, and this machine has {format_bytes(there)}"
        )


@click.command(
    short_help="Time a graph by every backend here.",
    epilog=epilog(
        "attn-graph bench --q 1,8,2048,64 --causal --window 255 --seconds 2 -o bench.svg"
    ),
)
@graph_flags
@names
@deterministic
@click.option("--cpu", is_flag=True, help="Use the CPU even if there is a GPU.")
@click.option("--forward-only", is_flag=True, help="Without the gradient.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=2.0, show_default=True,
    help="Seconds to measure, all runs together, without warm-up.",
)  # fmt: skip
@click.option(
    "--peak", type=float, callback=rate, help="flop/s of this machine, if unknown to the library."
)
@click.option(
    "--bandwidth",
    type=float,
    callback=rate,
    help="bytes/s of its memory, if unknown to the library.",
)
@out
@click.option(
    "--plot", type=click.Choice(["roofline", "bars"]),
    help="The plot; by default the roofline, or bars if the machine's rates are unknown.",
)  # fmt: skip
@as_json
@as_usage_errors
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
    """Time a graph on this machine by each backend, forward and backward, on random tensors:
    medians of interleaved runs. Each time stands with its rate, by the graph's least flops, and
    with its fraction of the roofline.

    Describe the graph as for explain. If data decide the mask, lengths are full, all is one
    segment, and half of all flags are set. Exits with 1 if no backend supports the graph. Ctrl-C
    shows the figures so far.
    """
    graph = graph_of(file, flags)
    check_memory(graph)
    place = ag.Target.of("cpu") if cpu else ag.Target.here()
    dtype = NAMES[graph.inputs[0].spec.dtype] if graph.inputs else "f32"
    peaks = ((dtype, peak),) if peak else place.peaks
    rates = evolve(place, peaks=peaks, bandwidth=bandwidth or place.bandwidth)
    roofline = rates.peak(dtype) and rates.bandwidth
    if out and plot == "roofline" and not roofline:
        raise click.UsageError(
            f"the rates of {place} are not known: give --peak and --bandwidth, or --plot bars"
        )
    with progress() as tell:
        results = measure_graph(
            graph,
            place,
            split_names(backends) or [backend.name for backend in ag.extend.BACKENDS],
            rates=rates,
            deterministic=deterministic,
            backward=not forward_only,
            seconds=seconds,
            progress=tell,
        )
    if plain:
        show_json(results.to_dict())
    else:
        show_text(*bench_screen(results), wraps=False)
    if out and results.figures:
        draw_to(out, draw_figures(out, results, dtype, bars=plot == "bars" or not roofline))
    if results.interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    exit_no_if(not results.figures)


@contextmanager
def progress() -> Iterator[Callable[[str], None] | None]:
    """A context with a function to show progress; None without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield status.update


def bench_screen(results: Bench) -> Iterator[RenderableType]:
    yield Text(str(results.graph))
    yield Text(f"target: {results.target}, {torch.get_num_threads()} threads")
    rows: list[tuple[str, ...]] = []
    for each in results.figures:
        took, rate = format_scaled(each.seconds, "s"), format_scaled(each.rate, "flop/s")
        achieved = "not known" if each.achieved is None else f"{100 * each.achieved:.3g} %"
        least = min(x.seconds for x in results.figures if x.pass_ == each.pass_)
        times = f"{each.seconds / least:.2f}"
        rows.append((each.backend, each.pass_, took, rate, achieved, times))
    if rows:
        columns = ("backend", "pass", "time", "rate", "of the roofline", "times the fastest")
        yield make_table(columns, rows, columns[2:])
    for pass_, begin in (("forward", ""), ("backward", "backward: ")):
        refused = [(x.backend, x.reasons) for x in results.refusals if x.pass_ == pass_]
        yield from (Text(f"{begin}{line}", "yellow") for line in refusal_lines(refused))
    if results.interrupted:
        until = (
            "figures are of the runs until then" if results.figures else "nothing was measured yet"
        )
        yield Text(f"interrupted: {until}", "yellow")


def draw_figures(path: Path, results: Bench, dtype: str, *, bars: bool) -> Callable[[], None]:
    """A function to draw the figures to a path: a roofline, or bars without known rates."""
    title, peak, bandwidth = (
        str(results.target),
        results.target.peak(dtype),
        results.target.bandwidth,
    )
    if bars or peak is None or bandwidth is None:
        rows = [
            (pass_, {f.backend: 1e3 * f.seconds for f in results.figures if f.pass_ == pass_})
            for pass_ in dict.fromkeys(f.pass_ for f in results.figures)
        ]
        return lambda: draw_bars(path, rows, title=title)
    points = {f"{f.backend} {f.pass_}": (f.work.intensity, f.rate) for f in results.figures}
    return lambda: draw_roofline(path, points, peak=peak, bandwidth=bandwidth, title=title)
