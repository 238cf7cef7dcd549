"""What tests of PyTorch's tracing and modes share."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from attn_graph.nn.tracing import KEEPS_CONSTANTS

WHY = "torch.compile traces calls from torch 2.12 on"
traces = pytest.mark.skipif(not KEEPS_CONSTANTS, reason=WHY)


class Watch(TorchDispatchMode):
    """A mode that sees every operation and changes none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        return func(*args, **(kwargs or {}))
