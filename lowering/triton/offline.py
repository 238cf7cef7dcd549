"""Kernels compiled for a GPU that need not be there, and what their machine code says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.lowering.triton.launches import Launch, Tensors, kernel
from attn_graph.lowering.triton.plan import Flash
from attn_graph.spec import dense_strides, memory_order

# Bytes of shared memory that one program may ask for: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability", less the 1 KiB that the system keeps.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
LEAST_SHARED = 101376

INSTRUCTIONS = {  # in PTX: matrix products, and copies that run beside them
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
}


@final
@frozen
class MachineCode:
    """The machine code of one kernel.

    spilled: bytes of registers that were moved to memory, a thread. serialized: whether matrix
    products of one warp group wait for each other, for want of registers.
    """

    kernel: str
    registers: int
    shared: int
    spilled: int
    serialized: bool
    warps: int
    instructions: tuple[tuple[str, int], ...]
    ptx: str

    def __str__(self) -> str:
        found = ", ".join(f"{count} {name}" for name, count in self.instructions if count)
        worse = f", {self.spilled} bytes spilled" if self.spilled else ", nothing spilled"
        worse += ", matrix products serialized" if self.serialized else ""
        return (
            f"{self.kernel}: {self.registers} registers, {self.shared} bytes of shared memory"
            f"{worse}; {found or 'no matrix instruction'}"
        )


@final
class Driver:
    """Stands in for a GPU's driver while Triton compiles; it launches nothing."""

    def __init__(self, sm: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.sm = sm
        self.target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> Any:  # Any: Triton's
        return self.target

    def get_current_device(self) -> str:
        return f"sm_{self.sm}"  # no number of a device: Triton keeps what it compiled by it

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def driven(sm: int) -> Iterator[None]:
    """Within this block Triton compiles for `sm`, whatever is in the machine.

    For a GPU of another kind than the machine's, other threads must not launch kernels meanwhile.
    """
    from triton.runtime import driver

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == divmod(sm, 10):
        yield
        return
    before = driver._active
    stand_in: Any = Driver(sm)  # Any: Triton asks for its own base class, and for no more than this
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


def machine_codes(flash: Flash) -> list[MachineCode]:
    """The machine code of every launch, for the target's compute capability."""
    from triton.runtime.jit import MockTensor

    tensors: dict[str, Any] = {name: MockTensor(dtype) for name, dtype in flash.dtypes().items()}
    o = (flash.problem.B, flash.problem.H, flash.problem.M, flash.problem.E)
    tensors["o.strides"] = dense_strides(o, memory_order(flash.problem.specs[0]))
    return [inspect_launch(launch, tensors, flash.target.sm) for launch in flash.launches]


def inspect_launch(launch: Launch, tensors: Tensors, sm: int) -> MachineCode:
    """What the machine code of a launch's kernel says; `tensors` stand for the pointers."""
    with driven(sm):
        found = kernel(launch.kernel).warmup(grid=(1,), **launch.arguments(tensors))
    ptx: str = found.asm["ptx"]
    registers, spilled, waits = resources(found.asm["cubin"])
    counts = tuple((name, len(re.findall(form, ptx))) for name, form in INSTRUCTIONS.items())
    return MachineCode(
        kernel=launch.kernel,
        registers=registers,
        shared=found.metadata.shared,
        spilled=spilled,
        serialized=waits > len(re.findall(r"wgmma\.wait_group", ptx)),
        warps=launch.warps,
        instructions=counts,
        ptx=ptx,
    )


@lru_cache(maxsize=1024)
def resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack, and waits for matrix products, by the tools in Triton's wheel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with TemporaryDirectory() as away:
        path = Path(away) / f"{sha256(cubin).hexdigest()[:16]}.cubin"
        path.write_bytes(cubin)
        usage = output(str(tools / "cuobjdump"), "-res-usage", str(path))
        code = output(str(tools / "nvdisasm"), "-c", str(path))
    (registers,), (stack,) = (re.findall(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return int(registers), max(int(stack), spills), code.count("WARPGROUP.DEPBAR")


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
