"""Imports that wait for their first use, and that no fork interrupts.

A fork while another thread imports leaves the module's lock held in the child, without a thread to
release it: an import of the module there waits for ever. So a fork waits for imports made here.
"""

from __future__ import annotations

import os
import sys
from threading import RLock
from types import ModuleType

GATE = RLock()  # held by imports and by forks


def load_modules(*names: str) -> ModuleType:
    """Import modules by name; returns the last. A fork in another thread waits for the end."""
    with GATE:
        for name in names:
            __import__(name)  # C code alone if it is there already
        return sys.modules[names[-1]]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=GATE.acquire, after_in_parent=GATE.release, after_in_child=GATE.release
    )
