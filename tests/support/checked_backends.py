"""Backends that need a self-check: one that is right, and some that are not."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.extend import Backend, DeviceTest, Executable, Options
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cpu import math as torch_math
from attn_graph.lowering.request import Request

X = ag.TensorSpec((1, 2, 16, 8), torch.float32)
SMALL = ag.TensorSpec((1, 2, 5, 4), torch.float32)
DOCUMENTS = ag.TensorSpec((1, 5), torch.int32)
GRAPH = ag.attention(X, X, X, mask=ag.Causal(), stats=True)
TRIALS = (
    simplify(ag.attention(SMALL, SMALL, SMALL, mask=ag.Causal(), stats=True)),
    simplify(ag.attention(SMALL, SMALL, SMALL, segments=(DOCUMENTS, DOCUMENTS), soft_cap=2.0)),
)
Run = Callable[..., Any]


def needing_check(name: str, change: Callable[[Run], Run], seconds: float = 100.0) -> Backend:
    """math by another name, with something done to what it runs."""

    def lower(graph: ag.Graph, target: ag.Target, options: Options) -> Executable:
        plain = torch_math.BACKEND.lower(Request(graph, target, options))
        return evolve(plain, run=change(plain.run), infer=change(plain.run))

    def device_test(graph: ag.Graph, target: ag.Target, options: Options) -> DeviceTest:
        return DeviceTest(f"{__name__}:{name.upper()}", "its only one", TRIALS, seconds)

    return Backend(name, lambda *_: (), lower, device_test=device_test)


def spoil(run: Run) -> Run:
    """Adds a little to every output."""

    def spoiled(*tensors: torch.Tensor) -> Any:
        outputs, saved = run(*tensors)
        return [output + 1e-3 for output in outputs], saved

    return spoiled


def hang(run: Run) -> Run:
    """Never ends."""
    return lambda *tensors: time.sleep(1000)


@final
@frozen
class Unfinished:
    """A result of a kernel that never ends, on a played device: whoever reads it waits forever.

    As in a GPU's driver, the wait is in C: it lets no thread of Python's run, and hears no signal
    but the one that nothing can block.
    """

    def cpu(self) -> Any:
        compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(os.environ["PLAYED_DEVICE"]).write_text(f"{os.getpid()} {compiler.pid}")
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            ctypes.PyDLL(None).pause()


def never_finish(run: Run) -> Run:
    """Launches what never ends, and returns at once."""
    return lambda *tensors: ([Unfinished() for _ in run(*tensors)[0]], ())


def crash(run: Run) -> Run:
    """Ends the process, as a kernel that breaks its context may."""
    return lambda *tensors: os._exit(3)


def fail(run: Run) -> Run:
    """Raises."""

    def failing(*tensors: torch.Tensor) -> Any:
        raise RuntimeError("misaligned address")

    return failing


def lower_by_variant(graph: ag.Graph, target: ag.Target, options: Options) -> Executable:
    """math, or what is wrong if the variant is."""
    return (WRONG if options.variant == "wrong" else RIGHT).lower(Request(graph, target, options))


def make_variant_test(graph: ag.Graph, target: ag.Target, options: Options) -> DeviceTest:
    """The test of one variant, which lowers its graphs by it."""
    name, way = f"{__name__}:BY_VARIANT", options.variant
    return DeviceTest(name, way or "its own", TRIALS, way=way)


RIGHT = needing_check("right", lambda run: run)
WRONG = needing_check("wrong", spoil)
HANGS = needing_check("hangs", hang, seconds=0.5)
HANGS_WITHIN = needing_check("hangs_within", never_finish, seconds=20.0)
CRASHES = needing_check("crashes", crash)
RAISES = needing_check("raises", fail)
BY_VARIANT = Backend("by_variant", lambda *_: (), lower_by_variant, device_test=make_variant_test)
