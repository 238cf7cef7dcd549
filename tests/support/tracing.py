"""A mark of tests that need torch.compile to trace calls."""

import pytest

from attn_graph.nn.tracing import KEEPS_CONSTANTS

WHY = "torch.compile traces calls from torch 2.12 on"
traces = pytest.mark.skipif(not KEEPS_CONSTANTS, reason=WHY)
