"""Models with wide heads, made from configs: Gemma 4, and DeepSeek V3 with absorbed keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

import attn_graph as ag
from attn_graph.integrations import transformers as integration
from attn_graph.testing.agreement import check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.lowering.test_lowering import planned
from tests.support.models import ALTERNATING, DECODER, VOCABULARY, Model, build

BACKEND = "triton" if ag.Target.of("cpu").interprets else "math"
LATENT, TURNED, PLAIN, VALUES = 512, 64, 16, 8  # elements of a head, as DeepSeek V3 and small
FEW = {"max_new_tokens": 3, "do_sample": False}


def prompt() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


def make_gemma() -> Model:
    return build(
        hf.Gemma4ForCausalLM,
        hf.Gemma4TextConfig,
        **DECODER,
        head_dim=16,
        sliding_window=8,
        layer_types=ALTERNATING,
        hidden_size_per_layer_input=0,
    )()


def test_gemma_4_gives_the_tokens_that_eager_gives() -> None:
    model = make_gemma()
    due = model.generate(prompt(), **FEW)
    model.set_attn_implementation("attn_graph")
    assert torch.equal(model.generate(prompt(), **FEW), due)
    layers = integration.explain_layers(model, "cpu", input_ids=prompt())
    wide = [x.graph for x in layers.values() if x.graph.inputs[0].spec.shape[-1] == 512]
    assert wide
    check_outputs(planned(wide[0], BACKEND), wide[0], tensors_for(wide[0], 0))


def keep_latent(
    module: object, kv_nope: torch.Tensor, k_rot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys as the cache has them, in place of `expand_kv`."""
    return torch.cat((kv_nope, k_rot), -1), kv_nope


def attend_absorbed(
    module: Any,  # Any: a DeepseekV3Attention
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """q takes the part of kv_b_proj that makes keys, and o the one that makes values."""
    weights = module.kv_b_proj.weight.view(module.num_heads, PLAIN + VALUES, LATENT)
    plain, turned = query.split((PLAIN, TURNED), -1)
    q = torch.cat((torch.einsum("bhmd,hdl->bhml", plain, weights[:, :PLAIN]), turned), -1)
    like = ag.TensorSpec.like
    causal = ag.Causal("bottom_right")
    graph = ag.attention(like(q), like(key), LATENT, scale=scaling, mask=causal)
    o = ag.compile(graph, target="cpu", backends=(BACKEND,))(q, key)
    o = torch.einsum("bhml,hel->bmhe", o, weights[:, PLAIN:])
    return o, None


def test_deepseek_v3_absorbed_gives_the_tokens_that_eager_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config,
        **DECODER | {"num_key_value_heads": DECODER["num_attention_heads"]},
        kv_lora_rank=LATENT,
        qk_rope_head_dim=TURNED,
        qk_nope_head_dim=PLAIN,
        v_head_dim=VALUES,
        q_lora_rank=None,
        first_k_dense_replace=9,
    )()
    due = model.generate(prompt(), **FEW)
    hf.AttentionInterface.register("absorbed", attend_absorbed)
    model.set_attn_implementation("absorbed")
    monkeypatch.setattr(deepseek.DeepseekV3Attention, "expand_kv", keep_latent)
    assert torch.equal(model.generate(prompt(), **FEW), due)
