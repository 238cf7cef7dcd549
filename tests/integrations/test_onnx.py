"""Programs in ONNX, run by onnxruntime and by ONNX's own reference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_graph as ag
from attn_graph.errors import GraphError
from tests.support.leaving import (
    CASES,
    LARGER,
    TRACED,
    Call,
    Case,
    run_by_name,
    run_onnxruntime,
    to_onnx,
)

WHY = "needs onnx, onnxruntime and onnxscript"
pytest.importorskip("onnxruntime", reason=WHY)
pytest.importorskip("onnxscript", reason=WHY)
reference = pytest.importorskip("onnx.reference", reason=WHY)

OPSETS = (20, 23, 24, 25)
pytestmark = [  # of others' own
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, in the reference
]
Model = Any  # of onnx


def run_reference(model: Model, tensors: Sequence[Tensor]) -> list[Tensor]:
    evaluator = reference.ReferenceEvaluator(model)
    return run_by_name(lambda feeds: evaluator.run(None, feeds), model, tensors)


RUNTIMES = {"onnxruntime": run_onnxruntime, "the reference": run_reference}


def check(case: Case, model: Model, who: str) -> None:
    for sizes in (TRACED, LARGER) if case.dynamic else (TRACED,):
        tensors = case.tensors(sizes)
        for name, run_model in RUNTIMES.items():
            results = run_model(model, [*tensors.values()])
            case.check(tensors, results, f"{case}, {who}, {name}, {sizes}")


def kinds(model: Model) -> list[str]:
    return [node.op_type for node in model.graph.node]


IN_TURN = [  # each case in one opset; in the others `make deep` has it
    pytest.param(
        case, opset, id=f"{case}-{opset}", marks=() if n % len(OPSETS) == turn else pytest.mark.deep
    )
    for n, case in enumerate(CASES)
    for turn, opset in enumerate(OPSETS)
]


@pytest.mark.parametrize(("case", "opset"), IN_TURN)
def test_a_call_is_what_it_was_in_each_opset(case: Case, opset: int) -> None:
    program = case.export(dynamic=case.dynamic).run_decompositions(ag.decompositions(onnx=opset))
    model = to_onnx(program, opset)
    said = case.opset is not None and opset >= case.opset
    assert kinds(model).count("Attention") == said, kinds(model)
    check(case, model, f"opset {opset}")


@pytest.mark.parametrize("name", ["join", "key lengths and causal", "statistics", "alibi"])
def test_a_module_is_exported_as_it_is(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    tensors = case.tensors(TRACED)
    model = to_onnx(
        Call(tuple(tensors)[3:], dict(case.options)).eval(),
        20,
        args=tuple(tensors.values()),
        dynamic_shapes=None,
    )
    assert "Attention" not in kinds(model)
    results = run_onnxruntime(model, [*tensors.values()])
    case.check(tensors, results, name)


def test_plain_calls_are_one_node_and_lengths_are_an_input() -> None:
    def nodes(name: str, opset: int) -> list[Any]:
        case = next(c for c in CASES if c.name == name)
        program = case.export().run_decompositions(ag.decompositions(onnx=opset))
        return [*to_onnx(program, opset).graph.node]

    (node,) = nodes("causal from the top left", 23)
    assert [a.name for a in node.attribute if a.name == "is_causal"] == ["is_causal"]
    assert len(nodes("plain", 23)) == len(nodes("window from the top left", 25)) == 1
    node = next(n for n in nodes("key lengths and causal", 24) if n.op_type == "Attention")
    assert len(node.input) == 7
    assert node.input[3] == ""


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_what_lengths_declare_absent_is_never_seen_in_onnx(opset: int) -> None:
    case = next(c for c in CASES if c.name == "key lengths and causal")
    model = to_onnx(case.export().run_decompositions(ag.decompositions(onnx=opset)), opset)
    tensors = case.tensors(TRACED)
    clean = {name: t.clone() for name, t in tensors.items()}
    for name in "kv":
        for b, n in enumerate(tensors["kv_lengths"]):
            tensors[name][b, :, n:] = torch.nan
    for name, run_model in RUNTIMES.items():
        case.check(clean, run_model(model, [*tensors.values()]), name)


def test_half_precision_is_within_the_rule_of_its_scores() -> None:
    """Attention computes scores in float16: within twice the error of the formula in float16."""
    case = next(c for c in CASES if c.name == "causal to the bottom right")
    model = to_onnx(
        case.export(dtype=torch.float16).run_decompositions(ag.decompositions(onnx=24)), 24
    )
    tensors = case.tensors(LARGER, torch.float16)
    case.check(tensors, run_onnxruntime(model, [*tensors.values()]), "float16")


def test_a_call_that_attention_does_not_say_tells_why(caplog: pytest.LogCaptureFixture) -> None:
    case = next(c for c in CASES if c.name == "negative scale")
    with caplog.at_level(logging.INFO, "attn_graph.integrations.onnx"):
        case.export().run_decompositions(ag.decompositions(onnx=24))
    assert "the square root of the scale, -0.3" in caplog.text


@pytest.mark.parametrize("opset", [17, 2.5, "24"])
def test_another_opset_is_refused_by_name(opset: Any) -> None:
    with pytest.raises(GraphError, match="is not an opset from 18 on"):
        ag.decompositions(onnx=opset)
