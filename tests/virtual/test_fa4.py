"""FlashAttention 4's own host code and kernels on virtual GPUs, by the accuracy rule.

The package is not ours: here it is called as its users call it.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from attn_graph.testing.gpu import Fault, virtual_gpu
from attn_graph.testing.gpu.dsl import find_package
from tests.support.fa4_cases import CASES, execute

pytestmark = [
    pytest.mark.skipif(
        find_package() is None or find_spec("cutlass") is None,
        reason="flash-attn-4 is not installed",
    ),
    pytest.mark.filterwarnings("ignore"),  # of the package, when it is imported
]
FAST = ("h100", "lists, one tile"), ("b200", "one query of one key")
MOST = 1.0  # of what the rule allows


@pytest.mark.parametrize(("name", "case"), FAST)
def test_the_package_runs_both_passes_on_a_virtual_gpu(name: str, case: str) -> None:
    with virtual_gpu(name) as device:
        before = device.programs
        assert execute(device, CASES[case], backward=True) <= MOST
        assert device.programs > before


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["h100", "b200"])
def test_every_feature_agrees_with_the_reference(name: str, case: str) -> None:
    wide = name == "b200" and CASES[case].D >= 128  # a backward is for clusters of two programs
    with virtual_gpu(name) as device:
        assert execute(device, CASES[case], backward=not wide) <= MOST


def test_tensors_of_the_cpu_are_refused_outside_of_the_block() -> None:
    with virtual_gpu("h100"):
        from flash_attn.cute import interface
    x = torch.randn(1, 16, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        interface._flash_attn_fwd(x, x, x)


@pytest.mark.slow
def test_bytes_of_tensors_that_nothing_was_written_to_are_not_read() -> None:
    with virtual_gpu("h100"):
        from flash_attn.cute import interface

        q, k = torch.randn(1, 64, 1, 64).bfloat16(), torch.empty(1, 64, 1, 64, dtype=torch.bfloat16)
        with pytest.raises(Fault, match="to which nothing was written"):
            interface._flash_attn_fwd(q, k, q)


PACKAGE_FAULTS = {  # version 4.0.0b36: a test that fails says that another one has mended it
    "h100": "several programs store equal bytes to argument 4",  # log2 of sums, past their tiles
    "b200": "it ends before the wait for a bulk store",  # sums of grouped dk and dv
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGE_FAULTS)
def test_what_a_backward_of_the_package_leaves_out_is_known(name: str) -> None:
    with virtual_gpu(name) as device:
        execute(device, CASES["causal, groups"], backward=True)
        assert any(PACKAGE_FAULTS[name] in note for note in device.notes)
