"""What vLLM asks of an attention backend. It is found by name: only vLLM imports this module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from attn_graph.errors import GraphError
from attn_graph.integrations.vllm.layers import FLOAT8, Kind, ServedLayer
from attn_graph.integrations.vllm.steps import Capacity, OfVllm, ServingStep, make_step

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}  # by vLLM's names of caches
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class StepBuilder(AttentionMetadataBuilder[ServingStep]):
    """Makes the step of layers with one cache spec. It reads no tensor on the host."""

    def __init__(
        self,
        kv_cache_spec: OfVllm,
        layer_names: list[str],
        vllm_config: OfVllm,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if isinstance(kv_cache_spec, CrossAttentionSpec):
            raise GraphError(f"{layer_names[0]}: attention to an encoder's keys is not supported")
        encodes = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self.page: int | None = None if encodes else kv_cache_spec.block_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ServingStep:
        return make_step(common_attn_metadata, self.page)


class LayerAttention(AttentionImpl[ServingStep]):
    """A layer of vLLM. kv_sharing_target_layer_name: another layer writes the cache; vLLM calls
    `do_kv_cache_update` of the other alone."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window or None  # 0 and None are the same
        kind = Kind(
            *(num_heads, self.num_kv_heads, head_size, self.scale, self.sliding_window),
            soft_cap=logits_soft_cap or None,
            slopes=None if alibi_slopes is None else tuple(alibi_slopes),
            sinks=sinks is not None,
            encodes=attn_type in ENCODERS,
            kv_cache_dtype=kv_cache_dtype,
        )
        limits = get_current_vllm_config().scheduler_config
        room = Capacity(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.layer = ServedLayer(kind, room, sinks)

    def forward(
        self,
        layer: OfVllm,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: ServingStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise GraphError("output_scale: results in 8 bits are not supported")
        if attn_metadata is not None:  # None: vLLM warms up
            cache = None if self.layer.kind.encodes else kv_cache
            scales = layer._k_scale, layer._v_scale
            self.layer.attend(attn_metadata, query, key, value, cache, output, scales)
        return output

    def do_kv_cache_update(
        self, layer: OfVllm, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.layer.kind.encodes:
            return
        steps = get_forward_context().attn_metadata
        step = steps[layer.layer_name] if isinstance(steps, dict) else steps
        self.layer.append(step, key, value, kv_cache, (layer._k_scale, layer._v_scale))


class GpuBackend(AttentionBackend):
    """The place CUSTOM of vLLM's registry."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *HALVES, *FLOAT8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LayerAttention]:
        return LayerAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: OfVllm = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *ENCODERS)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: OfVllm
    ) -> str | None:
        if HALVES.get(kv_cache_dtype or "auto", dtype) == dtype:
            return None
        return f"a cache in {kv_cache_dtype} needs queries in it, and they are in {dtype}"


class CpuBackend(GpuBackend):
    """In the place of CPU_ATTN, vLLM's one backend on CPUs."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # the rows of a head side by side, as PyTorch's kernel reads
