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
from attn_graph.machine.target import describe_machine

STORE = ag.extend.Store("~/.cache/attn_graph")  # as it reads on the page; the folder does not exist
TORCH = (("torch", "2.13.0+cpu"),)
TRITON = (*TORCH, ("triton", "3.7.1"))
CUDNN = (*TRITON, ("nvidia-cudnn-frontend", "1.28.0"), ("nvidia-cudnn-jit-cu13", "9.20.0.48"))
WIDTH = {"COLUMNS": "100", "FORCE_COLOR": None, "TRITON_INTERPRET": None}


def make_machine(libraries: tuple[tuple[str, str], ...]) -> Surroundings:
    """A machine without a GPU that has these libraries."""
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


MACHINES = {
    "torch": make_machine(TORCH),
    "triton": make_machine(TRITON),
    "cudnn": make_machine(CUDNN),
}


def run_command(line: str, machine: Surroundings = MACHINES["cudnn"]) -> str:
    """What a command prints on a machine with nothing stored."""
    libraries = machine.cpu.libraries
    with ExitStack() as stack:
        for name, value in {
            "attn_graph.machine.target.installed_libraries": lambda: libraries,
            "attn_graph.machine.target.describe_machine": describe_machine.__wrapped__,
            "attn_graph.planner.arguments.default_store": lambda: STORE,
            "attn_graph.extend.default_store": lambda: STORE,
            "attn_graph.cli.diagnosis.Surroundings.here": lambda: machine,
        }.items():
            stack.enter_context(patch(name, value))
        result = CliRunner(env=WIDTH).invoke(
            commands, shlex.split(line)[1:], prog_name="attn-graph"
        )
    assert result.exit_code == 0, result.output
    return result.output.rstrip("\n")


def console(line: str, machine: Surroundings = MACHINES["cudnn"]) -> str:
    """A command and what it prints, in Markdown."""
    return f"```console\n$ {line}\n{run_command(line, machine)}\n```"


def all_helps() -> str:
    """Every command's --help."""
    return "\n\n".join(console(f"{name} --help") for name in names_within("attn-graph", commands))


def names_within(name: str, command: click.Command) -> list[str]:
    """The full names of a command and of all commands within it."""
    inner = command.commands.items() if isinstance(command, click.Group) else ()
    return [name, *(full for part, each in inner for full in names_within(f"{name} {part}", each))]


PARTS: dict[str, Callable[[], str]] = {
    **{
        f"doctor {name}": partial(console, "attn-graph doctor", machine)
        for name, machine in MACHINES.items()
    },
    "explain": partial(
        console,
        "attn-graph explain --q 2,32,8192,128 --k 2,8,8192,128 --dtype bf16 --causal "
        "--window 4095 --target h200",
    ),
    "fit": partial(
        console,
        "attn-graph fit examples/configs/llama-3-8b.json --target h200 --batch 8 --context 8192 "
        "--phase decode",
    ),
    "mask": partial(
        console,
        'attn-graph mask 2048 2048 "Causal() & (Window(512) | Prefix(128))" --block 128x64',
    ),
    "help": all_helps,
}
