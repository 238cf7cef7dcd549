"""How much memory a test may take."""

from __future__ import annotations

import ctypes
import sys

MOST = 3 * 2**29  # bytes a test may add to its process, or to a child: two at once stay below 6 GiB


def peak_memory() -> int:
    """The most bytes that this process, or a child that has ended, has held; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

    return 1024 * max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN))


def memory_problem(before: int, after: int) -> str:
    """Why a test takes too much memory, by the peaks before and after it; "" if it does not."""
    if after - before <= MOST:
        return ""
    return f"the test added {after - before} bytes to the {before} of its process; most is {MOST}"


def give_back() -> None:
    """Return to the system what the allocator keeps of freed memory: up to 300 MB after a file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
