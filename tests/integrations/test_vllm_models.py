"""Whole models in vLLM, by our backends beside its own: `make vllm`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM for CPUs, in a venv of its own: make vllm")

from attrs import evolve
from torch import Tensor

import attn_graph as ag
from attn_graph.integrations import vllm
from attn_graph.integrations.vllm.layers import Kind, ServedLayer
from attn_graph.integrations.vllm.steps import Capacity
from attn_graph.lowering.cpu.packed import PackedRun
from tests.lowering.test_python_calls import count_calls
from tests.support.vllm_models import Answers, Case, choose_backend, embed, engine, generate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
CLOSE = 1e-5  # of logprobs in float32
CHUNKS = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}
CASES = {
    "Llama": Case("llama"),
    "Mistral": Case("mistral"),
    "Gemma 2": Case("gemma2"),
    "Gemma 3": Case("gemma3"),
    "gpt-oss": Case("gptoss"),
    "Qwen 3": Case("qwen3"),
    "Bloom": Case("bloom"),
    "DeepSeek V2": Case("deepseek"),
    "chunks of prompts": Case("mistral", engine=CHUNKS),
    "chunks of prompts, two groups": Case("gemma2", engine=CHUNKS),
    "whole prompts": Case(
        "llama", engine={"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    ),
    "shared prefixes": Case("llama", 12, shared=100, engine={"enable_prefix_caching": True}),
    "shared prefixes, two groups": Case(
        "gemma3", 12, shared=100, engine={"enable_prefix_caching": True}
    ),
    "four samples each": Case("llama", sampling={"n": 4, "temperature": 1.0, "seed": 7}),
    "beams": Case("llama", sampling={"beam_width": 3}),
    "64 requests, 8 at a time": Case("llama", 64),
    "64 requests at a time": Case("mistral", 64, engine={"max_num_seqs": 64}),
    "preemption": Case(
        "llama", 16, (60, 90, 30), tokens=60,
        engine={"num_gpu_blocks_override": 14, "max_model_len": 384},
    ),
    "blocks of 128": Case("gemma2", engine={"block_size": 128}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def inspection(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM inspects models in a process of its own, of 1.8 GB, before a test counts that of its
    children."""
    with engine(tmp_path_factory.mktemp("inspection"), Case("llama"), False):
        pass


def answer(folder: Path, case: Case, ours: bool) -> Answers:
    with engine(folder, case, ours) as llm:
        return generate(llm, case)


