"""Compiles Triton's launches for any GPU, here or not, and reads their machine code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.lowering.codegen.launches import Launch, Tensors, is_interpreting, load_kernel
from attn_graph.machine.cache import remember

INSTRUCTIONS = {  # in PTX: matrix products, and copies beside them
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
}


@final
@frozen
class MachineCode:
    """The resources of one kernel's machine code.

    registers: of one thread. shared: bytes of shared memory of one program. spilled: bytes of
    registers of one thread moved to memory by the compiler. serialized: True if matrix products of
    one warp group wait for each other because registers are short. renewed: how often the assembler
    begins products anew because one of their registers is set late (its info C7519), so they do not
    follow each other closely. instructions: how often each kind of INSTRUCTIONS stands in the code.
    sass: the machine code as text.
    """

    kernel: str
    registers: int
    shared: int
    spilled: int
    serialized: bool
    renewed: int
    warps: int
    instructions: tuple[tuple[str, int], ...]
    sass: str
    ptx: str

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.instructions if count)
        worse = f", {self.spilled:,} bytes spilled" if self.spilled else ", nothing spilled"
        worse += ", matrix products serialized" if self.serialized else ""
        worse += f", matrix products begun anew {self.renewed} times" if self.renewed else ""
        return (
            f"{self.kernel}: {self.registers} registers, {self.shared:,} bytes of shared memory"
            f"{worse}; {counts or 'no matrix instruction'}"
        )


@final
class Driver:
    """Stands for a GPU's driver while Triton compiles. It launches nothing."""

    def __init__(self, sm: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.sm = sm
        self.target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> Any:  # Any: Triton's
        """The GPU to compile for."""
        return self.target

    def get_current_device(self) -> str:
        """A device's number, for Triton."""
        return f"sm_{self.sm}"  # not a device's number: Triton's cache uses this as a key

    def get_current_stream(self, device: object) -> int:
        """A stream, for Triton. Nothing is launched on it."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of PyTorch's tensors."""
        return torch.device("cpu")


@contextmanager
def compile_for(sm: int) -> Iterator[None]:
    """Within this block Triton compiles for `sm` on a machine with any GPU, or none.

    If `sm` is another kind of GPU, no other thread may launch kernels during the block.
    """
    from triton.runtime import driver

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == divmod(sm, 10):
        yield
        return
    before = driver._active
    stand_in: Any = Driver(sm)  # Any: Triton's annotation names its base class
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


def inspect_launches(
    launches: Sequence[Launch], dtypes: Mapping[str, torch.dtype], sm: int
) -> list[MachineCode]:
    """As `compile_launches`, of launches alone. dtypes: of their tensors, by name.

    Nothing under the interpreter.
    """
    from triton.runtime.jit import MockTensor

    tensors = {name: MockTensor(dtype) for name, dtype in dtypes.items()}
    return [] if is_interpreting() else [inspect_launch(x, tensors, sm) for x in launches]


def compile_launch(launch: Launch, tensors: Tensors, sm: int) -> Any:  # Any: Triton's
    """Compile the kernel of one launch. tensors: mock tensors for its pointers."""
    with compile_for(sm):
        return load_kernel(launch.kernel).warmup(grid=(1,), **launch.arguments(tensors))


def inspect_launch(launch: Launch, tensors: Tensors, sm: int) -> MachineCode:
    """Compile the kernel of one launch. Returns the needs of its machine code."""
    return inspect_compiled(compile_launch(launch, tensors, sm), launch.kernel, launch.warps)


def inspect_compiled(compiled: Any, name: str, warps: int) -> MachineCode:  # Any: Triton's
    """The needs of the machine code of a compiled kernel."""
    ptx: str = compiled.asm["ptx"]
    registers, spilled, waits, starts, sass = read_resources(compiled.asm["cubin"])
    counts = tuple((name, len(re.findall(form, ptx))) for name, form in INSTRUCTIONS.items())
    return MachineCode(
        kernel=name,
        registers=registers,
        shared=compiled.metadata.shared,
        spilled=spilled,
        serialized=waits > len(re.findall(r"wgmma\.wait_group", ptx)),
        renewed=max(0, starts - len(re.findall(r"wgmma\.fence", ptx))),
        warps=warps,
        instructions=counts,
        sass=sass,
        ptx=ptx,
    )


@remember
def read_resources(cubin: bytes) -> tuple[int, int, int, int, str]:
    """Registers and bytes of stack of a thread, instructions to wait for products and to begin
    them, and the code."""
    usage, code = disassemble(cubin)
    (registers,), (stack,) = (re.findall(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    waits, starts = code.count("WARPGROUP.DEPBAR"), code.count("WARPGROUP.ARRIVE")
    return int(registers), max(int(stack), spills), waits, starts, code


def disassemble(cubin: bytes) -> tuple[str, str]:
    """A kernel's resources, and its instructions, as the tools in Triton's wheel print them."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with TemporaryDirectory() as away:
        path = Path(away) / f"{sha256(cubin).hexdigest()[:16]}.cubin"
        path.write_bytes(cubin)
        usage = run_tool(str(tools / "cuobjdump"), "-res-usage", str(path))
        return usage, run_tool(str(tools / "nvdisasm"), "-c", str(path))


def run_tool(*command: str) -> str:
    """The output of a program. Raises CalledProcessError if it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
