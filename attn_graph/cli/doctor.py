"""`attn-graph doctor`: a machine's devices, libraries, backends and faults."""

from __future__ import annotations

from collections.abc import Iterator

import click
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import attn_graph as ag
from attn_graph.cli import output
from attn_graph.cli.cache import files_text
from attn_graph.cli.diagnosis import Diagnosis, Surroundings, diagnose
from attn_graph.lowering.cudnn.offline import COMPILERS
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import CUDNN, PACKAGES, SYSTEM_CUDNN

A_GPU = "a GPU"  # any of the table's, where they are alike


@click.command(
    short_help="Show devices, libraries, backends, faults.",
    epilog=output.epilog("attn-graph doctor", "attn-graph doctor --json"),
)
@output.as_json
def doctor(plain: bool) -> None:
    """Show devices, libraries and versions; the backends for this machine and for known GPUs, with
    the reasons against the others; files on disk, with outcomes of self-checks; set variables and
    switches; and faults: incompatible or missing libraries, and damaged files. Exits with 1 if
    anything is broken.
    """
    diagnosis = diagnose(Surroundings.here(), ag.extend.default_store())
    if plain:
        output.show_json(diagnosis.to_dict())
    else:
        output.show_text(*doctor_screen(diagnosis))
    output.exit_no_if(bool(diagnosis.problems))


def doctor_screen(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """All sections of a diagnosis, the worst last, next to the prompt."""
    machine = diagnosis.machine
    yield Text(f"attn_graph {ag.__version__}, Python {machine.python}, {machine.system}")
    yield from section("Devices", pair_grid(device_rows(machine)))
    yield from section("Libraries", pair_grid(library_rows(machine)))
    yield from section(
        "Backends, for a plain attention, forward and backward", backends_table(diagnosis)
    )
    yield from section("Why not", *refusal_items(diagnosis))
    yield from section("Plans", pair_grid(plan_rows(diagnosis)))
    if diagnosis.checks:
        yield from section("Self-checks", pair_grid(iter(diagnosis.checks)))
    yield from section("Good to know", *map(item, diagnosis.notes))
    yield from section("Broken", *(item(text, "bold red") for text in diagnosis.problems))
    yield Text("\nsomething is broken" if diagnosis.problems else "\nnothing is broken", "bold")


def section(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    """A title and its parts, indented; nothing without parts."""
    if parts:
        yield Text(f"\n{title}", "bold")
        yield from (Padding(part, (0, 0, 0, 2), expand=False) for part in parts)


def item(text: str, style: str = "") -> Table:
    """An item of a list; its further lines begin under its first word."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row("-", Text(text, style))
    return grid


def pair_grid(rows: Iterator[tuple[str, str]]) -> Table:
    """Rows of a name and a text, in two columns."""
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def device_rows(machine: Surroundings) -> Iterator[tuple[str, str]]:
    """The GPUs and the CPU."""
    built = f"built for CUDA {machine.cuda}" if machine.cuda else "built without CUDA"
    if not machine.gpus:
        yield "GPU", f"none for this PyTorch, {built}"
    yield from (("GPU", gpu) for gpu in machine.gpus)
    threads, processors = machine.threads
    native = " and ".join(machine.cpu.native) or "none"
    yield "CPU", f"{machine.processor}; half precision in hardware: {native}"
    yield "", f"{threads} threads of PyTorch's on {processors} logical processors"


def library_rows(machine: Surroundings) -> Iterator[tuple[str, str]]:
    """The libraries and their versions; of cuDNN's packages only one is needed."""
    here = dict(machine.cpu.libraries)
    for name in PACKAGES:
        yield name, here.get(name, "not installed")
    for name in CUDNN:
        if name in here:
            yield name, here[name]
    if SYSTEM_CUDNN in here:
        yield "cuDNN itself", f"{here[SYSTEM_CUDNN]}, which PyTorch loads; pip installed none"
    elif not here.keys() & set(CUDNN):
        yield "cuDNN itself", "not installed"


def backends_table(diagnosis: Diagnosis) -> Table:
    """The backends of each target; targets with equal answers share a column."""
    own = [target.name for target in diagnosis.machine.targets]
    columns: dict[tuple[bool, ...], list[str]] = {}
    for name in own:
        takes = tuple(not v.reasons for v in diagnosis.verdicts if v.target == name)
        columns.setdefault(takes, []).append(name)
    yes, no = Text("yes", "green"), Text("no", "yellow")
    answers = [[yes if takes else no for takes in column] for column in columns]
    names = [backend.name for backend in ag.extend.BACKENDS]
    headers = [", ".join(together) for together in columns.values()]
    return output.make_table(
        ("", *headers), [(n, *row) for n, *row in zip(names, *answers, strict=True)]
    )


def refusal_items(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Every backend's reasons, once for all targets with equal reasons."""
    targets_of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    full = {target.name: str(target) for target in diagnosis.machine.targets}
    for verdict in diagnosis.verdicts:
        reasons = verdict.reasons
        if verdict.target != "cpu":  # equal for all GPUs, without a name
            reasons = tuple(why.replace(full[verdict.target], A_GPU) for why in reasons)
        if reasons:
            targets_of.setdefault((verdict.backend, reasons), []).append(verdict.target)
    for (backend, reasons), targets in targets_of.items():
        yield Text(f"{backend} on {', '.join(targets)} can't:")
        yield from (Padding(item(why), (0, 0, 0, 2), expand=False) for why in reasons)


def plan_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    machine, store = diagnosis.machine, diagnosis.kept
    what = "cuDNN's, for other GPUs"
    if machine.driver:
        yield what, "by NVIDIA's driver here"
    elif machine.compiler:
        yield what, f"by a stand-in for the driver, compiled by {machine.compiler}"
    else:
        yield what, f"need a C compiler: {', '.join(COMPILERS)}"
    yield (
        "kept on disk",
        f"{files_text(store.files)}, {format_bytes(store.bytes)}, in {store.folder}",
    )
    yield from machine.variables
