"""Models of transformers called on sequences in several arrangements, held to eager attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

from attn_graph.testing.rule import NOTHING, Expectation, distance
from tests.support.models import FAMILIES, ROUGH, VOCABULARY, Model

QUICK = ("Llama", "Gemma 2")  # the others are marked slow
LENGTHS = (24, 17)  # tokens
Inputs = dict[str, Tensor]
Arrange = Callable[[Model, list[Inputs]], Tensor]
ROUNDINGS = 16  # a key bias has a gradient of 0: of that all is rounding, which varies widely


def families(*kinds: str) -> list[Any]:  # Any: parameters of pytest
    """The families whose models read one of these."""
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, family in FAMILIES.items()
        if family.reads in kinds
    ]


def model_of(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> Model:
    """A model of a family; those of one family have the same weights."""
    model: Model = FAMILIES[name].make().to(dtype)
    model.set_attn_implementation(implementation)
    return model


def draw_inputs(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Inputs]:
    """What a model of a family reads: one sequence each, of so many tokens where it has tokens.

    A decoder beside an encoder reads fewer.
    """
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (1, length), generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    match FAMILIES[name].reads:
        case "speech":
            sounds = [numbers(8, 40) for _ in lengths]
            return [
                {"input_features": x, "decoder_input_ids": tokens(n - 6)}
                for x, n in zip(sounds, lengths, strict=True)
            ]
        case "images":
            return [{"pixel_values": numbers(3, 24, 24)}] * 2
        case "pairs":
            return [{"input_ids": tokens(n), "decoder_input_ids": tokens(n - 6)} for n in lengths]
    return [{"input_ids": tokens(n)} for n in lengths]


def logits_of(model: Model, **inputs: Any) -> Tensor:  # Any: arguments of a model
    """The logits [B, ..., V] of a call."""
    dtype = next(model.parameters()).dtype
    cast = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    logits: Tensor = model(**cast).logits
    return logits


def alone(model: Model, inputs: list[Inputs]) -> Tensor:
    """The logits [rows, V] of sequences, each computed by itself."""
    return torch.cat([logits_of(model, **each).flatten(0, -2) for each in inputs])


def stack(inputs: list[Inputs], *, left: bool = False) -> Inputs:
    """One batch of sequences, token 0 being padding."""
    batch = {
        name: nn.utils.rnn.pad_sequence(
            [each[name][0].flip(0) if left else each[name][0] for each in inputs], batch_first=True
        )
        for name in inputs[0]
    }
    return {name: x.flip(1) for name, x in batch.items()} if left else batch


def padding_of(batch: Inputs) -> Inputs:
    """The masks [B, tokens] of anything that is not padding, by the names that models have for
    them."""
    return {
        name.replace("input_ids", "attention_mask"): (x != 0).long()
        for name, x in batch.items()
        if name.endswith("input_ids")
    }


def whole(model: Model, inputs: list[Inputs]) -> Tensor:
    """All in one batch, none of them padded."""
    return logits_of(model, **stack(inputs)).flatten(0, -2)


def padded_right(model: Model, inputs: list[Inputs]) -> Tensor:
    """In one batch, padding being last."""
    batch = stack(inputs)
    padding = padding_of(batch)
    *_, rows = padding.values()  # of the decoder, where there is one
    return logits_of(model, **batch, **padding)[rows.bool()]


def padded_left(model: Model, inputs: list[Inputs]) -> Tensor:
    """In one batch, padding being first."""
    batch = stack(inputs, left=True)
    padding = padding_of(batch)
    *_, rows = padding.values()  # of the decoder, where there is one
    positions = {"position_ids": (rows.cumsum(1) - 1).clamp(min=0)}
    if "decoder_input_ids" in batch:  # T5's positions are differences
        speaks = "input_features" in batch
        positions = {"decoder_position_ids": positions["position_ids"]} if speaks else {}
    return logits_of(model, **batch, **padding, **positions)[rows.bool()]


def pack(inputs: list[Inputs]) -> Inputs:
    """One row of sequences, one after the other, with the place of each token in its own."""
    rows = [each["input_ids"][0] for each in inputs]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return {"input_ids": torch.cat(rows)[None], "position_ids": positions[None]}


def packed(model: Model, inputs: list[Inputs]) -> Tensor:
    """In one row, separated by places that begin again."""
    return logits_of(model, **pack(inputs), use_cache=False)[0]


def packed_by_lengths(model: Model, inputs: list[Inputs]) -> Tensor:
    """In one row, separated by the arguments of flash attention, which eager attention ignores."""
    if model.config._attn_implementation != "attn_graph":
        return alone(model, inputs)
    ends = torch.tensor([0, *(each["input_ids"].shape[1] for each in inputs)]).cumsum(0).int()
    return logits_of(model, **pack(inputs), cu_seq_lens_q=ends, cu_seq_lens_k=ends)[0]


def cached(model: Model, inputs: list[Inputs], memory: Any = None) -> Tensor:
    """In parts of 10, 1 and the other tokens, which see those before them by a cache."""
    batch: dict[str, Any] = {**stack(inputs)}  # Any: tensors, or several
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    parts, ids = [], batch.pop(name)
    for part in (ids[:, :10], ids[:, 10:11], ids[:, 11:]):
        result = model(**batch, **{name: part}, past_key_values=memory, use_cache=True)
        memory = result.past_key_values
        parts.append(result.logits)
        if name == "decoder_input_ids":  # what is encoded once
            batch = {"encoder_outputs": (result.encoder_last_hidden_state,)}
    return torch.cat(parts, 1).flatten(0, 1)


def cached_at_fixed_size(model: Model, inputs: list[Inputs]) -> Tensor:
    """The same, in a cache whose fill is a number on the device."""
    return cached(model, inputs, StaticCache(config=model.config, max_cache_len=40))


def results_of(model: Model, logits: Tensor) -> dict[str, Tensor]:
    """The logits, and the gradient of their sum, weighted, by every parameter, by its name.

    Without gradients where the model was called under `no_grad`.
    """
    if not logits.requires_grad:
        return {"logits": logits}
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = (logits * weights.to(logits.dtype)).sum()
    grads = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    used = {name: g for name, g in zip(named, grads, strict=True) if g is not None}
    return {"logits": logits.detach(), **used}


def farther(ref: Tensor, *lows: Tensor) -> Tensor:
    return max(lows, key=lambda low: distance(low, ref))


@cache
def results_alone(name: str, lengths: tuple[int, ...], derives: bool) -> tuple[Inputs, Inputs]:
    """Eager attention's results on each sequence alone: in float64, and the farthest of float32.

    Of several in float32, each as right as another: p and weights are off as far as they are known,
    as if rounded the other way. derives: with gradients.
    """
    inputs = draw_inputs(name, lengths)
    with torch.set_grad_enabled(derives):
        exact, eager = model_of(name, "eager", torch.float64), model_of(name, "eager")
        refs, lows = (results_of(model, alone(model, inputs)) for model in (exact, eager))
        for seed in range(ROUNDINGS):
            model = model_of(name, ROUGH)
            torch.manual_seed(seed)
            for x in model.parameters():
                x.data *= 1 + torch.randint(-1, 2, x.shape) * torch.finfo(x.dtype).eps
            rough = results_of(model, alone(model, inputs))
            lows = {n: farther(ref, lows[n], rough[n]) for n, ref in refs.items()}
    return refs, lows


def check_model(name: str, arrange: Arrange, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Logits and gradients, arranged so, are those of eager attention on each sequence alone.

    By the rule of docs/semantics.md, with `ref` from eager attention in float64. A model has tens
    of results, and in some a single `low` is near by luck: here it is the farthest of several, one
    of which is arranged so too.
    """
    refs, lows = results_alone(name, lengths, torch.is_grad_enabled())
    inputs = draw_inputs(name, lengths)
    arranged, results = (
        results_of(model, arrange(model, inputs))
        for model in (model_of(name, "eager"), model_of(name, "attn_graph"))
    )
    assert results.keys() == refs.keys()
    for n, ref in refs.items():
        low = farther(ref, lows[n], arranged[n])
        assert n != "logits" or distance(low, ref) < 1e-4 * ref.abs().max(), "eager is another"
        due = Expectation(n, ref, low, NOTHING, gradient=n != "logits")
        due.check(results[n], f"{name}, {arrange.__name__}: ")
