"""What is told of the attention of known models, on four machines that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from attrs import evolve

import attn_graph as ag
from tests.support.equipped import equip
from tests.test_examples import example

MODELS: dict[str, ag.Graph] = example("models").MODELS
EXPLAINED: Callable[..., ag.types.Explanation] = example("models").explain_model
TARGETS = [
    *map(equip, ("h200", "a100", "b200")),
    evolve(equip("cpu"), native=("bf16",), interprets=False),
]
MASKS = ("Band", "Prefix", "KeyLengths", "SameSegment", "Keep", "Chunks", "ragged=('kv_lengths',)")
OTHERS = ("SoftCap", "Bias", "Alibi", "sinks=True", "dropout", "f16[", "bf16[", "f32[")
# Pages that are pinned whole: a step, packed sequences, two modifiers, dropout, a bias with a
# gradient, values of another width. Of all models the table has who runs them.
WHOLE = (
    "llama-3-70b-step", "llama-3-8b-packed", "gemma-2-9b-local", "bert-base-training",
    "swin-base-shifted", "deepseek-v3",
)  # fmt: skip


def explained(name: str, target: ag.Target) -> ag.types.Explanation:
    """Whatever has been built and stored on this machine."""
    return EXPLAINED(name, target, store=False)


def rows_of(name: str) -> Iterator[str]:
    """Who runs a model on each target in each pass, the first clause of how or why, and who else
    could: all others refuse."""
    for target in TARGETS:
        forward = explained(name, target)
        for side, found in (("forward", forward), ("backward", forward.backward)):
            if found is not None:
                how = [note.split(", ")[0] for note in found.notes]
                first, *_ = (*how, found.cause.split(":")[0])
                choice = f"{name:<27}{target.name:<6}{side:<9}{found.backend}: {first}"
                yield f"{choice} | also {', '.join(found.also) or 'none'}"


@pytest.mark.parametrize("name", WHOLE)
def test_model(name: str, golden: Callable[[object], None]) -> None:
    golden("\n\n".join(str(explained(name, target)) for target in TARGETS))


def test_who_runs_each_model(golden: Callable[[object], None]) -> None:
    golden("\n".join(row for name in MODELS for row in rows_of(name)))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_backend_reasons_memory_and_cost_are_told(target: ag.Target) -> None:
    for name in MODELS:
        found = explained(name, target)
        told = {found.backend, *found.also, *(each.backend for each in found.refusals)}
        assert told == {backend.name for backend in ag.extend.BACKENDS}
        assert all(each.reasons for each in found.refusals)
        assert found.memory is not None
        assert found.memory.peak > 0
        assert found.cost is not None
        assert found.cost.forward.flops > 0
        assert (found.cost.forward.seconds is None) == (target.kind == "cpu")


def test_there_are_thirty_models_of_all_features() -> None:
    told = "\n".join(str(explained(name, TARGETS[-1]).graph) for name in MODELS)
    assert len(MODELS) >= 30
    assert not [feature for feature in (*MASKS, *OTHERS) if feature not in told]
