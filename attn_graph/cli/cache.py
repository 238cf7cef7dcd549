"""`attn-graph cache`: lists, clears, verifies and builds the files on disk."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click
from attrs import asdict, evolve

import attn_graph as ag
from attn_graph.cli import output
from attn_graph.cli.explain import deterministic
from attn_graph.machine.gpus import devices
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.store import Entry, read_json
from attn_graph.measuring.self_check import describe_check

LONGEST = 100  # characters shown of a key of an unknown kind
UNITS = {"d": 86400, "h": 3600, "min": 60, "s": 1}

folder = click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder of plans, by default the user's cache folder.",
)  # fmt: skip


def read_driver(_: click.Context, __: click.Parameter, value: str) -> int:
    """A click callback: "13.0" -> 13000."""
    parts = re.fullmatch(r"(\d{1,3})\.(\d)", value)
    if parts is None:
        raise click.BadParameter(f"{value!r} is not a version of CUDA such as 13.0")
    return int(parts[1]) * 1000 + int(parts[2]) * 10


def open_store(folder: Path | None) -> ag.extend.Store:
    """The store in a folder, or the default one."""
    return ag.extend.default_store() if folder is None else ag.extend.Store(folder)


def describe_folder(store: ag.extend.Store) -> str:
    """The path of the folder, and whether it does not exist yet."""
    missing = "" if store.folder.is_dir() else " (the folder does not exist yet)"
    return f"{store.folder}{missing}"


def folder_of(store: ag.extend.Store) -> dict[str, Any]:  # Any: JSON
    """The folder as --json shows it."""
    return {"folder": str(store.folder), "exists": store.folder.is_dir()}


@click.group(
    short_help="List, clear, verify, build the files on disk.",
    epilog=output.epilog("attn-graph cache list", "attn-graph cache verify --json"),
)
def cache() -> None:
    """Files on disk: plans built by cuDNN, measured choices, and outcomes of self-checks."""


@cache.command(
    epilog=output.epilog("attn-graph cache build graphs.txt --target h200 --driver 13.0 -o plans")
)
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option(
    "--target",
    required=True,
    metavar="NAME",
    help=f"The GPU to build for, one of {', '.join(devices())}.",
)
@click.option(
    "-o",
    "--folder",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to write to.",
)
@click.option(
    "--driver",
    metavar="VERSION",
    default="13.0",
    show_default=True,
    callback=read_driver,
    help="The CUDA version of the driver there, as nvidia-smi shows it: plans are for one version.",
)
@deterministic
@click.option("--inference", is_flag=True, help="Nothing is trained: no backward.")
@output.as_json
@output.as_usage_errors
def build_command(
    file: TextIO,
    target: str,
    folder: Path,
    driver: int,
    deterministic: bool,
    inference: bool,
    plain: bool,
) -> None:
    """Build cuDNN's plans of graphs ahead of time, and compile Triton's kernels, for any GPU.

    FILE holds graphs, one after another, as the library prints them (- is stdin). On the GPU's
    machine the folder is used by compile(..., store=Store(folder)), or is the user's cache folder.
    Kernels go to Triton's cache, the folder TRITON_CACHE_DIR on both machines. Both machines need
    equal versions of cuDNN, its frontend and Triton.
    """
    store, place = ag.extend.Store(folder), evolve(ag.Target.of(target), driver=driver)
    passes: list[list[str]] = []
    for n, graph in enumerate(read_graphs(file), start=1):
        try:
            passes.append([*prepare(graph, place, store, deterministic, inference)])
        except ag.NoBackendError as error:
            raise click.ClickException(str(error)) from error
        if not plain:
            output.show_text(f"graph {n}: {', '.join(passes[-1])}", wraps=False)
    files = len([*store.files()])
    if plain:
        output.show_json(
            {"folder": str(folder), "graphs": passes, "files": files, "bytes": store.bytes}
        )
    else:
        output.show_text(
            f"{files_text(files)}, {format_bytes(store.bytes)}, in {store.folder}", wraps=False
        )


def read_graphs(file: TextIO) -> list[ag.Graph]:
    """The graphs of a file. Raises GraphError for a wrong graph, UsageError for an empty file."""
    try:
        texts = [text for text in re.split(r"(?m)^(?=def graph\()", file.read()) if text.strip()]
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file.name} is not text: {error}") from error
    if not texts:
        raise click.UsageError(f"{file.name} holds no graph")
    return [*map(ag.parse, texts)]


def prepare(
    graph: ag.Graph, target: ag.Target, store: ag.extend.Store, deterministic: bool, inference: bool
) -> Iterator[str]:
    """Build all plans of a graph's calls; yield the backend of each pass."""
    plan = ag.compile(graph, target=target, deterministic=deterministic, store=store)
    plan.executable.prepare()
    yield f"{plan.backend} {'gradient' if plan.graph.is_gradient else 'forward'}"
    if plan.graph.has_gradient and not inference:
        for gradient in dict.fromkeys((plan.vjp, plan.training_vjp)):
            gradient.executable.prepare()
        yield f"{plan.vjp.backend} backward"


