"""Calls of the two functions that kernels call, and the memory of a thread in which they find
their arguments: tl.device_print prints, and a failed tl.device_assert is a Fault."""

from __future__ import annotations

import re
from typing import Any, final

import numpy as np
from attrs import define, field

from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.rules import DTYPES, Array, Arrays, action, values
from attn_graph.testing.gpu.threads import Threads

values(("u64 <- u64", ""), {"cvta.local.u64 cvta.global.u64": lambda a: a})
ARGUMENT = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(ll|l)?([diuxXfeEgGpsc%])")


@final
@define(eq=False)
class Calls:
    """The memory of each thread, [threads, bytes], and the arguments of the next call."""

    memory: Array
    given: dict[str, Array] = field(factory=dict[str, Array])

    @classmethod
    def of(cls, m: Program) -> Calls:
        return cls(np.zeros((m.launch.threads, m.launch.code.kernel.local), np.uint8))

    def words(self, m: Program, g: Threads, address: Array, size: int) -> tuple[Array, Array]:
        """Threads, and the places of `size` bytes of each. Raises Fault outside of the memory."""
        at = g.take(address).astype(np.int64)
        if ((at < 0) | (at + size > self.memory.shape[1])).any():
            m.fault(f"{size} bytes at {at.max()} of {self.memory.shape[1]} bytes of a thread")
        threads = g.numbers
        return threads[:, None], at[:, None] + np.arange(size)


@action(r"st\.local(?:\.v[24])?\.(?P<type>[busf]\d+)", "<- @ {type}*")
def store_local(m: Program, g: Threads, address: Array, values: Arrays, type: str) -> None:
    """Store numbers to the memory of each thread."""
    data = np.ascontiguousarray(g.take(g.stack(values)).T).view(np.uint8)
    calls = m.part(Calls)
    calls.memory[calls.words(m, g, address, data.shape[1])] = data


@action(r"ld\.local(?P<many>\.v[24])?\.(?P<type>[busf]\d+)", "{type}* <- @")
def load_local(m: Program, g: Threads, address: Array, many: str | None, type: str) -> Array:
    """d = numbers in the memory of each thread."""
    calls, size = m.part(Calls), int((many or ".v1")[2:]) * DTYPES[type].itemsize
    data = np.ascontiguousarray(calls.memory[calls.words(m, g, address, size)])
    return g.spread(data.view(DTYPES[type]).T)


@action(r"st\.param\.(?P<type>[busf]\d+)", "<- param {type}")
def give(m: Program, g: Threads, name: str, offset: int, value: Array, type: str) -> None:
    """An argument of the next call."""
    m.part(Calls).given[name] = np.broadcast_to(value, g.count)


@action(r"call\.vprintf", "<-")
def print_text(m: Program, g: Threads) -> None:
    """Each thread prints a line."""
    calls = m.part(Calls)
    texts, places = (g.each(calls.given[name]).tolist() for name in ("param0", "param1"))
    threads = g.numbers.tolist()
    for thread, text, at in zip(threads, texts, places, strict=True):
        print(fill(m.text_at(text), calls.memory[thread], at), end="")


def fill(text: str, memory: Array, at: int) -> str:
    """A text with its arguments, which lie from a place on, each at a multiple of its size."""

    def put(found: re.Match[str]) -> str:
        nonlocal at
        form, long, kind = found.groups()
        if kind == "%":
            return "%"
        width = "8" if long or kind in "ps" else "4"
        dtype = np.dtype("f8" if kind in "feEgG" else ("i" if kind in "di" else "u") + width)
        at = -(-at // dtype.itemsize) * dtype.itemsize
        number: Any = memory[at : at + dtype.itemsize].view(dtype)[0].item()
        at += dtype.itemsize
        return str(f"%{form}{'x' if kind in 'ps' else 'd' if kind == 'u' else kind}" % number)

    return ARGUMENT.sub(put, text)


@action(r"call\.__assertfail", "<-")
def fail(m: Program, g: Threads) -> None:
    """A tl.device_assert does not hold."""
    text = m.text_at(int(g.each(m.part(Calls).given["param0"])[0]))
    first = int(g.numbers[0])
    m.fault(f"an assertion fails in thread {first}: {text}")


@action(r"trap", "<-")
def trap(m: Program, g: Threads) -> None:
    """The launch fails."""
    m.fault("a trap")
