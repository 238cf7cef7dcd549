"""What a forked process finds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest


def forks(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that forks while other threads run. Skips where there is no fork."""
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")(test)
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")(test)
    return test


def in_child(call: Callable[[], bool]) -> bool:
    """Whether the call is true in a forked process; False where it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that hangs
        os._exit(0 if call() else 1)
    return os.waitpid(child, 0)[1] == 0
