"""Kernels of other libraries, executed, against PyTorch: `make peers-virtual` installs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from attn_graph.testing.gpu import Omission, virtual_gpu

LAST_BITS = 1e-5  # of float32: sums in another order
TF32 = 2.0**-7  # products by tf32 or bfloat16, a few after another, of numbers near 1
OMITS = {  # by flash-linear-attention: sums in two orders, and tiles of which only a part is used
    Omission.UNEQUAL_STORES,
    Omission.UNWRITTEN_LOADS,
}
pytestmark = pytest.mark.slow
LIGER = importlib.import_module("tests.support.liger_cases").CASES
FLA = importlib.import_module("tests.support.fla_cases").CASES


def check(got: list[torch.Tensor], due: list[torch.Tensor], allowed: float) -> None:
    for a, b in zip(got, due, strict=True):
        assert (a.float() - b).norm() <= allowed * b.norm() + 1e-6


@pytest.mark.parametrize("name", LIGER)
def test_a_function_of_liger_kernel_gives_what_pytorch_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel")
    if name == "dyt":  # it asks PyTorch for the kind of device, by which it counts multiprocessors
        monkeypatch.setattr("liger_kernel.ops.dyt.infer_device", lambda: "cuda")
    cases, case = importlib.import_module("tests.support.liger_cases"), LIGER[name]
    with virtual_gpu("h100") as device:
        function: Callable[..., object] = getattr(
            importlib.import_module("liger_kernel.ops"), case.name
        ).apply
        got = cases.results(function, case, *case.after)
    check(got, cases.results(case.due, case), LAST_BITS)
    assert device.programs


@pytest.mark.parametrize("name", FLA)
def test_a_function_of_flash_linear_attention_gives_its_definition(name: str) -> None:
    cases, case = importlib.import_module("tests.support.fla_cases"), FLA[name]
    with virtual_gpu("h100", omits=OMITS) as device:
        pytest.importorskip("fla.ops")  # it asks for the GPU where it is imported
        got = cases.results(case, False)
    check(got, cases.results(case, True), TF32)
    assert device.programs
