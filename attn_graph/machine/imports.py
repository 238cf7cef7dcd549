"""Imports that wait for their first use, and that no fork interrupts.

A fork while another thread imports leaves the module's lock held in the child, without a thread to
release it: an import of the module there waits for ever. So a fork waits for imports made here.
"""

from __future__ import annotations

import os
import sys
from threading import RLock
from types import ModuleType

from attn_graph.errors import PlanTargetError

GATE = RLock()  # held by imports and by forks


def load_modules(*names: str) -> ModuleType:
    """Import modules by name; returns the last. A fork in another thread waits for the end."""
    require_imports()
    with GATE:
        for name in names:
            __import__(name)  # C code alone if it is there already
        return sys.modules[names[-1]]


def require_imports() -> None:
    """Raise PlanTargetError if Python is shutting down: it imports nothing then, and PyTorch cannot
    make every tensor."""
    if sys.meta_path is None:  # as imports find it then
        raise PlanTargetError(
            "Python is shutting down and imports nothing more, so a first use fails; call it "
            "before, or free the object that calls it in a function registered with atexit"
        )


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=GATE.acquire, after_in_parent=GATE.release, after_in_child=GATE.release
    )