@cache.command(
    "list", epilog=output.epilog("attn-graph cache list --folder ~/.cache/attn_graph", codes=False)
)
@folder
@output.as_json
def list_(folder: Path | None, plain: bool) -> None:
    """Every file: its kind, size, content, and the time since its last use."""
    store = open_store(folder)
    entries = sorted(store.entries(), key=lambda entry: -entry.used)
    if plain:
        output.show_json({**folder_of(store), "entries": [*map(entry_dict, entries)]})
        return
    rows: list[tuple[str, ...]] = []
    for entry in entries:
        (kind, what), age = describe_entry(entry), format_age(time.time() - entry.used)
        rows.append((kind, format_bytes(entry.bytes), age, what))
    if rows:
        output.show_text(
            output.make_table(("kind", "size", "used", "what"), rows, ("size", "used"))
        )
    total = format_bytes(sum(entry.bytes for entry in entries))
    most = format_bytes(store.most)
    output.show_text(
        f"{files_text(len(entries))}, {total} of at most {most}, in {describe_folder(store)}",
        wraps=False,
    )


@cache.command(epilog=output.epilog("attn-graph cache clear", codes=False))
@folder
@output.as_json
def clear(folder: Path | None, plain: bool) -> None:
    """Delete every file. Files are built again when needed."""
    store = open_store(folder)
    place, deleted = describe_folder(store), store.clear()
    if plain:
        output.show_json({**folder_of(store), "deleted": deleted})
    else:
        click.echo(f"{files_text(deleted)} deleted from {place}")


@cache.command(epilog=output.epilog("attn-graph cache verify || attn-graph cache clear"))
@folder
@output.as_json
def verify(folder: Path | None, plain: bool) -> None:
    """Read every file and check its checksum. Exits with 1 if one is damaged: damaged files are
    never used, and are replaced when needed.
    """
    store = open_store(folder)
    entries = [*store.entries()]
    damaged = [entry for entry in entries if entry.key is None]
    if plain:
        counts = {"files": len(entries), "damaged": [*map(entry_dict, damaged)]}
        output.show_json({**folder_of(store), **counts})
    else:
        for entry in damaged:
            output.show_text(f"{entry.path}: {entry.unfit}", wraps=False)
        click.echo(
            f"{files_text(len(entries))} in {describe_folder(store)}, "
            f"{len(damaged)} of them damaged"
        )
    output.exit_no_if(bool(damaged))


def files_text(files: int) -> str:
    """ "1 file", "2 files"."""
    return f"{files} file{'' if files == 1 else 's'}"


def format_age(seconds: float) -> str:
    """Seconds in the largest whole unit: 7300 -> "2 h"."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= size), "s")
    return f"{max(0, int(seconds / UNITS[unit]))} {unit}"


def entry_dict(entry: Entry) -> dict[str, Any]:  # Any: JSON
    """An entry as --json shows it."""
    kind, what = describe_entry(entry)
    return {**asdict(entry), "path": str(entry.path), "kind": kind, "what": what}


def describe_entry(entry: Entry) -> tuple[str, str]:
    """The kind of a file, the first word of its key, and its content."""
    if entry.key is None:
        return "damaged", f"{entry.path.name}: {entry.unfit}"
    kind, _, rest = entry.key.partition(" ")
    try:
        return kind, KINDS[kind](rest)
    except (KeyError, TypeError, ValueError):  # a kind, or a form, of another version
        return kind, rest if len(rest) <= LONGEST else f"{rest[: LONGEST - 3]}..."


def describe_cudnn(rest: str) -> str:
    """A stored plan of cuDNN's as text: its call and its machine."""
    key = read_json(rest)
    call = key["call"]
    tensors = [f"{x['argument']} {x['shape']}" for x in call["inputs"][:3]]
    cudnn = ".".join(map(str, key["versions"][0]))
    device = key["device"]
    place = f"sm_{device['deviceVer'] // 10}, {device['multiProcessorCount']} multiprocessors"
    return f"{call['name']} {call['dtype']}, {', '.join(tensors)}, for {place}, cuDNN {cudnn}"


def describe_tune(rest: str) -> str:
    """Stored figures as text: the graph's inputs and the measured machine."""
    key = read_json(rest)
    inputs = [f"{x.name} {x.spec}" for x in ag.parse(key["graph"]).inputs[:3]]
    return f"{', '.join(inputs)}, on {key['target']}, {key['threads']} threads"


KINDS = {"check": describe_check, "cudnn": describe_cudnn, "tune": describe_tune}
