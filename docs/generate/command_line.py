"""What commands print, for docs/command-line.md."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import click
from click.testing import CliRunner

import attn_graph as ag
from attn_graph.cli.diagnosis import Surroundings
from attn_graph.cli.main import commands

STORE = ag.Store("~/.cache/attn_graph")  # as it reads on the page; there is no such folder
TORCH = (("torch", "2.13.0+cpu"),)
TRITON = (*TORCH, ("triton", "3.7.1"))
CUDNN = (*TRITON, ("nvidia-cudnn-frontend", "1.28.0"), ("nvidia-cudnn-jit-cu13", "9.20.0.48"))
WIDTH = {"COLUMNS": "100", "FORCE_COLOR": None, "TRITON_INTERPRET": None}


def machine(libraries: tuple[tuple[str, str], ...]) -> Surroundings:
    """A machine without a GPU that has these libraries, as `Machine.here` found it on one."""
    cpu = ag.Target("cpu", "cpu", 0, ("bf16",), libraries)
    return Surroundings(
        target=cpu,
        cpu=cpu,
        python="3.11.7",
        system="Linux x86_64",
        processor="AMD EPYC, AVX512",
        threads=(2, 2),
        compiler="/usr/bin/cc",
    )


MACHINES = {"torch": machine(TORCH), "triton": machine(TRITON), "cudnn": machine(CUDNN)}


def run_command(line: str, found: Surroundings = MACHINES["cudnn"]) -> str:
    """What a command prints on a machine with nothing stored."""
    libraries = found.cpu.libraries
    with ExitStack() as patched:
        for name, value in {
            "attn_graph.machine.target.installed_libraries": lambda: libraries,
            "attn_graph.compiler.default_store": lambda: STORE,
            "attn_graph.default_store": lambda: STORE,
            "attn_graph.cli.diagnosis.Surroundings.here": lambda: found,
        }.items():
            patched.enter_context(patch(name, value))
        result = CliRunner(env=WIDTH).invoke(
            commands, shlex.split(line)[1:], prog_name="attn-graph"
        )
    assert result.exit_code == 0, result.output
    return result.output.rstrip("\n")


def console(line: str, found: Surroundings = MACHINES["cudnn"]) -> str:
    return f"```console\n$ {line}\n{run_command(line, found)}\n```"


def helps() -> str:
    """Every command's --help."""
    return "\n\n".join(console(f"{name} --help") for name in names_within("attn-graph", commands))


def names_within(name: str, command: click.Command) -> list[str]:
    """A command and all within it, as they are called."""
    inner = command.commands.items() if isinstance(command, click.Group) else ()
    return [name, *(full for part, each in inner for full in names_within(f"{name} {part}", each))]


PARTS: dict[str, Callable[[], str]] = {
    **{
        f"doctor {name}": partial(console, "attn-graph doctor", found)
        for name, found in MACHINES.items()
    },
    "explain": partial(
        console,
        "attn-graph explain --q 2,32,8192,128 --k 2,8,8192,128 --dtype bf16 --causal "
        "--window 4095 --target h200",
    ),
    "mask": partial(
        console,
        'attn-graph mask 2048 2048 "Causal() & (Window(512) | Prefix(128))" --block 128x64',
    ),
    "help": helps,
}
