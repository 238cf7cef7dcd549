"""Triton's own tutorials on virtual GPUs: `make tutorials-virtual TUTORIALS=.../python/tutorials`.

Each runs as it is, checks of its results included, but with smaller sizes; benchmarks are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, final

import pytest
import torch
from attrs import frozen

from attn_graph.testing.gpu import VirtualGpu, virtual_gpu
from tests.support.fa4_own import OnCpu

FOLDER = Path(os.environ.get("TUTORIALS", "."))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Triton, when it compiles others' kernels
    pytest.mark.skipif(not (FOLDER / "01-vector-add.py").exists(), reason="$TUTORIALS is not set"),
]


@final
@frozen
class Tutorial:
    """kernels: that it launches. edits: of its text. calls: of its functions, after it has run.

    major: the least compute capability, over ten. late: calls on GPUs with a copy engine.
    """

    kernels: tuple[str, ...]
    edits: Mapping[str, str] = {}
    calls: tuple[tuple[Any, ...], ...] = ()
    major: int = 8
    late: tuple[tuple[Any, ...], ...] = ()


SIZES = (128, 256, 64)
ATTENTION = (("test_op", 1, 2, 128, 64, causal, False, "bwd", "triton-fp16") for causal in (0, 1))
ROOM = "C = torch.empty((M, N), device=DEVICE, dtype=A.dtype)"
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "mixed")
TUTORIALS = {
    "01-vector-add": Tutorial(("add_kernel",), {"98432": "3000"}),
    "02-fused-softmax": Tutorial(("softmax_kernel",), {"1823": "37"}),
    "03-matrix-multiplication": Tutorial(("matmul_kernel",), {"(512, 512)": "(96, 96)"}),
    "04-low-memory-dropout": Tutorial(("_dropout", "_seeded_dropout")),
    "05-layer-norm": Tutorial(
        ("_layer_norm_fwd_fused", "_layer_norm_bwd_dx_fused", "_layer_norm_bwd_dwdb"),
        {"1151, 8192": "9, 300"},
    ),
    "06-fused-attention": Tutorial(
        ("_attn_fwd", "_attn_bwd_preprocess", "_attn_bwd"),
        calls=(*ATTENTION,),
        late=(("test_op", 1, 2, 128, 64, False, True, "bwd", "triton-fp16"),),  # specialized warps
    ),
    "07-extern-functions": Tutorial(
        ("asin_kernel",),
        {"current_dir.parent.parent / 'third_party/nvidia/backend/lib'": "LIBRARY"},
    ),
    "08-grouped-gemm": Tutorial(
        ("grouped_matmul_kernel",),
        {  # addresses of tensors are in tables; the kernel has no masks
            "1024": "256",
            "512": "128",
            "tri_out = group": "GPU.reachable += [*group_A, *group_B, *group_B_T]\ntri_out = group",
            ROOM: f"{ROOM}; GPU.reachable.append(C)",
        },
    ),
    "09-persistent-matmul": Tutorial(
        ("matmul_kernel", "matmul_kernel_persistent"),
        {"nvidia.cublas.CublasLt(device_workspace)": "None"},
        (("validate", *SIZES, torch.float16),),
    ),
    "10-block-scaled-matmul": Tutorial(
        ("block_scaled_matmul_kernel",),
        {  # numbers of 4 bits have no scales for cuBLAS, which its function returns all the same
            "nvidia.cublas.CublasLt(cublas_workspace)": "None",
            "# Flatten scales for cuBLAS": "a_scale_cublas = b_scale_cublas = None",
        },
        (*(("validate_block_scaled", 128, 256, 512, x) for x in FORMATS),),
        major=10,
    ),
    "11-programmatic-dependent-launch": Tutorial(
        ("add_kernel",), calls=(("validate", 3000),), major=9
    ),
}
BY_COPY_ENGINE = {  # kernels on GPUs that have one
    "08-grouped-gemm": ("grouped_matmul_tma_kernel",),
    "09-persistent-matmul": (
        *(f"matmul_kernel_{name}" for name in ("tma", "tma_persistent", "descriptor_persistent")),
    ),
}


class Nothing:
    """In place of a benchmark."""

    def run(self, **options: object) -> None: ...


def no_report(*given: object) -> Callable[[object], Nothing]:
    return lambda function: Nothing()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tutorials import or ask for, beside Triton."""
    stream = SimpleNamespace(cuda_stream=0)
    plain: Mapping[str, Any] = {
        "tabulate": SimpleNamespace(tabulate=lambda *given, **options: ""),
        "triton.profiler": SimpleNamespace(scope=lambda *given, **options: nullcontext()),
    }
    for module, stand_in in plain.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    triton = importlib.import_module("triton")
    monkeypatch.setattr(triton, "profiler", plain["triton.profiler"], raising=False)
    monkeypatch.setattr(triton.testing, "perf_report", no_report)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *given: stream)


def run(name: str, text: str, folder: Path, device: VirtualGpu) -> ModuleType:
    """Execute a text as a module, from a file where Triton finds the source of its kernels."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"tutorial_{name[:2]}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    triton = Path(importlib.import_module("triton").__file__ or "").parent
    vars(module).update(GPU=device, LIBRARY=triton / "backends/nvidia/lib")
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
@pytest.mark.parametrize("name", TUTORIALS)
@pytest.mark.usefixtures("prepared")
def test_a_tutorial_of_triton_runs(name: str, gpu: str, tmp_path: Path) -> None:
    tutorial, text = TUTORIALS[name], (FOLDER / f"{name}.py").read_text()
    for before, after in tutorial.edits.items():
        assert before in text
        text = text.replace(before, after)
    with virtual_gpu(gpu) as device, OnCpu():
        if device.target.sm < 10 * tutorial.major:
            pytest.skip(f"it is for compute capability {tutorial.major}.0 on")
        module = run(name, text, tmp_path, device)
        late = tutorial.late if device.target.sm >= 90 else ()
        for function, *given in (*tutorial.calls, *late):
            getattr(module, function)(*given)
    extra = BY_COPY_ENGINE.get(name, ()) if device.target.sm >= 90 else ()
    assert {*device.kernels} == {*tutorial.kernels, *extra}
