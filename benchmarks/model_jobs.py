"""Whole models, made from configs, and what people do with them: forward, a step, generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import transformers as hf
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn import functional as F

import attn_graph as ag
from attn_graph.integrations.transformers import NAME
from attn_graph.spec import NAMES

Model = Any  # of transformers
Call = Callable[[], Tensor]
HF, TORCH = ("eager", "sdpa"), ("torch",)  # the peers of models of each library
WIDTH, LAYERS, HEADS, GROUPS, HEAD, WINDOW = 256, 4, 8, 2, 64, 256
BATCH = 8  # of PyTorch's own layers
PLAIN: dict[str, Any] = {  # Any: what a config takes
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 4096,
}  # fmt: skip
DECODER = PLAIN | {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD}
TEXT = PLAIN | {"num_attention_heads": 4}
IMAGES: dict[str, Any] = {  # Any: as above
    "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "image_size": 224, "patch_size": 16,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
SLIDING = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
SQUARED = {"query_pre_attn_scalar": HEAD}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {  # Any: as above
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig, DECODER),
    "Qwen 3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, DECODER),
    "Mistral, window 256": (
        hf.MistralForCausalLM, hf.MistralConfig, DECODER | {"sliding_window": WINDOW}
    ),
    "Gemma 2, window 256": (hf.Gemma2ForCausalLM, hf.Gemma2Config, DECODER | SLIDING | SQUARED),
    "Gemma 3, window 256": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, DECODER | SLIDING | SQUARED),
    "gpt-oss, window 256": (
        hf.GptOssForCausalLM, hf.GptOssConfig,
        DECODER | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "BERT": (hf.BertForMaskedLM, hf.BertConfig, TEXT),
    "ModernBERT": (
        hf.ModernBertForMaskedLM, hf.ModernBertConfig,
        TEXT | {"global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "ViT": (hf.ViTForImageClassification, hf.ViTConfig, IMAGES),
    "DINOv2": (
        hf.Dinov2Model, hf.Dinov2Config,
        {n: x for n, x in IMAGES.items() if n != "intermediate_size"} | {"mlp_ratio": 2},
    ),
    "SigLIP": (hf.SiglipVisionModel, hf.SiglipVisionConfig, IMAGES),
    "T5": (
        hf.T5ForConditionalGeneration, hf.T5Config,
        {"vocab_size": 64, "d_model": WIDTH, "d_kv": HEAD, "d_ff": 512, "num_layers": LAYERS,
         "num_heads": 4, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1},
    ),
    "Whisper": (
        hf.WhisperForConditionalGeneration, hf.WhisperConfig,
        {"vocab_size": 64, "num_mel_bins": 8, "d_model": WIDTH, "encoder_layers": LAYERS,
         "decoder_layers": LAYERS, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "max_source_positions": 500,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1,
         "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}  # fmt: skip


@frozen
class WholeJob:
    """A model and what is done with it. make: of an implementation, a call; `same` results are
    those of the peers. rows: which of their first two axes mean something, if not all."""

    name: str
    kind: str
    make: Callable[[str], Call]
    peers: tuple[str, ...] = HF
    same: bool = True
    rows: Tensor | None = field(default=None, eq=False)


def made(name: str, implementation: str, dtype: torch.dtype, training: bool = False) -> Model:
    """A model with random weights, the same ones each time."""
    torch.manual_seed(0)
    model, config, options = MODELS[name]
    whole = model(config(**options)).to(dtype)
    whole.set_attn_implementation(implementation)
    return whole.train(training)


def draw(name: str, B: int, M: int, padded: str = "", dtype: torch.dtype = torch.float32) -> Any:
    """What a model is called with. padded: at which side texts are, if at one."""
    torch.manual_seed(1)
    if issubclass(MODELS[name][1], (hf.ViTConfig, hf.Dinov2Config, hf.SiglipVisionConfig)):
        return {"pixel_values": torch.randn(B, 3, 224, 224, dtype=dtype)}
    if name == "Whisper":
        sound = torch.randn(B, 8, 1000, dtype=dtype)
        return {"input_features": sound, "decoder_input_ids": torch.randint(2, 64, (B, M))}
    ids, keep = torch.randint(2, 64, (B, M)), torch.ones(B, M, dtype=torch.long)
    for b in range(B if padded else 0):
        keep[
            b, slice(0, b * M // (2 * B)) if padded == "left" else slice(M - b * M // (2 * B), M)
        ] = 0
    more = {"decoder_input_ids": ids[:, : M // 2]} if name == "T5" else {}
    return {"input_ids": ids, "attention_mask": keep} | more


def forward(
    name: str, B: int, M: int, padded: str, dtype: torch.dtype, implementation: str
) -> Call:
    """The first result of a model, for a batch."""
    model, given = made(name, implementation, dtype), draw(name, B, M, padded, dtype)

    def run() -> Tensor:
        with torch.no_grad():
            o: Tensor = model(**given)[0]
        return o

    return run


def step(
    name: str, B: int, M: int, padded: str, dtype: torch.dtype, training: bool, implementation: str
) -> Call:
    """A forward and a backward. training: with dropout, where a model has some."""
    model, given = made(name, implementation, dtype, training), draw(name, B, M, padded, dtype)

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        o: Tensor = model(**given)[0]
        o.float().square().mean().backward()
        return o.detach()

    return run


def generate(
    name: str, B: int, M: int, padded: str, dtype: torch.dtype, cache: str, implementation: str
) -> Call:
    """Greedy generation of 64 tokens, after prompts of other lengths in each call."""
    model, turn = made(name, implementation, dtype), iter(range(10**6))

    def run() -> Tensor:
        given = draw(name, B, M + 8 * (next(turn) % 8), padded, dtype)
        tokens: Tensor = model.generate(
            **given, max_new_tokens=64, do_sample=False, cache_implementation=cache
        )
        return tokens[:, -64:]

    return run


def hide_padding(M: int) -> Tensor:
    """Which of M tokens [BATCH,M] are padding."""
    return torch.arange(M) >= M - torch.arange(BATCH)[:, None] * (M // 16)


def layers(
    kind: str, padded: bool, causal: bool, training: bool, M: int, implementation: str
) -> Call:
    """PyTorch's own layers, as they are or in a block of `replace_sdpa`. kind: of layers."""
    torch.manual_seed(0)
    rate = 0.1 if training else 0.0
    x = torch.randn(BATCH, M, WIDTH)
    hidden = hide_padding(M) if padded else None
    mask = nn.Transformer.generate_square_subsequent_mask(M) if causal else None
    block: Any = partial(ag.replace_sdpa) if implementation == NAME else nullcontext
    if kind == "MultiheadAttention":
        heads = nn.MultiheadAttention(WIDTH, 4, rate, batch_first=True).train(training)
        call = partial(heads, x, x, x, key_padding_mask=hidden, need_weights=False)
    elif kind == "TransformerDecoder":
        inner = nn.TransformerDecoderLayer(WIDTH, 4, 512, rate, batch_first=True)
        decoder = nn.TransformerDecoder(inner, LAYERS).train(training)
        call = partial(decoder, x, x, tgt_mask=mask, tgt_is_causal=causal)
    else:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 512, rate, batch_first=True)
        encoder = nn.TransformerEncoder(layer, LAYERS).train(training)
        call = partial(encoder, x, mask, hidden, causal)

    def run() -> Tensor:
        with block(), torch.set_grad_enabled(training):
            made = call()
            o: Tensor = made[0] if isinstance(made, tuple) else made
            if training:
                o.square().mean().backward()
        return o.detach()

    return run


