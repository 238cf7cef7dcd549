"""Models of transformers compute with attn_graph what they compute with their eager attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attrs import define
from torch import Tensor, nn

from attn_graph.testing.rule import NOTHING, Expectation, distance

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

from attn_graph.integrations import transformers as integration  # noqa: E402
from tests.support.models import FAMILIES, VOCABULARY  # noqa: E402

QUICK = ("Llama", "Gemma 2")  # the others are marked slow
LENGTHS = (24, 17)  # tokens
Inputs = dict[str, Tensor]
Arrange = Callable[[nn.Module, list[Inputs]], Tensor]
attention = integration.attention


def families(*kinds: str) -> list[Any]:  # Any: parameters of pytest
    """The families whose models read one of these."""
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, family in FAMILIES.items()
        if family.reads in kinds
    ]


def model_of(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of a family; those of one family have the same weights."""
    model = FAMILIES[name].make().to(dtype)
    model.set_attn_implementation(implementation)
    return model


def draw_inputs(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Inputs]:
    """What a model of a family reads: one sequence each, of so many tokens where it has tokens."""
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (1, length), generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    match FAMILIES[name].reads:
        case "speech":
            return [{"input_features": numbers(8, 40), "decoder_input_ids": tokens(11)}] * 2
        case "images":
            return [{"pixel_values": numbers(3, 24, 24)}] * 2
        case "pairs":
            return [{"input_ids": tokens(n), "decoder_input_ids": tokens(11)} for n in lengths]
    return [{"input_ids": tokens(n)} for n in lengths]


def logits_of(model: nn.Module, **inputs: Any) -> Tensor:  # Any: arguments of a model
    """The logits [B, ..., V] of a call."""
    dtype = next(model.parameters()).dtype
    cast = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    logits: Tensor = model(**cast).logits
    return logits


def alone(model: nn.Module, inputs: list[Inputs]) -> Tensor:
    """The logits [rows, V] of sequences, each computed by itself."""
    return torch.cat([logits_of(model, **each).flatten(0, -2) for each in inputs])


def stack(inputs: list[Inputs], *, left: bool = False) -> tuple[Inputs, Tensor]:
    """One batch of sequences, token 0 being padding, and its padding mask [B, tokens]."""
    batch = {
        name: nn.utils.rnn.pad_sequence(
            [each[name][0].flip(0) if left else each[name][0] for each in inputs], batch_first=True
        )
        for name in inputs[0]
    }
    if left:
        batch = {name: x.flip(1) for name, x in batch.items()}
    return batch, (batch["input_ids"] != 0).long() if "input_ids" in batch else torch.ones(0)


def whole(model: nn.Module, inputs: list[Inputs]) -> Tensor:
    """All in one batch, none of them padded."""
    return logits_of(model, **stack(inputs)[0]).flatten(0, -2)


def padded_right(model: nn.Module, inputs: list[Inputs]) -> Tensor:
    """In one batch, padding being last."""
    batch, mask = stack(inputs)
    logits = logits_of(model, **batch, attention_mask=mask)
    return logits.flatten(0, 1) if "decoder_input_ids" in batch else logits[mask.bool()]


