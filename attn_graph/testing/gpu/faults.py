"""What a virtual GPU raises."""

from typing import final


@final
class Fault(AssertionError):
    """A compiled kernel does what a GPU does not define, or another GPU might do otherwise.

    The message names the kernel, the program, the line of the PTX and the line of the source.
    """


@final
class UnknownInstructionError(NotImplementedError):
    """A kernel has an instruction, a modifier or a directive that the virtual GPU does not have."""
