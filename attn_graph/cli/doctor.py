"""`attn-graph doctor`: what is here, what runs, why the rest does not, and what is broken."""

from __future__ import annotations

from collections.abc import Iterator

import click
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import attn_graph as ag
from attn_graph.cli.cache import count_files
from attn_graph.cli.diagnosis import Diagnosis, Surroundings, Verdict, diagnose
from attn_graph.cli.words import CODES, as_json, example, no, show_json, show_text, table
from attn_graph.lowering.cudnn.offline import COMPILERS
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import CUDNN, PACKAGES, SYSTEM_CUDNN

A_GPU = "a GPU"  # any of the table's, where they are alike


@click.command(
    short_help="What is here, what runs, what is broken.",
    epilog=CODES + "\n\n" + example("attn-graph doctor", "attn-graph doctor --json"),
)
@as_json
def doctor(plain: bool) -> None:
    """Devices, libraries and versions; which backends work here and would on the GPUs that the
    library knows, with the reasons of those that do not; what is kept on disk; what is set; and
    what is broken: libraries that are known not to work together, or that are lost, and damaged
    files. Exits with 1 where something is broken.
    """
    found = diagnose(Surroundings.here(), ag.default_store())
    if plain:
        show_json(found.to_dict())
    else:
        show_text(*doctor_screen(found))
    no(bool(found.problems))


def doctor_screen(found: Diagnosis) -> Iterator[RenderableType]:
    """All of it, the worst last, where eyes are."""
    machine = found.machine
    yield Text(f"attn_graph {ag.__version__}, Python {machine.python}, {machine.system}")
    yield from section("Devices", pairs(devices_section(machine)))
    yield from section("Libraries", pairs(libraries(machine)))
    yield from section(
        "Backends, for a plain attention, forward and backward", takers_section(found)
    )
    yield from section("Why not", *refusals(found))
    yield from section("Plans", pairs(plans(found)))
    yield from section("Good to know", *map(item, found.notes))
    yield from section("Broken", *(item(told, "bold red") for told in found.problems))
    yield Text("\nsomething is broken" if found.problems else "\nnothing is broken", "bold")


def section(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    """A title and what stands under it, where there is anything."""
    if parts:
        yield Text(f"\n{title}", "bold")
        yield from (Padding(part, (0, 0, 0, 2), expand=False) for part in parts)


def item(told: str, style: str = "") -> Table:
    """One of a list; its further lines stand under its first word."""
    made = Table.grid(padding=(0, 1))
    made.add_row("-", Text(told, style))
    return made


def pairs(rows: Iterator[tuple[str, str]]) -> Table:
    made = Table.grid(padding=(0, 2))
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def devices_section(machine: Surroundings) -> Iterator[tuple[str, str]]:
    built = f"built for CUDA {machine.cuda}" if machine.cuda else "built without CUDA"
    if not machine.gpus:
        yield "GPU", f"none that PyTorch can use, which is {built}"
    yield from (("GPU", gpu) for gpu in machine.gpus)
    threads, processors = machine.threads
    native = " and ".join(machine.cpu.native) or "none"
    yield "CPU", f"{machine.processor}; half precision in hardware: {native}"
    yield "", f"{threads} threads of PyTorch's on {processors} logical processors"


def libraries(machine: Surroundings) -> Iterator[tuple[str, str]]:
    """Those that are here; of cuDNN's many packages only one is ever needed."""
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


def takers_section(found: Diagnosis) -> Table:
    """Backends down, targets across, those together of which the same is true."""
    own = [target.name for target in found.machine.targets]
    columns: dict[tuple[bool, ...], list[str]] = {}
    for name in own:
        takes = tuple(not v.reasons for v in found.verdicts if v.target == name)
        columns.setdefault(takes, []).append(name)
    answers = [[mark(takes) for takes in column] for column in columns]
    names = [backend.name for backend in ag.BACKENDS]
    headers = [", ".join(together) for together in columns.values()]
    return table(("", *headers), [(n, *row) for n, *row in zip(names, *answers, strict=True)])


def mark(takes: bool) -> Text:
    return Text("yes", "green") if takes else Text("no", "yellow")


def refusals(found: Diagnosis) -> Iterator[RenderableType]:
    """Every backend's reasons, once for all targets of which they are the same."""
    told: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    full = {target.name: str(target) for target in found.machine.targets}
    for verdict in found.verdicts:
        if verdict.reasons:
            told.setdefault((verdict.backend, of_any(verdict, full)), []).append(verdict.target)
    for (backend, reasons), targets in told.items():
        yield Text(f"{backend} on {', '.join(targets)}: no, because it")
        yield from (Padding(item(why), (0, 0, 0, 2), expand=False) for why in reasons)


def of_any(verdict: Verdict, full: dict[str, str]) -> tuple[str, ...]:
    """The reasons, which may name the target, as they are for all GPUs alike."""
    if verdict.target == "cpu":
        return verdict.reasons
    return tuple(why.replace(full[verdict.target], A_GPU) for why in verdict.reasons)


def plans(found: Diagnosis) -> Iterator[tuple[str, str]]:
    machine, kept = found.machine, found.kept
    what = "cuDNN's, for GPUs that are not here"
    if machine.driver:
        yield what, "beside NVIDIA's driver, which is here"
    elif machine.compiler:
        yield what, f"beside a stand-in for the driver, by {machine.compiler}"
    else:
        yield what, f"not without a C compiler: {', '.join(COMPILERS)}"
    yield "kept on disk", f"{count_files(kept.files)}, {format_bytes(kept.bytes)}, in {kept.folder}"
    yield from machine.variables
