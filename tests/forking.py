"""What a forked process finds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])


def forks(test: Test) -> Test:
    """A test that forks, while other threads run: skipped where there is no such thing."""
    ignored = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
    return pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")(ignored(test))


def in_child(call: Callable[[], bool]) -> bool:
    """Whether the call is true in a forked process; False where it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that hangs
        os._exit(0 if call() else 1)
    return os.waitpid(child, 0)[1] == 0
