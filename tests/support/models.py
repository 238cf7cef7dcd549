"""Small models of transformers with random weights, by the names of their families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from attrs import frozen
from torch import Tensor, nn
from transformers.masking_utils import eager_mask

Model = Any  # of transformers
ROUGH = "rough"  # the name of `attend_roughly` in transformers
VOCABULARY, WIDTH, HEADS, GROUPS, HEAD, LAYERS = 61, 32, 4, 2, 8, 2
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODER = {name: DECODER[name] for name in DECODER if name != "num_key_value_heads"}
ALTERNATING = ["sliding_attention", "full_attention"]
WINDOW = 8


def attend_roughly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Eager attention whose p = exp(s - lse) are off by as much as they may be, at random.

    s is known to u * t, t = |scale| sum|q k| + |bias|, lse to u * |lse|, and their difference is
    rounded: p is off by 2 u (t + |lse|) of itself, as docs/semantics.md has it.
    """
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    s, t = scaling * query @ k.mT, scaling * query.abs() @ k.abs().mT
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if position_bias is not None:
        s, t = s + position_bias, t + position_bias.abs()
    if attention_mask is not None:
        s = s + attention_mask
    lse = s.logsumexp(-1, keepdim=True)
    if s_aux is not None:
        lse = torch.logaddexp(lse, s_aux[:, None, None])
    off = torch.finfo(s.dtype).eps * (t + lse.abs()).detach()
    p = torch.exp(s - lse) * (1 + off * (2 * torch.rand_like(s) - 1))
    return (p @ v).transpose(1, 2).contiguous(), None


hf.AttentionInterface.register(ROUGH, attend_roughly)
hf.AttentionMaskInterface.register(ROUGH, eager_mask)


@frozen
class Family:
    """Models of one kind. reads: what they are called with. packs: whether position ids that
    begin again separate sequences, of which transformers' gpt-oss does not tell the masks."""

    make: Callable[[], Model]
    reads: str
    packs: bool = True


def build(model: type[Any], config: type[Any], **options: Any) -> Callable[[], Model]:
    """A function that makes a model with random weights, the same ones each time."""

    def make() -> Model:
        torch.manual_seed(0)
        made = model(config(**options, attn_implementation="eager"))
        for parameter in made.parameters():  # sinks, position biases and norms are trained too
            nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.5)
        return made.eval()

    return make


def make_gpt_oss() -> Model:
    """gpt-oss, whose experts have no other product in float64."""
    model = build(
        hf.GptOssForCausalLM, hf.GptOssConfig, **DECODER, head_dim=HEAD, sliding_window=WINDOW,
        layer_types=ALTERNATING, num_local_experts=4, num_experts_per_tok=2,
    )()  # fmt: skip
    model.set_experts_implementation("eager")
    return model


FAMILIES = {
    "Llama": Family(build(hf.LlamaForCausalLM, hf.LlamaConfig, **DECODER), "tokens"),
    "Mistral": Family(
        build(hf.MistralForCausalLM, hf.MistralConfig, **DECODER, sliding_window=WINDOW), "tokens"
    ),
    "Llama 4": Family(
        build(
            hf.Llama4ForCausalLM,
            hf.Llama4TextConfig,
            **DECODER,
            head_dim=HEAD,
            attention_chunk_size=WINDOW,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            moe_layers=[],
            intermediate_size_mlp=48,
        ),
        "tokens",
    ),
    "Qwen 3": Family(
        build(hf.Qwen3ForCausalLM, hf.Qwen3Config, **DECODER, head_dim=HEAD), "tokens"
    ),
    "Gemma 2": Family(
        build(
            hf.Gemma2ForCausalLM,
            hf.Gemma2Config,
            **DECODER,
            head_dim=HEAD,
            sliding_window=WINDOW,
            query_pre_attn_scalar=HEAD,
            layer_types=ALTERNATING,
        ),
        "tokens",
    ),
    "Gemma 3": Family(
        build(
            hf.Gemma3ForCausalLM,
            hf.Gemma3TextConfig,
            **DECODER,
            head_dim=HEAD,
            sliding_window=WINDOW,
            query_pre_attn_scalar=HEAD,
            layer_types=ALTERNATING,
        ),
        "tokens",
    ),
    "gpt-oss": Family(make_gpt_oss, "tokens", packs=False),
    "Whisper": Family(
        build(
            hf.WhisperForConditionalGeneration,
            hf.WhisperConfig,
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            d_model=WIDTH,
            max_source_positions=20,
            max_target_positions=96,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        "speech",
    ),
    "ViT": Family(
        build(
            hf.ViTForImageClassification,
            hf.ViTConfig,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=24,
            patch_size=6,
            num_labels=5,
        ),
        "images",
    ),
    "T5": Family(
        build(
            hf.T5ForConditionalGeneration,
            hf.T5Config,
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=HEAD,
            d_ff=48,
            num_layers=LAYERS,
            num_heads=HEADS,
            pad_token_id=0,
            eos_token_id=None,
            decoder_start_token_id=1,
            dropout_rate=0.0,
        ),
        "pairs",
    ),
    "BERT": Family(build(hf.BertForMaskedLM, hf.BertConfig, **ENCODER), "text"),
    "ModernBERT": Family(
        build(
            hf.ModernBertForMaskedLM,
            hf.ModernBertConfig,
            **ENCODER,
            local_attention=2 * WINDOW,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        "text",
    ),
}
