"""A plugin of pytest: FlashAttention 4's own tests on a virtual GPU, on tensors of the CPU.

`make fa4-virtual` runs them. Its tests ask for tensors on "cuda", and get them on the CPU. What
each gave is written to the file $RESULTS, a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import pytest
import torch
from torch._guards import active_fake_mode
from torch.overrides import TorchFunctionMode

from attn_graph.testing.gpu import VirtualGpu, virtual_gpu

OPEN = ExitStack()
DEVICES: list[VirtualGpu] = []


@final
class OnCpu(TorchFunctionMode):
    """All tensors are on the CPU, whichever device is named; but for those without memory."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, given: Any = (), options: Any = None
    ) -> Any:  # Any: as PyTorch calls it
        if active_fake_mode() is None:
            given = tuple(map(on_cpu, given))
            options = {name: on_cpu(x) for name, x in (options or {}).items()}
            if function is torch.Tensor.cuda:
                return given[0]
        return function(*given, **(options or {}))


def on_cpu(x: Any) -> Any:
    """An argument, or the CPU in place of a GPU."""
    named = (isinstance(x, str) and x.partition(":")[0] == "cuda") or (
        isinstance(x, torch.device) and x.type == "cuda"
    )
    return "cpu" if named else x


def pytest_configure(config: pytest.Config) -> None:
    DEVICES.append(OPEN.enter_context(virtual_gpu(os.environ["VIRTUAL_GPU"])))
    OPEN.enter_context(patch.object(torch.cuda, "synchronize", lambda device=None: None))
    OPEN.enter_context(OnCpu())


def pytest_unconfigure(config: pytest.Config) -> None:
    OPEN.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests that were right before."""
    path = Path(os.environ["RESULTS"])
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    right = {line["test"] for line in lines if not line["said"]}
    items[:] = [item for item in items if item.nodeid not in right]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Write what a test gives: nothing if it is right, else its error."""
    start, before, said = time.process_time(), DEVICES[0].programs, ""
    try:
        yield
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        raise
    finally:
        line = {
            "test": item.nodeid,
            "said": said,
            "programs": DEVICES[0].programs - before,
            "seconds": time.process_time() - start,
        }
        with Path(os.environ["RESULTS"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
