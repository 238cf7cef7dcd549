"""Latent attention (MLA) on CPUs: steps of decoding, over one latent row for each token.

vLLM's own class computes prompts, from other tensors than the latent rows, and writes the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from attn_graph.compiler import compile as compile_graph
from attn_graph.integrations.vllm.layers import SEQUENCES
from attn_graph.integrations.vllm.steps import OfVllm
from attn_graph.ir.builder import attention
from attn_graph.plan import Plan
from attn_graph.spec import TensorSpec
from attn_graph.spec.dims import Dim


class LatentAttention(CPUMLAImpl):
    """A layer. plan: made by its first step."""

    def __init__(self, *args: Any, **named: Any) -> None:  # as vLLM passes them
        super().__init__(*args, **named)
        self.sequences: int = get_current_vllm_config().scheduler_config.max_num_seqs
        self.plan: Plan | None = None

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: OfVllm,
        layer: OfVllm,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """q [B,H,576], perhaps as its parts of 512 and 64, cache [n,P,576] -> o [B,H,512]."""
        q = torch.cat(q, -1) if isinstance(q, tuple) else q.contiguous()
        pool, B = kv_c_and_k_pe_cache.unsqueeze(2), q.shape[0]
        pages = attn_metadata.decode.block_table[:B]
        if self.plan is None:
            size, ints = Dim(SEQUENCES, self.sequences), torch.int32
            graph = attention(
                TensorSpec((size, q.shape[1], 1, q.shape[2]), q.dtype),
                TensorSpec.like(pool),
                self.kv_lora_rank,
                scale=self.scale,
                pages=TensorSpec((size, pages.shape[1]), ints),
                kv_lengths=TensorSpec((size,), ints),
            )
            self.plan = compile_graph(graph)
        o = self.plan(
            q[:, :, None], pool, pages=pages, kv_lengths=attn_metadata.decode.seq_lens[:B]
        )
        assert isinstance(o, Tensor)
        return o.squeeze(2), None


class LatentBackend(CPUMLABackend):
    """In the places of CPU_MLA and AMX_MLA."""

    @staticmethod
    def get_impl_cls() -> type[LatentAttention]:
        return LatentAttention
