"""A GPU without a GPU: Triton's compiled kernels, executed and checked on a CPU.

    with virtual_gpu("h100") as device:
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        o = plan(q, k, v)  # tensors of the CPU

Needs numpy, Triton and a C compiler, as Triton itself does.
"""

from attn_graph.testing.gpu.device import VirtualGpu, virtual_gpu
from attn_graph.testing.gpu.faults import Fault, Omission, UnknownInstructionError

__all__ = ["Fault", "Omission", "UnknownInstructionError", "VirtualGpu", "virtual_gpu"]
