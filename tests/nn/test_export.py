"""torch.export and AOTInductor: files that say what runs, for processes that have attn_graph."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_graph as ag
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from attn_graph.nn.varlen import varlen_attn
from tests.support.planning import one_way
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
    q, k, v, lengths = inputs(16)
    q.requires_grad_()
    with one_way("kernel"):
        each = exported(Call()).module(), Call()
        gradients = [torch.autograd.grad(m(q, k, v, lengths).sum(), q)[0] for m in each]
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
def test_another_process_runs_an_aot_inductor_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes as exported, for other lengths too, and has no gradient, as all packages."""
    monkeypatch.setenv("CI", "1")  # then Inductor is stricter about operators
    file, tensors = str(tmp_path / "model.pt2"), inputs(21)
    torch._inductor.aoti_compile_and_package(exported(Call()), package_path=file)
    due = Call()(*tensors)
    assert torch.equal(torch._inductor.aoti_load_package(file)(*tensors), due)
    check_elsewhere(Path(file), tensors, due)


def by_rows(call: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    """Of one sequence whose rows are known at run time, heads and head sizes as 2 and 8."""
    q, k = (t.view(1, -1, 2, 8).transpose(1, 2) for t in (x, y))
    return call(q, k, k)


def by_entries(call: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    """Of a batch of as many sequences of one row."""
    q = x.view(-1, 1, 2, 8).transpose(1, 2)
    return call(q, q, q)


def in_columns(call: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    """Of two sequences, whose heads lie outermost."""
    q, k = (t.view(-1, 2, 2, 4).permute(1, 2, 0, 3) for t in (x, y))
    return call(q, k, k)


def one_after_another(call: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    starts = torch.tensor([0, 0], dtype=torch.int32)
    q, k = (t.view(-1, 2, 8) for t in (x, y))
    return varlen_attn(q, k, k, starts, starts.clone(), 16, 16)


def heads_innermost(call: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    """Of packed rows; o lies as q, and is read by its strides."""
    starts = torch.tensor([0, 0], dtype=torch.int32)
    q, k = (t.view(-1, 8, 2).transpose(1, 2) for t in (x, y))
    return call(q, k, k, starts, starts.clone(), 16, 16).transpose(1, 2).view(-1, 16)


SELECTIONS = [
    (by_rows, attention),
    (by_rows, partial(attention, mask=ag.Causal("bottom_right"), soft_cap=3.0)),
    (by_rows, scaled_dot_product_attention),
    (by_entries, attention),
    (in_columns, attention),
    (one_after_another, None),
    (heads_innermost, varlen_attn),
]


class Selected(torch.nn.Module):
    """Attention of rows that data select."""

    def __init__(self, how: Any, call: Any) -> None:
        super().__init__()
        self.how, self.call = how, call

    def forward(self, x: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> Any:
        return self.how(self.call, x[rows], x[keys])


@traces
@pytest.mark.parametrize(
    ("how", "call", "whole"),
    [
        *((*each, False) for each in SELECTIONS),
        *((*each, True) for each in (SELECTIONS[1], SELECTIONS[5])),
    ],
)
def test_rows_that_data_select_are_exported_and_compiled_whole(
    how: Any, call: Any, whole: bool
) -> None:
    """Their number is known at run time, and may be 0."""
    module, x, none = Selected(how, call), torch.randn(12, 16), torch.zeros(12, dtype=torch.bool)
    some, other = torch.arange(12) % 2 == 0, torch.arange(12) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        if whole:
            torch._dynamo.reset()
            run = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
        else:
            run = torch.export.export(module, (x, some, other)).module()
        for rows, keys in ((some, other), (other, some), (none, some), (some, none), (none, none)):
            torch.testing.assert_close(run(x, rows, keys), module(x, rows, keys))
            if whole:
                leaf = x.clone().requires_grad_()
                run(leaf, rows, keys).sum().backward()
