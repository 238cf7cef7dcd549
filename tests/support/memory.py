"""How much memory a test may take."""

from __future__ import annotations

import ctypes
import gc
import sys
from mmap import PAGESIZE as PAGE_SIZE
from pathlib import Path

from attrs import define

from attn_graph.machine.workspace import default_workspace

MOST = 3 * 2**29  # bytes a test may add to its process, or to a child: two at once stay below 6 GiB
GROWN = 2**28  # bytes of growth, after which a process looks for what it can give back


def peak_memory() -> tuple[int, int]:
    """The most bytes that this process has held, and a child that has ended; 0 if unknown."""
    if sys.platform != "linux":
        return 0, 0
    from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

    own, children = (1024 * getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
    return own, children


def memory_problem(before: tuple[int, int], after: tuple[int, int]) -> str:
    """Why a test takes too much memory, by the peaks before and after it; "" if it does not."""
    for held, then, who in zip(before, after, ("its process", "its children"), strict=True):
        if then - held > MOST:
            return f"the test added {then - held} bytes to the {held} of {who}; most is {MOST}"
    return ""


@define
class Held:
    """What this process held when it last gave memory back. The shared workspace is as large as the
    largest call needed; large arrays in cycles, as tracebacks make them, wait for a collection that
    counts objects; and the allocator keeps what is freed."""

    bytes: int = 0

    def give_back(self) -> None:
        """Collect garbage, and return freed memory to the system, if the process has grown."""
        if sys.platform == "linux" and resident() > self.bytes + GROWN:
            default_workspace().release()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self.bytes = resident()


def resident() -> int:
    """The bytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_SIZE
