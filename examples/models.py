"""Who runs the attention of known models, on four machines, at what cost: nothing is run for it.

Shapes are those of the configurations that the models are published with; the comment on each row
names its repository on huggingface.co. Batches and lengths are ours where the model leaves them
open, and large models whose weights are published in float32 are asked in bf16, as they are run. A
row is one layer; `local` and `global` are the two kinds of layers that a model alternates.
Printed for the first machine: the most memory at one time, gradients too, and the least time that
the forward pass can take there.
"""

from math import log
from typing import Any, final

import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.extend import Place

TARGETS = ("h200", "a100", "b200", "cpu")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CAUSAL = ag.Causal()


@final
@frozen
class Chunks(ag.Mask):
    """A query sees the chunk of `size` positions that it is in."""

    size: int

    def keep(self, at: Place) -> Any:  # Any: an int, a tensor, or a symbol of generated code
        return at.i // self.size == at.j // self.size


def across(
    B: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype = BF16,
    keys: str = "bshd",
    **more: Any,  # Any: options of ag.attention
) -> ag.Graph:
    """heads: H and G; lengths: M and N; sizes: D and E. A model's projections lie as "bshd"."""
    (H, G), (M, N), (D, E) = heads, lengths, sizes
    q = ag.TensorSpec((B, H, M, D), dtype, layout="bshd")
    k, v = (ag.TensorSpec((B, G, N, size), dtype, layout=keys) for size in (D, E))
    return ag.attention(q, k, v, **more)


def within(*sizes: int, **more: Any) -> ag.Graph:  # Any: options of `across`
    """A sequence and itself, training or a prompt. sizes: B, H, G, length, head size."""
    B, H, G, S, D = sizes
    return across(B, (H, G), (S, S), (D, D), **more)


def step(*sizes: int, E: int | None = None, **more: Any) -> ag.Graph:  # Any: options of `across`
    """One new token of each sequence, and a cache that is full up to the sequence's length."""
    B, H, G, N, D = sizes
    lengths = numbers(B)
    return across(B, (H, G), (1, N), (D, E or D), keys="bhsd", kv_lengths=lengths, **more)


def back(length: int) -> ag.Mask:
    """The last `length` positions, a query's own among them, as models count their windows."""
    return ag.Window(length - 1)


def numbers(*shape: int) -> ag.TensorSpec:
    """Lengths of sequences, or the numbers of the documents that tokens are of."""
    return ag.TensorSpec(shape, torch.int32)


def floats(*shape: int, dtype: torch.dtype = F32) -> ag.TensorSpec:
    """A bias, or sinks."""
    return ag.TensorSpec(shape, dtype)


PACKED = numbers(1, 8192), numbers(1, 8192)  # documents, one after another
YARN = (0.1 * log(40) + 1) ** 2  # DeepSeek's mscale at its rope factor of 40
SHIFTED = ag.TensorSpec((64, 1, 49, 49), torch.bool)  # which patches were neighbours

