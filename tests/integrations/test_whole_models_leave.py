"""Models of transformers in other runtimes: with any batch, length and padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

import attn_graph as ag
import attn_graph.integrations.transformers  # registers it with transformers
from attn_graph.testing import allowance, distance
from tests.support.leaving import operators, run_onnxruntime, to_onnx
from tests.support.models import FAMILIES, VOCABULARY
from tests.support.transformer_calls import model_of

pytestmark = [  # of others' own
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TRACED, LARGER = (2, 10), (3, 17)
Run = Callable[[list[Tensor]], Tensor]


class Logits(nn.Module):
    """A model as a function of named tensors alone."""

    def __init__(self, use: Use, *how: Any) -> None:  # Any: an implementation, perhaps a dtype
        super().__init__()
        self.model, self.names = model_of(use.family, *how).eval(), use.names

    def forward(self, *inputs: Tensor) -> Tensor:
        named: dict[str, Any] = dict(zip(self.names, inputs, strict=True))  # Any: or a flag
        if "input_ids" in named and hasattr(self.model.config, "num_key_value_heads"):
            named["use_cache"] = False
        logits = self.model(**named).logits
        assert isinstance(logits, Tensor)
        return logits


@frozen
class Use:
    """A family of models, and what its model reads."""

    family: str
    names: tuple[str, ...]
    left: bool = False  # padding comes before the text

    def __str__(self) -> str:
        return f"{self.family}, {' and '.join(self.names)}"

    def inputs(self, sizes: tuple[int, int]) -> list[Tensor]:
        torch.manual_seed(sizes[0])
        B, length = sizes
        if self.names == ("pixel_values",):
            return [torch.randn(B, 3, 24, 24)]
        ids = torch.randint(2, VOCABULARY, (B, length))
        padding = torch.ones(B, length, dtype=torch.int64)
        padding[0, slice(3) if self.left else slice(-3, None)] = 0
        return [ids, padding][: len(self.names)]

    @property
    def axes(self) -> tuple[dict[int, Any], ...]:  # Any: sizes of torch.export
        both = {0: Dim.AUTO, 1: Dim.AUTO}
        return ({0: Dim.AUTO},) if self.names == ("pixel_values",) else (both,) * len(self.names)

    def seen(self, x: Tensor, inputs: list[Tensor]) -> Tensor:
        """The rows of real tokens."""
        return x[inputs[1].bool()] if len(self.names) > 1 else x

    def check(self, run: Run, who: str) -> None:
        """Raise AssertionError unless logits are eager attention's in float64, by the rule."""
        for sizes in (TRACED, LARGER):
            inputs = self.inputs(sizes)
            low, exact = Logits(self, "eager"), Logits(self, "eager", torch.float64)
            doubles = [x.double() if x.is_floating_point() else x for x in inputs]
            with torch.no_grad():
                refs = self.seen(exact(*doubles), inputs), self.seen(low(*inputs), inputs)
            x = self.seen(run(inputs), inputs)
            error, most = distance(x, refs[0]), allowance(refs[0], refs[1], torch.float32)
            assert error <= most, f"{self}, {who}, {sizes}: error {error:.3g}, allowed {most:.3g}"


USES = (
    Use("Llama", ("input_ids",)),
    Use("Llama", ("input_ids", "attention_mask"), left=True),
    Use("Gemma 2", ("input_ids", "attention_mask"), left=True),
    Use("BERT", ("input_ids", "attention_mask")),
    Use("ViT", ("pixel_values",)),
)


def export(use: Use) -> ExportedProgram:
    model, inputs = Logits(use, "attn_graph"), use.inputs(TRACED)
    with torch.no_grad():
        return torch.export.export(model, tuple(inputs), dynamic_shapes={"inputs": use.axes})


def attentions(model: Any) -> int:  # Any: of onnx
    return [node.op_type for node in model.graph.node].count("Attention")


def ways(use: Use) -> Iterator[tuple[str, Any, int]]:  # Any: a model of onnx
    """A bare export, and one with ONNX's Attention for each layer that it says."""
    model = Logits(use, "attn_graph")
    axes = {"inputs": use.axes}
    yield "opset 20", to_onnx(model, 20, args=tuple(use.inputs(TRACED)), dynamic_shapes=axes), 0
    program = export(use).run_decompositions(ag.decompositions(onnx=24))
    yield "opset 24", to_onnx(program, 24), FAMILIES[use.family].make().config.num_hidden_layers


SOME = [  # `make deep` has the others
    pytest.param(use, id=str(use), marks=() if n in (1, 3, 4) else pytest.mark.deep)
    for n, use in enumerate(USES)
]


@pytest.mark.parametrize("use", SOME)
def test_a_model_in_onnx_is_what_it_was(use: Use) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    for who, model, count in ways(use):
        assert attentions(model) == count, who
        use.check(lambda inputs, m=model: run_onnxruntime(m, inputs)[0], who)  # type: ignore[misc]  # of a default


@pytest.mark.parametrize("use", USES, ids=str)
def test_a_model_in_openvino_is_what_it_was(use: Use) -> None:
    openvino = pytest.importorskip("openvino", reason="needs openvino: `make exits`")
    program = export(use).run_decompositions(ag.decompositions())
    assert not [op for op in operators(program) if op.namespace == "attn_graph"]
    compiled = openvino.Core().compile_model(
        openvino.convert_model(program), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    use.check(lambda xs: torch.tensor(compiled([x.numpy() for x in xs])[0]), "OpenVINO")