def padded_left(model: nn.Module, inputs: list[Inputs]) -> Tensor:
    """In one batch, padding being first."""
    batch, mask = stack(inputs, left=True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return logits_of(model, **batch, attention_mask=mask, position_ids=positions)[mask.bool()]


def packed(model: nn.Module, inputs: list[Inputs]) -> Tensor:
    """In one row, one after the other."""
    rows = [each["input_ids"][0] for each in inputs]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packs = torch.cat(rows)[None]
    return logits_of(model, input_ids=packs, position_ids=positions, use_cache=False)[0]


def cached(model: nn.Module, inputs: list[Inputs]) -> Tensor:
    """In parts of 10, 1 and the other tokens, which see those before them by a cache."""
    ids = stack(inputs)[0]["input_ids"]
    parts, memory = [], None
    for part in (ids[:, :10], ids[:, 10:11], ids[:, 11:]):
        result = model(input_ids=part, past_key_values=memory, use_cache=True)
        memory = result.past_key_values
        parts.append(result.logits)
    return torch.cat(parts, 1).flatten(0, 1)


def differentiate_rows(model: nn.Module, logits: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The gradient of sum(logits * weights) by every parameter that it depends on."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = (logits * weights.to(logits.dtype)).sum()
    grads = torch.autograd.grad(total, [*named.values()], retain_graph=True, allow_unused=True)
    return {name: g for name, g in zip(named, grads, strict=True) if g is not None}


Arrange = Callable[[nn.Module, list[Inputs]], Tensor]


@define
class Watch:
    """Watches calls of attention, and keeps how far p = exp(s - lse) may be off, in units of u.

    s is known to u * t, t = |scale| sum|q k| + |bias|, lse to u * |lse|, which is at most
    u * (t + log(N + 1)), sinks being small, and their difference is rounded: docs/semantics.md.
    """

    off: float = 1.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:  # Any: as called
        heads = k.abs().repeat_interleave(q.shape[1] // k.shape[1], 1)
        t = options["scale"] * (q.abs() @ heads.mT).max()
        if options.get("bias") is not None:
            t = t + options["bias"].abs().max()
        off = 1 + 2 * (2 * t + math.log(k.shape[2] + 1))
        self.off = max(self.off, float(off))
        return attention(q, k, v, **options)


def worst(ref: Tensor, *lows: Tensor) -> Tensor:
    """The one that is farthest from `ref`: each is one order of the same float32 sums."""
    return max(lows, key=lambda low: distance(low, ref))


def expect_gradients(
    name: str, arrange: Arrange, inputs: list[Inputs], weights: Tensor, off: float
) -> list[Expectation]:
    """What the gradient of each parameter should be, from eager float64 and float32.

    A gradient is a sum over tokens; its terms, which are known to u each, and to u * off where
    they are made of p, are here the gradients of single rows of logits.
    """
    exact, low = (model_of(name, "eager", t) for t in (torch.float64, torch.float32))
    logits = alone(exact, inputs)
    refs = differentiate_rows(exact, logits, weights)
    lows = [differentiate_rows(low, each(low, inputs), weights) for each in (alone, arrange)]
    sizes = {n: torch.zeros_like(g) for n, g in refs.items()}
    for row in range(len(logits)):
        for n, g in differentiate_rows(exact, logits[row], weights[row]).items():
            sizes[n] += off * g.abs()
    return [
        Expectation(n, ref, worst(ref, *(g[n] for g in lows)), sizes[n], gradient=True)
        for n, ref in refs.items()
    ]


def check_model(name: str, arrange: Arrange, inputs: list[Inputs]) -> None:
    """Logits and gradients, arranged so, are those of eager attention on each sequence alone."""
    exact, low = (model_of(name, "eager", t) for t in (torch.float64, torch.float32))
    model, watch = model_of(name, "attn_graph"), Watch()
    with patch.object(integration, "attention", watch):
        logits = arrange(model, inputs)
    with torch.no_grad():
        ref = alone(exact, inputs)
        near = worst(ref, alone(low, inputs), arrange(low, inputs))
    assert distance(near, ref) < 1e-4 * float(ref.abs().max()), "eager's arrangement is another"
    Expectation("logits", ref, near, NOTHING).check(logits)
    weights = torch.randn(ref.shape, generator=torch.Generator().manual_seed(2))
    grads = differentiate_rows(model, logits, weights)
    dues = expect_gradients(name, arrange, inputs, weights, watch.off)
    assert {due.name for due in dues} == grads.keys()
    for due in dues:
        due.check(grads[due.name], f"{name}, {arrange.__name__}: ")


@pytest.mark.parametrize("name", families("tokens", "text", "speech", "images", "pairs"))
def test_logits_and_gradients_are_those_of_eager(name: str) -> None:
    check_model(name, whole, draw_inputs(name, (24, 24)))


@pytest.mark.parametrize("name", families("tokens", "text", "pairs"))
def test_padding_at_the_end_changes_nothing(name: str) -> None:
    check_model(name, padded_right, draw_inputs(name))


@pytest.mark.parametrize("name", families("tokens"))
def test_padding_at_the_start_changes_nothing(name: str) -> None:
    check_model(name, padded_left, draw_inputs(name))


@pytest.mark.parametrize("name", [p for p in families("tokens") if FAMILIES[p.values[0]].packs])
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    check_model(name, packed, draw_inputs(name))


@pytest.mark.parametrize("name", families("tokens"))
def test_a_cache_changes_nothing(name: str) -> None:
    check_model(name, cached, draw_inputs(name, (24, 24)))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", families("tokens", "speech", "pairs"))
def test_generation_gives_the_tokens_that_eager_gives(name: str, cache: str) -> None:
    inputs = draw_inputs(name)
    batch, mask = stack(inputs, left=FAMILIES[name].reads == "tokens")
    batch.pop("decoder_input_ids", None)
    if mask.numel():
        batch["attention_mask"] = mask
    how = {"max_new_tokens": 64, "do_sample": False, "cache_implementation": cache}
    tokens = [model_of(name, each).generate(**batch, **how) for each in ("eager", "attn_graph")]
    assert tokens[0].shape[1] >= 64
    assert torch.equal(*tokens)