def images(kind: str, implementation: str) -> Call:
    """Attention of the shapes of a diffusion model's blocks: a DiT's, and a UNet's on 32 x 32."""
    torch.manual_seed(0)
    shapes = [(2, 6, 256, 256, 64)] * 4
    if kind == "UNet":
        shapes = [(2, 8, 1024, 1024, 40), (2, 8, 1024, 77, 40), (2, 8, 256, 256, 80),
                  (2, 8, 256, 77, 80), (2, 8, 64, 64, 160)]  # fmt: skip
    given = [
        [torch.randn(B, n, H, D).transpose(1, 2) for n in (M, N, N)] for B, H, M, N, D in shapes
    ]
    block: Any = partial(ag.replace_sdpa) if implementation == NAME else nullcontext

    def run() -> Tensor:
        with block(), torch.no_grad():
            return torch.cat(
                [F.scaled_dot_product_attention(q, k, v).flatten() for q, k, v in given]
            )

    return run


def list_jobs() -> Iterator[WholeJob]:
    """All jobs, those of transformers first."""
    yield from decoder_jobs()
    yield from cache_jobs()
    yield from encoder_jobs()
    yield from image_jobs()
    yield from layer_jobs()


def decoder_jobs() -> Iterator[WholeJob]:
    """Of 1,024 tokens, and generation after short and long prompts."""
    f32, bf16 = torch.float32, torch.bfloat16
    for name in (name for name, (_, _, options) in MODELS.items() if "head_dim" in options):
        for dtype in (f32, bf16) if name in ("Llama", "Mistral, window 256") else (f32,):
            short = f"{name}, {NAMES[dtype]}"
            work = partial(forward, name, 1, 1024, "", dtype)
            yield WholeJob(f"{short} (1 x 1024)", "forward", work)
            work = partial(step, name, 1, 1024, "", dtype, False)
            yield WholeJob(f"{short} (1 x 1024)", "step", work)
            for tokens in (16, 1024):
                work = partial(generate, name, 1, tokens, "", dtype, "dynamic")
                what, exact = f"{short}, 64 tokens after {tokens}", dtype is torch.float32
                yield WholeJob(what, "generate", work, same=exact)


