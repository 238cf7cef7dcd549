"""A process that does one item: `python -m benchmarks.gpu.child ITEM ROWS DEVICE`.

ITEM and DEVICE are functions as "module:function". Rows go to a file line by line, so that those
before a crash or the time limit are kept, whatever else prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.gpu.results import Row

Emit = Callable[[Row], None]


def find_function(name: str) -> Any:  # Any: an item, or a maker of devices
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def main(item: str, path: str, device: str) -> None:
    """Do the item on the device."""
    with open(path, "a", encoding="utf-8") as file:

        def emit(row: Row) -> None:
            print(json.dumps(row, allow_nan=False), file=file, flush=True)

        find_function(item)(find_function(device)(), emit)


if __name__ == "__main__":
    main(*sys.argv[1:])
