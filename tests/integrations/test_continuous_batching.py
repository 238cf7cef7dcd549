"""Requests that transformers batches get the tokens that eager attention gives each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.errors import GraphError

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

from transformers import ContinuousBatchingConfig, GenerationConfig

from attn_graph.integrations.transformers import BATCHES, attend_batch, continuous_batching
from tests.support.models import VOCABULARY
from tests.support.transformer_calls import model_of

NEW = 20  # tokens
LENGTHS = (5, 30, 11, 1)  # of prompts: one is longer than a step has room
PAGES = ContinuousBatchingConfig(page_size=8, num_blocks=48, max_batch_tokens=24)
CHOICE = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


def draw_prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens_of(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that follow each prompt, of all prompts at once."""
    with continuous_batching(model):
        outputs = model.generate_batch(prompts, CHOICE, continuous_batching_config=PAGES)
    answers = {tuple(x.prompt_ids): x.generated_tokens for x in outputs.values()}
    return [answers[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2", "gpt-oss"])
def test_tokens_are_those_of_eager(name: str) -> None:
    """With a window, a soft cap, sinks; a prompt in chunks; a cache longer than the window."""
    model, prompts = model_of(name, "eager"), draw_prompts(0)
    due = [
        model.generate(torch.tensor([x]), generation_config=CHOICE)[0, len(x) :].tolist()
        for x in prompts
    ]
    assert tokens_of(model, prompts) == due
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["Llama", "gpt-oss"])
def test_steps_of_sizes_seen_before_make_no_plan(name: str) -> None:
    """The second time that these requests come, all before the first step."""
    model, builds = model_of(name, "eager"), []
    ag.clear_cache()
    for _ in range(2):
        before = ag.cache_info().misses
        with continuous_batching(model):
            manager = model.init_continuous_batching(CHOICE, PAGES)
            manager.add_requests(draw_prompts(0), max_new_tokens=NEW)
            manager.start()
            finished = 0
            while finished < len(LENGTHS):
                result = manager.get_result(timeout=60)
                assert result is not None
                assert result.error is None
                finished += result.is_finished()
            manager.stop(block=True)
            manager.destroy()
        builds.append(ag.cache_info().misses - before)
    assert 0 < builds[0] < NEW
    assert builds[1] == 0


def test_a_model_in_the_block_takes_nothing_but_batches() -> None:
    model = model_of("Llama", "eager")
    with (
        continuous_batching(model),
        pytest.raises(
            GraphError, match=r"call model\.generate_batch, and anything else outside it"
        ),
    ):
        model(torch.tensor([[3, 4, 5]]))
    model(torch.tensor([[3, 4, 5]]))


@pytest.mark.parametrize(
    "option",
    ["dropout", "position_bias", "block_table", "output_attentions", "sinks", "indices", "sink"],
)
def test_what_a_batch_has_no_place_for_is_refused(option: str) -> None:
    x, ends = torch.randn(1, 2, 3, 8), torch.tensor([0, 3])
    given: dict[str, Any] = {
        option: torch.ones(1) if option in ("sinks", "indices", "sink") else 1.0
    }
    with pytest.raises(GraphError, match=option):
        attend_batch(torch.nn.Module(), x, x, x, None, cache="a cache", cu_seq_lens_q=ends, **given)


def test_a_model_without_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama", "eager")
    monkeypatch.setattr(model, "_can_set_attn_implementation", lambda: False)
    with pytest.raises(GraphError, match="no attention interface"), continuous_batching(model):
        pass
    assert model.config._attn_implementation != BATCHES
