"""Items for rehearsals of `benchmarks.gpu`: each goes wrong, or right, in its own way."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import Emit
from benchmarks.gpu.session import Item

FOREVER = 600  # seconds
STAND_IN = "tests.support.gpu_items:make_nothing"
ROW = {"job": "full", "pass": "forward", "by": "ours", "ms": 2.0, "predicted ms": 1.0}


def make_nothing() -> None:
    """The device of items that need none."""


def describe(device: None, emit: Emit) -> None:
    """As a machine with a GPU says who it is."""
    libraries = {"torch": os.environ.get("REHEARSED_TORCH", "2.11.0+cu130"), "triton": "3.6.0"}
    emit({"gpu": "NVIDIA H200", "driver": "580.82, 700.00 W", "libraries": libraries})


def succeed(device: None, emit: Emit) -> None:
    """One row that was predicted."""
    emit(ROW)


def crash(device: None, emit: Emit) -> None:
    """A row, and the end that a fault in a kernel's library makes."""
    emit(ROW)
    print("an illegal memory access was encountered", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse(device: None, emit: Emit) -> None:
    """An exception, as a typing error makes it."""
    raise AttributeError("no such kernel")


def hang(device: None, emit: Emit) -> None:
    """A row, and then a process of its own that never ends, and hears no signal to."""
    emit(ROW)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program])
    if path := os.environ.get("REHEARSED_CHILD"):
        Path(path).write_text(str(process.pid))
    time.sleep(FOREVER)


def babble(device: None, emit: Emit) -> None:
    """Rows between words, half a row, a list, and a number that is none."""
    print("\x00\xff Compiling...")
    path = Path(sys.argv[2])
    emit(ROW)
    with path.open("ab") as file:
        file.write(b'\xfe autotuning\n[1]\n{"ms": NaN}\n{"ms": 1')


def give_nothing(device: None, emit: Emit) -> None:
    """It ends well, without a row."""


def make_item(name: str, limit: float = 60.0) -> Item:
    """An item by the name of its function here."""
    return Item(name, f"tests.support.gpu_items:{name}", 1.0, limit)


def arguments(out: Path, *items: str, **more: Any) -> argparse.Namespace:  # Any: of each its own
    """The command line of a rehearsal."""
    usual: dict[str, Any] = {"list": False, "restart": False, "minutes": None, "commit": "abc"}
    return argparse.Namespace(items=[*items], out=out, device=STAND_IN, **usual | more)