def cache_jobs() -> Iterator[WholeJob]:
    """Generation by caches of each kind, and after prompts of several lengths."""
    for cache, B, padded in (("dynamic", 4, "left"), ("static", 1, ""), ("static", 4, "left")):
        work = partial(generate, "Llama", B, 200, padded, torch.float32, cache)
        what = f"Llama, {cache} cache, 64 tokens after {B} x 200{', left padded' * bool(padded)}"
        yield WholeJob(what, "generate", work)


def encoder_jobs() -> Iterator[WholeJob]:
    """Of texts, padded and not, and of speech; and training with dropout."""
    f32, sizes = torch.float32, {"BERT": (8, 128), "ModernBERT": (4, 512), "T5": (4, 256)}
    cases = [(name, *size, padded) for name, size in sizes.items() for padded in ("", "right")]
    for name, B, M, padded in (*cases, ("Whisper", 2, 64, "")):
        short = f"{name}{', padded' * bool(padded)} ({B} x {M})"
        rows = None  # all, as those of T5's decoder
        if padded and name != "T5":
            rows = draw(name, B, M, padded)["attention_mask"].bool()
        yield WholeJob(short, "forward", partial(forward, name, B, M, padded, f32), rows=rows)
        work = partial(step, name, B, M, padded, f32, False)
        yield WholeJob(short, "step", work, rows=rows)
    work = partial(step, "BERT", 8, 128, "", f32, True)
    yield WholeJob("BERT, dropout (8 x 128)", "step", work, same=False)


def image_jobs() -> Iterator[WholeJob]:
    """Of images, and the attention of models that make some."""
    for name in ("ViT", "DINOv2", "SigLIP"):
        f32 = torch.float32
        yield WholeJob(f"{name} (4 images)", "forward", partial(forward, name, 4, 0, "", f32))
        yield WholeJob(f"{name} (4 images)", "step", partial(step, name, 4, 0, "", f32, False))
    for kind in ("DiT", "UNet"):
        yield WholeJob(f"attention of a {kind}", "forward", partial(images, kind), TORCH)


def layer_jobs() -> Iterator[WholeJob]:
    """PyTorch's own layers under `replace_sdpa`: inference, padded, causal, and training."""
    ways = {"": (False, False, False), ", padded": (True, False, False)}
    ways |= {", causal": (False, True, False), ", dropout": (False, False, True)}
    left = {"MultiheadAttention": ", causal", "TransformerDecoder": ", padded"}
    for kind in ("MultiheadAttention", "TransformerEncoder", "TransformerDecoder"):
        for what, (padded, causal, training) in ways.items():
            if left.get(kind) != what:
                M, pass_ = 1024 if causal else 128, "step" if training else "forward"
                work = partial(layers, kind, padded, causal, training, M)
                name, rows = f"nn.{kind}{what} (8 x {M})", ~hide_padding(M) if padded else None
                yield WholeJob(name, pass_, work, TORCH, same=not training, rows=rows)
