"""Tables of positions in models: T5's and Swin's blocks, beside their own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import SwinConfig, SwinModel, T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import attn_graph as ag
from attn_graph.nn.functional import attention
from attn_graph.testing.rule import allowance, distance
from tests.support.sources import ROOT, load_file

EXAMPLE = load_file(ROOT / "examples" / "position_tables.py")
Results = dict[str, torch.Tensor]


def check(own: Results, low: Results, ref: Results) -> None:
    """Raise AssertionError unless each result is as near to float64's as the rule asks."""
    assert own.keys() == low.keys() == ref.keys()
    for name, x in own.items():
        most = allowance(ref[name], low[name], x.dtype, gradient=name != "features")
        assert distance(x, ref[name]) <= most, name


@pytest.mark.parametrize("seed", range(3))
def test_a_swin_model_by_its_tables_is_its_eager_one(seed: int) -> None:
    torch.manual_seed(seed)
    images = torch.randn(2, 3, 64, 64)
    models = [SwinModel(SwinConfig(**EXAMPLE.CONFIG)) for _ in range(3)]
    for model, way in zip(models, ("tables", "eager", "eager"), strict=True):
        model.load_state_dict(models[0].state_dict())
        model.config._attn_implementation = way
    low = EXAMPLE.gradients(models[1], images)
    ref = EXAMPLE.gradients(models[2].double(), images.double())
    with EXAMPLE.tables_within():
        check(EXAMPLE.gradients(models[0], images), low, ref)


def attend_by_table(block: Any, x: torch.Tensor) -> torch.Tensor:  # Any: a T5Attention
    """A T5 block with its buckets of distances as one column for each distance."""
    far = block.relative_attention_max_distance
    apart, way = torch.arange(-far, far + 1), not block.is_decoder
    buckets = block._relative_position_bucket(apart, way, block.relative_attention_num_buckets, far)
    table = block.relative_attention_bias(buckets).T
    q, k, v = (
        f(x).unflatten(-1, (block.n_heads, -1)).transpose(1, 2) for f in (block.q, block.k, block.v)
    )
    step = ag.RelativeBias(2 * far + 1, "top_left")
    o = attention(q, k, v, scale=1.0, modifiers=(step,), table=table)
    assert isinstance(o, torch.Tensor)
    output: torch.Tensor = block.o(o.transpose(1, 2).flatten(2))
    return output


def results_of(block: Any, x: torch.Tensor, o: torch.Tensor) -> Results:  # Any: a T5Attention
    grads = torch.autograd.grad(o.square().sum(), [x, *block.parameters()])
    names = ("dx", *(name for name, _ in block.named_parameters()))
    return {"features": o.detach(), **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize("decodes", [False, True])
def test_a_t5_block_by_its_buckets_is_its_eager_one(decodes: bool) -> None:
    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=decodes, dropout_rate=0.0)
    block = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    x = torch.randn(2, 300, 32, requires_grad=True)
    own, low = (
        results_of(block, x, f(x))
        for f in (lambda x: attend_by_table(block, x), lambda x: block(x)[0])
    )
    wide, exact = block.double(), x.detach().double().requires_grad_()
    check(own, low, results_of(wide, exact, wide(exact)[0]))
