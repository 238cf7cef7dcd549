"""Numbers of bytes: a plan's needs, and sizes as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import final

from attrs import frozen

from attn_graph.errors import GraphError, show

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
IN_SMALL = {unit.lower(): count for unit, count in UNITS.items()}


@final
@frozen(repr=False)
class Memory:
    """Bytes on top of the inputs.

    outputs: the results of a call. saved: bytes alive between forward and backward: o, lse and
    returned statistics of each attention, outputs among them. workspace: the arena's part while it
    runs, to the byte. temporary: bytes allocated and freed by PyTorch during a call, an upper bound
    before data are known: it counts the copies for NaN past a length, the most keys that data may
    pick, and every buffer that a step may use. A call uses some of these, and may stay far below
    it. block: bytes that each of `threads`, PyTorch's threads when `memory()` is called, works in
    beside these, where PyTorch's fused CPU kernel runs. Three things are left out. A call's own
    small numbers, for example a row of positions. Allocations of a plan's first call to prepare
    the next. And k and v once more in a forward in half precision on CPUs with AMX, where that
    kernel packs them.
    `*_backward` is 0 for a graph without gradients. peak: the most of all this at one time.
    untold: passes, "forward" and "backward", with a workspace known only once their plan is built;
    until then it counts 0.
    """

    outputs: int
    saved: int
    workspace_forward: int
    workspace_backward: int
    temporary_forward: int
    temporary_backward: int
    gradients: int
    untold: tuple[str, ...] = ()
    block_forward: int = 0
    block_backward: int = 0
    threads: int = 1

    @property
    def peak(self) -> int:
        """The most bytes in use at one time, on top of the inputs."""
        return self.peak_of(self.threads)

    def peak_of(self, threads: int) -> int:
        """`peak` on so many threads; on 0 it leaves out their blocks."""
        forward = max(self.outputs, self.saved) + self.workspace_forward + self.temporary_forward
        forward += threads * self.block_forward
        if not self.gradients:
            return forward
        backward = self.saved + self.gradients + self.workspace_backward + self.temporary_backward
        return max(forward, backward + threads * self.block_backward)

    @property
    def peak_text(self) -> str:
        """The peak in words, equal for any number of threads."""
        block = max(self.block_forward, self.block_backward)
        each = f" and {format_bytes(block)} for each thread" if block else ""
        return f"{'at least ' if self.untold else ''}{format_bytes(self.peak_of(0))}{each}"

    def __repr__(self) -> str:
        """The text."""
        return str(self)

    def __str__(self) -> str:
        workspace = self.workspace_text("forward", self.workspace_forward)
        saved = ""
        if self.gradients:
            saved = f"saved for backward {format_bytes(self.saved)}, "
            workspace += f" and {self.workspace_text('backward', self.workspace_backward)}"
        outputs = format_bytes(self.outputs)
        return f"outputs {outputs}, {saved}workspace {workspace}, peak {self.peak_text}"

    def _repr_html_(self) -> str:
        """For notebooks: a bar for each kind of memory, as part of the peak, and their sum."""
        from attn_graph.printing import html

        rows = [(name, html.Number(text), html.bar(share)) for name, text, share in self.shares()]
        peak = html.Number(self.peak_text)
        return html.page(html.table([*rows, ("peak", peak, "at one time")]))

    def shares(self) -> Iterator[tuple[str, str, float]]:
        """Each kind of memory in words, with its bytes in words and as a share of the peak."""
        passes = ("forward", "backward") if self.gradients else ("forward",)
        counts = {"outputs": self.outputs}
        counts |= {"saved for backward": self.saved} if self.gradients else {}
        for name in passes:
            counts[f"workspace {name}"] = getattr(self, f"workspace_{name}")
            counts[f"temporary {name}"] = getattr(self, f"temporary_{name}")
        counts |= {"gradients": self.gradients} if self.gradients else {}
        later = {f"workspace {name}" for name in self.untold}
        for name, count in counts.items():
            text = "known after compile()" if name in later else format_bytes(count)
            yield name, text, count / max(1, self.peak_of(0))

    def workspace_text(self, pass_: str, count: int) -> str:
        """A pass with the bytes of its workspace, or a note if only the built plan knows them."""
        return (
            f"{pass_} known after compile()"
            if pass_ in self.untold
            else f"{format_bytes(count)} {pass_}"
        )


def format_bytes(count: int) -> str:
    """Bytes as text: 1536 -> "1.5 KiB"."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[u]), "B")
    return f"{count / UNITS[unit]:.4g} {unit}"


def parse_bytes(size: int | str) -> int:
    """Bytes of an integer, or of text: "1GiB" or "200 mib". Raises GraphError otherwise."""
    if type(size) is int and size >= 0:
        return size
    if not isinstance(size, str):
        raise GraphError(
            f"size {show(size)} is not a number of bytes from 0 on, nor a text such as '1GiB'"
        )
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if parts is None or parts[2].lower() not in IN_SMALL:
        raise GraphError(
            f"size {show(size)} is not a number with one of {', '.join(filter(None, UNITS))}"
        )
    count = float(parts[1]) * IN_SMALL[parts[2].lower()]
    if count == float("inf"):
        raise GraphError(f"size {size[:9]}... is more than any machine has")
    return int(count)
