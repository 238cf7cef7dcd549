"""Errors of a virtual GPU."""

import re
from enum import Enum, auto
from typing import final


@final
class Fault(AssertionError):
    """A compiled kernel has undefined behaviour, or another GPU might behave differently.

    The message names the kernel, the program, the line of the PTX and the line of the source.
    """


@final
class Omission(Enum):
    """A step required by the PTX ISA. A kernel without it is at fault, with one exception.

    If its launch declares the omission, because GPUs are known to work without it, it is only
    noted.
    """

    ARRIVALS = auto()  # nobody waits for the last ones at an mbarrier or a barrier
    COMMITS = auto()  # nor for a commit of products
    COPIES = auto()  # nor for the last cp.async, whose bytes are not used
    BULK_STORES = auto()  # nor until bulk stores have read shared memory
    TENSOR_LOADS = auto()  # no tcgen05.wait::ld before registers are used: ptxas waits
    EQUAL_STORES = auto()  # several programs store to one place, all of them equal bytes
    UNEQUAL_STORES = auto()  # threads store other bytes to one place at once: any may be the last
    UNWRITTEN_LOADS = auto()  # bytes are loaded to which nothing was written; they may go unused


@final
class UnknownInstructionError(NotImplementedError):
    """A kernel has an instruction, modifier or directive unknown to the virtual GPU."""


REMEDIES = {  # words of a fault, as a regular expression, and the edit that usually helps
    "belong to no element": "mask the access by the tensor's shape, or correct its strides",
    "which is in no tensor": "mask the access by the tensor's shape, or pass that tensor too",
    "to which nothing was written": "write it first: a mask of the store, or another launch",
    "at no multiple of": "align the address, or do not promise its alignment (tl.multiple_of)",
    "stored by": "give each program places of its own, or use tl.atomic_add",
    r"read by \w* ?program": "write the result to another tensor, or read it in a launch before",
    "added to by": "read sums in a launch after the one that adds them",
    "has no fence.proxy.async": "fence.proxy.async after the write, then the barrier",
    "by a copy of the copy engine": "wait for the phase of the mbarrier that counts the copy",
    "by an asynchronous copy": "cp.async.wait_group, then a barrier of the program",
    "by a bulk store": "wait for its group; without .read if what it wrote is used",
    "by a (product|tensor core)": "wait for the product, by its group or the commit's mbarrier",
    "by tcgen05": "tcgen05.wait::ld or ::st, then a barrier",
    "is not ordered after": "a barrier of the program between the two (tl.debug_barrier)",
    "two threads at once": "let one thread store, or all of them equal bytes",
    "deadlock": "count who arrives at the barrier, and the bytes that copies bring",
    "before a copy has landed": "wait for the copy before the end",
    "is executed by a part of it": "move it out of the branch, or give it a mask of lanes",
    "skip an instruction": "move it out of the branch, or name only the lanes that come",
    "which no instruction sets": "set the register on every path",
}


def remedy_for(text: str) -> str | None:
    """The edit that usually helps, by the first words of the table that a fault has."""
    return next((edit for words, edit in REMEDIES.items() if re.search(words, text)), None)