def differing(one: Answers, other: Answers) -> int:
    """How many answers have other tokens, or logprobs that are not close."""
    count = 0
    for pair in zip(one, other, strict=True):
        for (tokens, logprobs), (due, dues) in zip(*pair, strict=True):
            far = max(abs(x - y) for x, y in zip(logprobs, dues, strict=True))
            count += tokens != due or far > 2 * CLOSE * max(1.0, *map(abs, dues))
    return count


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_those_of_vllms_own_kernel(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    own, ours = (answer(tmp_path, case, ours) for ours in (False, True))
    assert differing(own, ours) == 0


def test_embeddings_are_those_of_vllms_own_kernel(tmp_path: Path) -> None:
    case, made = Case("bert"), list[Any]()
    for ours in (False, True):
        with engine(tmp_path, case, ours) as llm:
            made.append(embed(llm, case))
    assert (made[0] - made[1]).abs().max() < 1e-6


MUTANTS: dict[str, tuple[str, Callable[[Kind], Kind]]] = {
    "a window of one key more": ("mistral", lambda kind: evolve(kind, window=49)),
    "a window of one key less": ("mistral", lambda kind: evolve(kind, window=47)),
    "no window": ("gemma3", lambda kind: evolve(kind, window=None)),
    "no sinks": ("gptoss", lambda kind: evolve(kind, sinks=False)),
    "no soft cap": ("gemma2", lambda kind: evolve(kind, soft_cap=None)),
    "no slopes": ("bloom", lambda kind: evolve(kind, slopes=None)),
    "another scale": ("llama", lambda kind: evolve(kind, scale=1.02 * kind.scale)),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_in_a_kind_of_layer_shows(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_graph.integrations.vllm import backend

    model, change = MUTANTS[fault]
    own = answer(tmp_path, Case(model), ours=False)

    def faulty(kind: Kind, room: Capacity, sinks: Tensor | None) -> ServedLayer:
        kind = change(kind)
        return ServedLayer(kind, room, sinks if kind.sinks else None)

    monkeypatch.setattr(backend, "ServedLayer", faulty)
    assert differing(own, answer(tmp_path, Case(model), ours=True)) > 0


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma2", "gptoss", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_by_vllms_own_kernel(model: str, tmp_path: Path) -> None:
    """The mean distance of logprobs, as long as all three have the same tokens. Which tokens come
    first where two are nearly alike is chance, so a quarter more is allowed."""
    exact, own, ours = (
        answer(tmp_path, Case(model, dtype=dtype), is_ours)
        for dtype, is_ours in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    far = [0.0, 0.0]
    for three in zip(exact, own, ours, strict=True):
        (due, dues), *others = (each[0] for each in three)
        for n, token in enumerate(due):
            if any(tokens[n] != token for tokens, _ in others):
                break
            far = [x + abs(p[n] - dues[n]) for x, (_, p) in zip(far, others, strict=True)]
    assert 0 < far[1] <= 1.25 * far[0]


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_caches_in_8_bits_are_nearer_to_float32_than_by_vllms_own_kernel(
    dtype: str, tmp_path: Path
) -> None:
    """It rounds towards 0 as it writes, and we to the nearest: the first tokens' logprobs."""
    exact, *others = (
        answer(tmp_path, Case("llama", tokens=1, engine={"kv_cache_dtype": kind}), ours)
        for kind, ours in (("auto", False), (dtype, False), (dtype, True))
    )
    (own, ours) = (
        sum(abs(x[0][1][0] - y[0][1][0]) for x, y in zip(exact, each, strict=True))
        for each in others
    )
    assert 0 < ours < 1.1 * own


def test_a_served_model_builds_and_lowers_nothing_after_its_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of 40 tokens: each token is a new length."""
    lower, lowered = PackedRun.make_part, list[object]()

    def make_part(run: PackedRun, *of: Any) -> Any:
        lowered.append(of)
        return lower(run, *of)

    monkeypatch.setattr(PackedRun, "make_part", make_part)
    ag.clear_cache()
    case = Case("mistral", 8, (5, 40, 17), tokens=40, engine={"enable_prefix_caching": False})
    with engine(tmp_path, case, ours=True) as llm:
        generate(llm, evolve(case, tokens=1))
        lowered.clear()
        builds = ag.cache_info().builds
        generate(llm, case)
        assert ag.cache_info().builds == builds
        assert not lowered


@pytest.mark.parametrize(("B", "most"), [(8, 120), (64, 200)])
def test_a_layer_of_vllm_costs_few_python_calls(
    B: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write and its call, of the last layer of a step of decoding."""
    from attn_graph.integrations.vllm.backend import LayerAttention

    counts: dict[str, list[int]] = {"forward": [], "do_kv_cache_update": []}

    def count(name: str) -> None:
        run = getattr(LayerAttention, name)

        def counted(*args: Any, **named: Any) -> Any:
            made = list[Any]()
            counts[name].append(count_calls(lambda: made.append(run(*args, **named))) - 1)
            return made[0]

        monkeypatch.setattr(LayerAttention, name, counted)

    for name in counts:
        count(name)
    case = Case("llama", B, (9,), tokens=12, engine={"max_num_seqs": B})
    with engine(tmp_path, case, ours=True) as llm:
        generate(llm, case)
    assert sum(own[-1] for own in counts.values()) <= most


def test_vllm_loads_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.plugins import load_plugins_by_group
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert "attn_graph" in entry_points(group="vllm.general_plugins").names
    choose_backend(ours=False)
    monkeypatch.setenv(vllm.SWITCH, "1")
    load_plugins_by_group("vllm.general_plugins")["attn_graph"]()
    assert (
        AttentionBackendEnum.CPU_ATTN.get_class().__module__
        == "attn_graph.integrations.vllm.backend"
    )
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"
