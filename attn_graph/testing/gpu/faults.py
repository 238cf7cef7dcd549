"""What a virtual GPU raises."""

from enum import Enum, auto
from typing import final


@final
class Fault(AssertionError):
    """A compiled kernel does what a GPU does not define, or another GPU might do otherwise.

    The message names the kernel, the program, the line of the PTX and the line of the source.
    """


@final
class Omission(Enum):
    """Something that the PTX ISA asks for. A kernel without it is at fault, unless its launch says
    that its authors leave it out, on GPUs that are known to bear it: then it is noted."""

    ARRIVALS = auto()  # nobody waits for the last ones at an mbarrier or a barrier
    COMMITS = auto()  # nor for a commit of products
    BULK_STORES = auto()  # nor until bulk stores have read shared memory
    TENSOR_LOADS = auto()  # no tcgen05.wait::ld before registers are used: ptxas waits
    EQUAL_STORES = auto()  # several programs store to one place, all of them equal bytes


@final
class UnknownInstructionError(NotImplementedError):
    """A kernel has an instruction, a modifier or a directive that the virtual GPU does not have."""
