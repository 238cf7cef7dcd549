"""The table of the tensors that options of attention add, and the functions that read it."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attn_graph as ag
from attn_graph.ir.arguments import ARGUMENTS, EXTRA
from attn_graph.ir.modifiers import UNPLACED, Modifier
from attn_graph.nn import functional

SEGMENTS = ("q_segments", "kv_segments")
SEEDS = ("seed", "offset")


@pytest.mark.parametrize("function", [ag.attention, functional.attention])
def test_signatures_name_each_tensor_of_the_table_and_no_other(function: Any) -> None:
    kind = {ag.attention: "TensorSpec", functional.attention: "Tensor"}[function]
    annotated = {
        name
        for name, x in signature(function).parameters.items()
        if x.default is None and str(x.annotation).startswith((kind, f"tuple[{kind}"))
    }
    own = {*EXTRA} - {*SEGMENTS} | {"segments"}
    assert annotated - {"out"} == (own - {*SEEDS} if function is ag.attention else own)


def test_each_tensor_of_a_call_is_passed_on_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are listed by place in `attention`, in the order of the table."""
    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(functional, "attend_as", lambda q, k, v, named, _: seen.update(named))
    given: dict[str, Any] = {name: torch.zeros(1) for name in EXTRA}
    pair: dict[str, Any] = {"segments": tuple(given[name] for name in SEGMENTS)}
    others = {name: x for name, x in given.items() if name not in SEGMENTS}
    q, k, v = torch.zeros(3, 1, 1, 1, 1).unbind()
    functional.attention(q, k, v, dropout=0.5, **pair, **others)
    assert [*seen] == [*EXTRA]
    assert all(seen[name] is given[name] for name in EXTRA)


@pytest.mark.parametrize("name", [n for n, x in ARGUMENTS.items() if x.step is not None])
def test_a_spec_is_the_input_of_its_own_name_and_its_step_reads_it(name: str) -> None:
    step = ARGUMENTS[name].step
    assert step is not None
    sizes = {"b": 2, "h": 4, "i": 3, "j": 5}
    given: dict[str, Any] = {
        n: ag.TensorSpec(data.shape(sizes), data.dtypes[-2 % len(data.dtypes)])
        for n, data in step.needs.items()
    }
    if {*given} == {*SEGMENTS}:
        given = {"segments": tuple(given[n] for n in SEGMENTS)}
    q, k = ag.TensorSpec((2, 4, 3, 8), torch.float32), ag.TensorSpec((2, 4, 5, 8), torch.float32)
    graph = ag.attention(q, k, k, **given)
    assert [i.name for i in graph.inputs][3:] == [*step.needs]
    assert any(step in (eqn.op, getattr(eqn.op, "mask", None)) for eqn in graph.eqns)


def test_a_cache_that_grows_by_tokens_of_segments_has_one_plan() -> None:
    """The axes of segments stand in the table as those of lengths do."""
    ag.clear_cache()
    for N in (6, 7, 9):
        q, (k, v) = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 2, N, 8)
        ids, own = torch.randint(2, (2, N)), torch.randint(2, (2, 1))
        o = functional.attention(q, k, v, segments=(own, ids))
        kept = torch.where(own == ids, 0.0, -torch.inf)
        due = F.scaled_dot_product_attention(q, k, v, kept[:, None, None], enable_gqa=True)
        torch.testing.assert_close(o, due)
    assert ag.cache_info().builds == 1


@pytest.mark.parametrize(
    "step",
    [ag.SoftCap(5.0), ag.Bias(), ag.Alibi(True, "top_left"), ag.RelativeBias(9, "top_left")],
    ids=str,
)
def test_steps_that_compare_no_positions_are_the_same_for_a_part(step: Modifier) -> None:
    random = torch.Generator().manual_seed(1)
    sizes = {"b": 2, "h": 3, "i": 6, "j": 6}
    own = {"b": slice(1), "h": slice(None), "i": slice(2, 5), "j": slice(1, 4)}
    s = torch.randn(2, 3, 6, 6, generator=random)
    data = [(x.axes, torch.randn(x.shape(sizes), generator=random)) for x in step.needs.values()]
    (whole,) = step.run(s, *(x for _, x in data))
    cut = [x[tuple(own.get(axis, slice(None)) for axis in axes)] for axes, x in data]
    part = tuple(own.values())
    (alone,) = step.run(s[part], *cut)
    assert alone.equal(whole[part]) == isinstance(step, UNPLACED)
