"""Errors of a virtual GPU."""

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
    BULK_STORES = auto()  # nor until bulk stores have read shared memory
    TENSOR_LOADS = auto()  # no tcgen05.wait::ld before registers are used: ptxas waits
    EQUAL_STORES = auto()  # several programs store to one place, all of them equal bytes


@final
class UnknownInstructionError(NotImplementedError):
    """A kernel has an instruction, modifier or directive unknown to the virtual GPU."""
