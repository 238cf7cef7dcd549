"""Programs without an operator of ours: what they compute, and what stays as it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import assume, given
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

import attn_graph as ag
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import fuse, simplify
from attn_graph.masks.places import Place, Term
from attn_graph.nn import decomposition
from attn_graph.nn.functional import attention
from attn_graph.nn.ops import OP
from attn_graph.testing import expect_outputs, graphs, seeds, tensors_for
from tests.support.leaving import CASES, LARGER, TRACED, Call, Case, as_results, operators
from tests.support.sources import ROOT
from tests.support.tracing import traces

pytestmark = [  # of torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@given(graphs(), seeds)
def test_any_graph_is_written_in_functional_operations_by_the_rule(graph: Graph, seed: int) -> None:
    assume(not any(eqn.op.names == ("p",) for eqn in graph.eqns))  # dropout
    tensors = tensors_for(graph, seed)
    dues = expect_outputs(graph, tensors)
    for form in (fuse(graph), simplify(graph)):
        write = dispatch_functionalize(decomposition.compute, FunctionalTensorMode())
        for due, x in zip(dues, write(form, [*tensors], False), strict=True):
            due.check(x)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_leaves_in_core_operations_for_any_sizes(case: Case) -> None:
    program = case.export(dynamic=case.dynamic).run_decompositions(ag.decompositions())
    known = operators(program)
    assert known, "the program computes nothing"
    assert not [op for op in known if torch.Tag.core not in op.tags]
    for sizes in (TRACED, LARGER) if case.dynamic else (TRACED,):
        tensors = case.tensors(sizes)
        results = as_results(program.module()(*tensors.values()))
        case.check(tensors, results, f"{case} at {sizes}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["causal to the bottom right", "soft cap", "bias", "statistics"])
def test_a_call_leaves_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    case = next(c for c in CASES if c.name == name)
    program = case.export(dtype=dtype).run_decompositions(ag.decompositions())
    tensors = case.tensors(LARGER, dtype)
    case.check(tensors, as_results(program.module()(*tensors.values())), str(case))


def test_what_lengths_declare_absent_is_never_seen_by_a_program() -> None:
    case = next(c for c in CASES if c.name == "key lengths and causal")
    program = case.export().run_decompositions(ag.decompositions())
    tensors = case.tensors(TRACED)
    due = program.module()(*tensors.values())
    for name in "kv":
        for b, n in enumerate(tensors["kv_lengths"]):
            tensors[name][b, :, n:] = torch.nan
    assert torch.equal(program.module()(*tensors.values()), due)


@pytest.mark.parametrize(("joined", "compares"), [("and", False), ("or", True)])
def test_a_program_compares_weights_with_0_where_lengths_alone_hide_no_key(
    joined: str, compares: bool
) -> None:
    case = next(c for c in CASES if c.name == f"key lengths {joined} causal")
    program = case.export().run_decompositions(ag.decompositions())
    calls = [(n.target, *n.args[1:]) for n in program.graph.nodes if n.op == "call_function"]
    assert ((torch.ops.aten.eq.Scalar, 0) in calls) == compares


@final
@frozen
class Squash(ag.Modifier):
    """A step that writes in place, as users' own do."""

    def change(self, s: Tensor, at: Place) -> Tensor:
        s.mul_(0.5)
        s.tanh_()
        return s


@final
@frozen
class Checkers(ag.Mask):
    def keep(self, at: Place) -> Term:
        return (at.i + at.j) % 2 == 0


def test_masks_and_steps_of_a_users_own_leave_too() -> None:
    case = Case("own", {"mask": Checkers(), "modifiers": (Squash(),)})
    program = case.export().run_decompositions(ag.decompositions())
    assert not [op for op in operators(program) if op._schema.is_mutable]
    q, k, v = case.tensors(LARGER).values()
    torch.testing.assert_close(
        program.module()(q, k, v), attention(q, k, v, **case.options), atol=1e-6, rtol=1e-6
    )


def test_the_program_of_a_plan_has_its_sizes() -> None:
    case = next(c for c in CASES if c.name == "join")
    tensors = case.tensors(TRACED)
    plan = ag.compile(case.graph(tensors))

    class Planned(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:  # Any: o
            return plan(*tensors)

    program = torch.export.export(Planned(), tuple(tensors.values()))
    program = program.run_decompositions(ag.decompositions())
    assert OP not in operators(program)
    case.check(tensors, as_results(program.module()(*tensors.values())), "plan")


def test_dropout_is_refused_by_name() -> None:
    case = Case("dropout", {"dropout": 0.5})
    with pytest.raises(Exception, match=r"dropout can't leave .* call model\.eval\(\)"):
        case.export().run_decompositions(ag.decompositions())


class Packed(nn.Module):
    """A packed batch of two sequences."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:  # Any: o
        mask = ag.Causal("top_left")
        return attention(q, k, v, q_starts=starts, kv_starts=starts, mask=mask, max_lengths=(5, 5))


def packed_inputs() -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, 8, 4, 16).unbind()
    return q, k, v, torch.tensor([0, 3, 8])


def test_packed_rows_are_refused_by_name() -> None:
    program = torch.export.export(Packed(), packed_inputs())
    with pytest.raises(Exception, match=r"packed rows or pages can't leave .* kv_lengths="):
        program.run_decompositions(ag.decompositions())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the decomposition."""
    calls: list[str] = []

    def count(tensors: Sequence[Tensor], text: str, saves: bool = False) -> list[Tensor]:
        calls.append(text)
        return decomposition.decompose(tensors, text, saves)

    monkeypatch.setitem(decomposition_table, OP, count)
    return calls


@traces
def test_exports_fake_tensors_and_compiled_code_keep_the_operator(counted: list[str]) -> None:
    case = next(c for c in CASES if c.name == "causal to the bottom right")
    tensors = [*case.tensors(TRACED).values()]
    assert OP in operators(case.export())
    assert OP in operators(case.export().run_decompositions())
    with FakeTensorMode() as mode:
        Call((), dict(case.options))(*map(mode.from_tensor, tensors))
    for dynamic in (False, True):
        torch._dynamo.reset()
        for t in tensors:
            t.requires_grad_()
        compiled = torch.compile(Call((), dict(case.options)), backend="aot_eager", dynamic=dynamic)
        compiled(*tensors).sum().backward()
    assert counted == []


def test_importing_the_library_imports_no_exporter() -> None:
    code = """
import sys, torch
before = {*sys.modules}
import attn_graph
slow = ("onnx", "torch.onnx", "torch._dynamo", "torch._subclasses.functional_tensor")
loaded = [m for m in {*sys.modules} - before if m.startswith((*slow, "attn_graph.integrations"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