# fmt: off
MODELS: dict[str, ag.Graph] = {
    # Decoders: B, heads of q, heads of k and v, length, head size
    "gpt2-training":  # openai-community/gpt2
        within(8, 12, 12, 1024, 64, dtype=F32, mask=CAUSAL, dropout=0.1),
    "llama-2-7b": within(4, 32, 32, 4096, 128, dtype=F16, mask=CAUSAL),  # meta-llama/Llama-2-7b-hf
    "llama-3-8b": within(1, 32, 8, 8192, 128, mask=CAUSAL),  # meta-llama/Meta-Llama-3-8B
    "llama-3-8b-packed": within(1, 32, 8, 8192, 128, mask=CAUSAL, segments=PACKED),  # the same
    "llama-3-70b-step": step(16, 64, 8, 8192, 128),  # meta-llama/Meta-Llama-3-70B
    "llama-4-scout-local":  # meta-llama/Llama-4-Scout-17B-16E: attention_chunk_size
        within(1, 40, 8, 16384, 128, mask=CAUSAL & Chunks(8192)),
    "mistral-7b": within(1, 32, 8, 8192, 128, mask=back(4096)),  # mistralai/Mistral-7B-v0.1
    "mistral-7b-step":  # the same
        step(16, 32, 8, 8192, 128, mask=back(4096), align="bottom_right"),
    "qwen-2.5-7b": within(1, 28, 4, 32768, 128, mask=CAUSAL),  # Qwen/Qwen2.5-7B
    "phi-3-mini": within(1, 32, 32, 4096, 96, mask=back(2047)),  # microsoft/Phi-3-mini-4k-instruct
    "phi-2": within(4, 32, 32, 2048, 80, dtype=F16, mask=CAUSAL),  # microsoft/phi-2
    "falcon-7b": within(4, 71, 1, 2048, 64, mask=CAUSAL),  # tiiuae/falcon-7b
    "gemma-2-9b-global":  # google/gemma-2-9b: query_pre_attn_scalar 256
        within(1, 16, 8, 8192, 256, mask=CAUSAL, soft_cap=50.0),
    "gemma-2-9b-local": within(1, 16, 8, 8192, 256, mask=back(4096), soft_cap=50.0),  # the same
    "gemma-3-27b-local":  # google/gemma-3-27b-pt: query_pre_attn_scalar 168
        within(1, 32, 16, 8192, 128, mask=back(1024), scale=168**-0.5),
    "gpt-oss-20b-local":  # openai/gpt-oss-20b
        within(1, 64, 8, 8192, 64, mask=back(128), sinks=floats(64)),
    "gpt-oss-20b-step": step(16, 64, 8, 8192, 64, sinks=floats(64)),  # the same
    "deepseek-v3":  # deepseek-ai/DeepSeek-V3: 128 and 64 with positions, values of 128
        across(1, (128, 128), (4096, 4096), (192, 128), mask=CAUSAL, scale=192**-0.5 * YARN),
    "deepseek-v3-step":  # the same: all heads read the compressed cache of 512 and 64
        step(16, 128, 1, 4096, 576, E=512, scale=192**-0.5 * YARN),
    "bloom": within(1, 112, 112, 2048, 128, mask=CAUSAL, alibi=True),  # bigscience/bloom
    "mpt-7b": within(4, 32, 32, 2048, 128, mask=CAUSAL, alibi=True),  # mosaicml/mpt-7b
    "paligemma-3b":  # google/paligemma-3b-pt-224: 256 of an image and 16 of text see each other
        within(4, 8, 1, 384, 256, mask=CAUSAL | ag.Prefix(272)),
    # Encoders, and decoders that read them
    "bert-base-training":  # google-bert/bert-base-uncased
        within(32, 12, 12, 512, 64, dtype=F32, kv_lengths=numbers(32), dropout=0.1),
    "modernbert-base-local":  # answerdotai/ModernBERT-base: 64 to each side, no padding
        within(1, 12, 12, 8192, 64, mask=ag.Window(64, 64), segments=PACKED),
    "longformer-base-local":  # allenai/longformer-base-4096: 256 to each side, and [CLS]
        within(4, 12, 12, 4096, 64, dtype=F32, mask=ag.Window(256, 256) | ag.Prefix(1)),
    "t5-base-encoder":  # google-t5/t5-base
        within(8, 12, 12, 512, 64, dtype=F32, scale=1.0, bias=floats(1, 12, 512, 512),
               kv_lengths=numbers(8)),
    "flan-t5-xxl-decoder":  # google/flan-t5-xxl
        within(8, 64, 64, 512, 64, scale=1.0, bias=floats(1, 64, 512, 512, dtype=BF16),
               mask=CAUSAL),
    "bart-large-cross":  # facebook/bart-large
        across(8, (16, 16), (256, 1024), (64, 64), dtype=F32, kv_lengths=numbers(8)),
    "whisper-large-v3-cross":  # openai/whisper-large-v3: 30 seconds of sound are 1500 positions
        across(8, (20, 20), (448, 1500), (64, 64), dtype=F16),
    # Pictures
    "vit-base": within(64, 12, 12, 197, 64, dtype=F32),  # google/vit-base-patch16-224
    "siglip-so400m": within(16, 16, 16, 729, 72),  # google/siglip-so400m-patch14-384
    "swin-base-shifted":  # microsoft/swin-base-patch4-window7-224: 64 windows of 7 x 7
        within(64, 4, 4, 49, 32, dtype=F32, bias=floats(1, 4, 49, 49), keep=SHIFTED),
    "stable-diffusion-1.5":  # stable-diffusion-v1-5/stable-diffusion-v1-5: 64 x 64, to itself
        within(2, 8, 8, 4096, 40, dtype=F16),
    "stable-diffusion-1.5-cross":  # the same, to text
        across(2, (8, 8), (4096, 77), (40, 40), dtype=F16),
}
# fmt: on


def explain_model(
    name: str,
    target: ag.Target | str,
    **more: Any,  # Any: options
) -> ag.types.Explanation:
    """The explanation of a model by its name; steps of generation have no gradients."""
    wants = () if name.endswith("-step") else None
    return ag.explain(MODELS[name], target=target, gradients=wants, **more)


def main() -> None:
    print(" " * 28 + "".join(f"{x:<16}" for x in TARGETS) + " peak, MiB  least, µs")
    for name in MODELS:
        answers = [explain_model(name, target) for target in TARGETS]
        names = "".join(f"{each.backend or 'none':<16}" for each in answers)
        memory, cost = answers[0].memory, answers[0].cost
        assert memory is not None
        assert cost is not None
        seconds = cost.forward.seconds or 0.0
        print(f"{name:<28}{names}{memory.peak / 2**20:10.4g} {1e6 * seconds:10.4g}")


if __name__ == "__main__":
    main()
