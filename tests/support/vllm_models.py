"""Small models that vLLM runs, with weights that mean something, and engines of either backend.

vLLM's own dummy weights are within 0.001 of each other: all logits are alike, and a window of the
wrong size or a missing sink would not show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine is in this process
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from attrs import field, frozen

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
GEMMA: dict[str, Any] = {
    **BASE,
    "sliding_window": 48,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}
WINDOWED, WHOLE = "sliding_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {
        **BASE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 48,
    },
    "gemma2": {
        **GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
        "layer_types": [WINDOWED, WHOLE] * 2,
    },
    "gemma3": {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": [*[WINDOWED] * 3, WHOLE],
        "rope_local_base_freq": 10000.0,
    },
    "gptoss": {
        **BASE,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": [WINDOWED, WHOLE],
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 512,
            "truncate": False,
        },
    },
    "qwen3": {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 128,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 512,
        "seq_length": 2048,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "deepseek": {
        **{name: value for name, value in BASE.items() if name != "head_dim"},
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    "bert": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "torch_dtype": "float32",
        "pad_token_id": 0,
    },
    "wide": {  # for times: most of them in matrices
        **BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
}
KEPT = ("_scale", "inv_freq", "cos_sin", "embed_scale", "normalizer")  # not weights
TIED = ("gemma", "bloom")  # would repeat one token by larger embeddings
Answers = list[list[tuple[list[int], list[float]]]]  # of each request, tokens and logprobs


@frozen
class Case:
    """Requests to a model. sizes: of the prompts, in turn. shared: tokens that all begin with.
    sampling, engine: vLLM's arguments."""

    model: str
    requests: int = 6
    sizes: tuple[int, ...] = (5, 40, 17, 130, 3, 64)
    shared: int = 0
    tokens: int = 20
    dtype: str = "float32"
    sampling: Mapping[str, Any] = field(factory=dict)
    engine: Mapping[str, Any] = field(factory=dict)

    def prompts(self) -> list[dict[str, list[int]]]:
        draw = torch.Generator().manual_seed(1)
        head = torch.randint(5, 500, (self.shared,), generator=draw).tolist()
        lengths = [
            self.sizes[n % len(self.sizes)] + n // len(self.sizes) for n in range(self.requests)
        ]
        rows = [torch.randint(5, 500, (length,), generator=draw).tolist() for length in lengths]
        return [{"prompt_token_ids": head + row} for row in rows]


def write_config(folder: Path, model: str) -> str:
    """A folder with a model's config, and a vocabulary of 512 words."""
    home = folder / model
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(CONFIGS[model]))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(507))]
    (home / "vocab.txt").write_text("\n".join(words))
    (home / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return str(home)


def weigh(self: object, model: torch.nn.Module, config: object) -> None:
    """In place of vLLM's dummy weights: logits that differ, by the names of the weights."""
    draw, kind = torch.Generator().manual_seed(3), type(model).__name__.lower()
    tied = any(name in kind for name in TIED)
    for name, weight in sorted(model.state_dict().items()):
        if not weight.is_floating_point() or any(part in name for part in KEPT):
            continue
        x = torch.randn(weight.shape, generator=draw)
        if "norm" in name and weight.ndim == 1 and "bias" not in name:
            x = 0.2 * x + (0.0 if "gemma" in kind else 1.0)
        elif weight.ndim == 1:
            x = 0.5 * x
        elif "embed" in name and "norm" not in name:
            x = (0.05 if tied else 1.0) * x
        else:
            x = (4.0 if tied else 1.5) * weight.shape[-1] ** -0.5 * x
        weight.data.copy_(x)


def choose_backend(ours: bool) -> None:
    """The next engines of this process have our backends, or vLLM's own."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from attn_graph.integrations import vllm

    for place in vllm.BACKENDS:
        AttentionBackendEnum[place].clear_override()
    os.environ[vllm.SWITCH] = str(int(ours))
    vllm.register()
    selector._cached_get_attn_backend.cache_clear()


def build_engine(folder: Path, case: Case, ours: bool) -> Any:
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    choose_backend(ours)
    DummyModelLoader.load_weights = weigh
    options: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 512,
        "seed": 0,
        "max_num_seqs": 8,
        "block_size": 32,
        "load_format": "dummy",
        "skip_tokenizer_init": case.model != "bert" and "beam_width" not in case.sampling,
    }
    if case.model == "bert":
        options |= {"runner": "pooling", "convert": "embed"}
    home = write_config(folder, case.model)
    return LLM(model=home, dtype=case.dtype, **{**options, **case.engine})


@contextmanager
def engine(folder: Path, case: Case, ours: bool) -> Iterator[Any]:
    llm = build_engine(folder, case, ours)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, case: Case) -> Answers:
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    if "beam_width" in case.sampling:
        beam = BeamSearchParams(max_tokens=case.tokens, ignore_eos=True, **case.sampling)
        made = llm.beam_search(case.prompts(), beam)
        return [[([*each.tokens], [each.cum_logprob]) for each in x.sequences] for x in made]
    given = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    sampling = SamplingParams(max_tokens=case.tokens, **{**given, **case.sampling})
    made = llm.generate(case.prompts(), sampling, use_tqdm=False)
    return [
        [
            ([*x.token_ids], [next(iter(d.values())).logprob for d in x.logprobs])
            for x in each.outputs
        ]
        for each in made
    ]


def embed(llm: Any, case: Case) -> torch.Tensor:
    made = llm.encode(case.prompts(), pooling_task="embed", use_tqdm=False)
    return torch.stack([x.outputs.data.float() for x in made])
