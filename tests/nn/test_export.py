"""torch.export and AOTInductor: files that say what runs, for processes that have attn_graph."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attn_graph as ag
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from tests.support.sources import ROOT
from tests.support.tracing import traces

CPU = ag.Target.of("cpu")
pytestmark = [  # of torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Call(nn.Module):
    """Packed sequences of different lengths, without a plan."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        o = attention(q, k, v, mask=ag.Causal() & ag.Window(20), kv_lengths=lengths)
        assert isinstance(o, Tensor)
        return o + scaled_dot_product_attention(q, k, v, is_causal=True)


class Planned(nn.Module):
    """The same by a plan, for one length."""

    def __init__(self) -> None:
        super().__init__()
        x = ag.TensorSpec((2, 4, 32, 8), torch.float32)
        lengths = ag.TensorSpec((2,), torch.int64)
        graph = ag.attention(x, x, x, mask=ag.Causal() & ag.Window(20), kv_lengths=lengths)
        self.plan = ag.compile(graph, target=CPU)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        o = self.plan(q, k, v, kv_lengths=lengths)
        assert isinstance(o, Tensor)
        return o


def inputs(length: int) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, 2, 4, length, 8).unbind()
    return q, k, v, torch.tensor([length, 9])


def exported(module: nn.Module, *, strict: bool = False) -> torch.export.ExportedProgram:
    """With any length, where no plan fixes it."""
    length = {2: torch.export.Dim("length", min=2, max=4096)}
    shapes = None if isinstance(module, Planned) else (length, length, length, None)
    return torch.export.export(module, inputs(32), dynamic_shapes=shapes, strict=strict)


def stored(program: torch.export.ExportedProgram) -> io.BytesIO:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=traces)])
@pytest.mark.parametrize("kind", [Call, Planned])
def test_an_exported_program_comes_back_from_a_file(kind: type[nn.Module], strict: bool) -> None:
    module = kind()
    again = torch.export.load(stored(exported(module, strict=strict))).module()
    for length in (32,) if kind is Planned else (32, 77):
        tensors = inputs(length)
        assert torch.equal(again(*tensors), module(*tensors))


def test_an_exported_program_can_be_trained() -> None:
    module = exported(Call()).module()
    q, k, v, lengths = inputs(16)
    q.requires_grad_()
    gradients = [torch.autograd.grad(m(q, k, v, lengths).sum(), q)[0] for m in (module, Call())]
    assert torch.equal(*gradients)


LOAD = """
import sys
import torch
import attn_graph
q, k, v, lengths, due = torch.load(sys.argv[2])
if sys.argv[1].endswith(".pt2"):
    module = torch._inductor.aoti_load_package(sys.argv[1])
else:
    module = torch.export.load(sys.argv[1]).module()
torch.testing.assert_close(module(q, k, v, lengths), due)
"""


def check_elsewhere(file: Path, tensors: tuple[Tensor, ...], due: Tensor) -> None:
    """The file gives the same in another process."""
    data = file.with_suffix(".tensors")
    torch.save([*tensors, due], data)
    program = (sys.executable, "-P", "-W", "ignore", "-c", LOAD, str(file), str(data))
    subprocess.run(program, check=True, cwd=ROOT)


@traces
def test_another_process_runs_what_was_exported(tmp_path: Path) -> None:
    file, tensors = tmp_path / "model.bin", inputs(21)
    file.write_bytes(stored(exported(Call())).getvalue())
    check_elsewhere(file, tensors, Call()(*tensors))


@pytest.mark.slow
def test_another_process_runs_an_aot_inductor_package(tmp_path: Path) -> None:
    """It computes as exported, for other lengths too, and has no gradient, as all packages."""
    file, tensors = str(tmp_path / "model.pt2"), inputs(21)
    torch._inductor.aoti_compile_and_package(exported(Call()), package_path=file)
    due = Call()(*tensors)
    assert torch.equal(torch._inductor.aoti_load_package(file)(*tensors), due)
    check_elsewhere(Path(file), tensors, due)
