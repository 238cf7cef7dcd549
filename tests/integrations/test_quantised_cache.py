"""A model, made from a config, that decodes over a cache in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

import transformers as hf
from transformers.cache_utils import Cache, DynamicLayer

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.testing import rule
from attn_graph.testing.agreement import check_outputs
from tests.lowering.test_cudnn_quantised import cudnn, modelled
from tests.support.cudnn_graphs import aligned
from tests.support.models import DECODER, VOCABULARY, Model, build

KIND, END = torch.float8_e4m3fn, 448.0
Pair = tuple[torch.Tensor, torch.Tensor]


def make_llama() -> Model:
    return build(hf.LlamaForCausalLM, hf.LlamaConfig, **DECODER, head_dim=16)()


def quantise(x: torch.Tensor) -> Pair:
    """x in 8 bits, with a scale a row."""
    scale = x.abs().amax(-1, keepdim=True).float() / END
    return (x / scale).to(KIND), scale


class EightBits(DynamicLayer):  # type: ignore[misc]  # of transformers
    """Keys and values in float8, and a scale a row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales: tuple[torch.Tensor, ...] = ()
        self.keys: torch.Tensor
        self.values: torch.Tensor

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> Pair:
        (k, k_scale), (v, v_scale) = quantise(key), quantise(value)
        if self.scales:
            k, v = (torch.cat(x, -2) for x in ((self.keys, k), (self.values, v)))
            scales = zip(self.scales, (k_scale, v_scale), strict=True)
            k_scale, v_scale = (torch.cat(x, -2) for x in scales)
        self.keys, self.values, self.scales = k, v, (k_scale, v_scale)
        self.is_initialized = True
        return self.read()

    def read(self) -> Pair:
        return self.keys, self.values


class Dequantised(EightBits):
    """The same numbers, handed to attention in float32."""

    def read(self) -> Pair:
        k_scale, v_scale = self.scales
        return self.keys.float() * k_scale, self.values.float() * v_scale


def decode(model: Model, layer: type[EightBits]) -> torch.Tensor:
    prompt = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = Cache(layer_class_to_replicate=layer)
    model.cache_of_test = cache
    tokens: torch.Tensor = model.generate(
        prompt, past_key_values=cache, max_new_tokens=6, do_sample=False
    )
    return tokens


def call_of(tensors: dict[str, torch.Tensor], scaling: float) -> ag.Graph:
    specs: dict[str, Any] = {name: ag.TensorSpec.like(x) for name, x in tensors.items()}
    return ag.attention(**specs, scale=scaling, mask=ag.Causal("bottom_right"))


def test_tokens_of_a_cache_in_8_bits_are_those_of_its_numbers() -> None:
    model, steps = make_llama(), set[int]()
    due = decode(model, Dequantised)

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        mask: torch.Tensor | None, scaling: float, **_: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        k_scale, v_scale = model.cache_of_test.layers[module.layer_idx].scales
        tensors = {"q": query, "k": key, "v": value, "k_scale": k_scale, "v_scale": v_scale}
        graph = call_of(tensors, scaling)
        plan = ag.compile(graph, target="cpu")
        (o,) = check_outputs(plan, graph, [*tensors.values()])
        steps.add(query.shape[2])
        return o.transpose(1, 2), None

    hf.AttentionInterface.register("in_8_bits", attend)
    model.set_attn_implementation("in_8_bits")
    assert torch.equal(decode(model, EightBits), due)
    assert steps == {9, 1}


def test_decoding_all_in_8_bits_by_cudnn_is_within_the_rule() -> None:
    """By the model of its kernels, which round weights to 8 bits: one scale a tensor."""
    model, steps = make_llama().bfloat16(), set[int]()

    def in_eight(x: torch.Tensor) -> Pair:
        scale = (x.abs().amax().float() / END).reshape(1, 1, 1, 1)
        return aligned((x.float() / scale).to(KIND).contiguous()), scale

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        mask: torch.Tensor | None, scaling: float, **__: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        own = dict(zip("qkv", map(in_eight, (query, key, value)), strict=True))
        tensors = {name: x for name, (x, _) in own.items()}
        tensors |= {f"{name}_scale": aligned(scale) for name, (_, scale) in own.items()}
        graph = call_of(tensors, scaling)
        (o,) = modelled(cudnn.seen(simplify(graph)))(*tensors.values())[0]
        (due,) = rule.expect_outputs(graph, [*tensors.values()], "fp8")
        due.check(o)
        steps.add(query.shape[2])
        return o.transpose(1, 2), None

    hf.AttentionInterface.register("by_cudnn_in_8_bits", attend)
    model.set_attn_implementation("by_cudnn_in_8_bits")
    prompt = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    assert model.generate(prompt, max_new_tokens=6, do_sample=False).shape == (2, 15)
    assert steps == {9, 1}
