"""Programs in PTX, written by hand, on a virtual GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attn_graph.testing.gpu.apart import run_launch
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.instructions import translate
from attn_graph.testing.gpu.maps import MAP
from attn_graph.testing.gpu.memory import Memory
from attn_graph.testing.gpu.program import Launch
from attn_graph.testing.gpu.regions import Unset

REGISTERS = """
 .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<160>; .reg .b64 %d<32>;
"""


def run_ptx(
    body: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    threads: int = 32,
    shared: int = 4096,
    programs: int = 1,
    seed: int | None = None,
    unset: Unset | None = None,
    omits: frozenset[Omission] = frozenset(),
    boxes: Mapping[str, tuple[int, int]] | None = None,
    processes: int = 1,
) -> set[str]:
    """Execute statements, in which a tensor's name is the parameter with its address; the notes.

    `%d0` and on hold the addresses of the tensors in their order, and `%r0` the thread's number.
    boxes: of tensors with two axes; the parameter `x_map` is the tensor map of such boxes of x.
    """
    parameters = ", ".join(
        [f".param .u64 {name}" for name in tensors]
        + [f".param .align 64 .b8 {name}_map[128]" for name in boxes or ()]
    )
    loads = "".join(f" ld.param.b64 %d{n}, [{name}];\n" for n, name in enumerate(tensors))
    text = (
        f".extern .shared .align 16 .b8 global_smem[];\n.entry kernel({parameters}) "
        f".reqntid {threads} {{{REGISTERS}{loads} mov.u32 %r0, %tid.x;\n{body}\n ret;\n}}\n"
    )
    given = {name: t.data_ptr().to_bytes(8, "little") for name, t in tensors.items()}
    given |= {f"{name}_map": map_of(tensors[name], box) for name, box in (boxes or {}).items()}
    memory = Memory.around(tensors, unset or Unset())
    sizes = (programs, 1, 1), threads, shared
    launch = Launch(translate(text), *sizes, given, memory, seed, omits=omits)
    run_launch(launch, memory, processes)
    return launch.notes


def map_of(x: torch.Tensor, box: tuple[int, int]) -> bytes:
    """The tensor map of a matrix, as the stand-in for the driver writes it; nothing is swizzled."""
    shape, stride, none = [*x.shape[::-1]], x.stride(0) * x.itemsize, [0] * 3
    sizes = (*shape, *none, stride, *none, *box[::-1], *none)
    return MAP.pack(x.data_ptr(), *sizes, 2, x.itemsize, 0, 0).ljust(128, b"\0")
