"""Names that users write: what the package offers, and where renamed ones are now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph import extend, types
from attn_graph.compiler import EXPLAINED
from attn_graph.planner.arguments import CHOICE, DEFAULTS

CPU = ag.Target.of("cpu")


def test_former_and_unknown_names_of_arguments_are_told_ours() -> None:
    x = ag.TensorSpec((1, 2, 9, 8), torch.float32)
    former: dict[str, Any] = {"most": (4, 4)}
    explain: Callable[..., Any] = ag.explain
    with pytest.raises(ag.GraphError, match="no argument most; use max_lengths="):
        ag.attention(x, x, x, **former)
    with pytest.raises(TypeError, match="no argument most; it belongs to the graph"):
        ag.nn.Attention(**former)
    with pytest.raises(TypeError, match="no argument wants; did you mean gradients="):
        explain(ag.attention(x, x, x), target=CPU, wants=())
    unknown: dict[str, Any] = {"determinist": True}
    with pytest.raises(TypeError, match="no argument determinist; did you mean deterministic=True"):
        ag.nn.Attention(**unknown)
    with pytest.raises(TypeError, match="no argument determinist; did you mean deterministic=True"):
        ag.replace_sdpa(**unknown).__enter__()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (ag.compile, DEFAULTS),
        (ag.explain, EXPLAINED),
        (ag.replace_sdpa, CHOICE),
        (ag.nn.Attention, CHOICE),
        (ag.nn.functional.attention, CHOICE),
    ],
)
def test_signatures_show_the_options_of_compile_and_their_defaults(
    function: Callable[..., object], options: Mapping[str, object]
) -> None:
    defaults = {n: x.default for n, x in signature(function).parameters.items()}
    assert defaults.items() >= options.items()


def test_a_plan_shows_the_names_that_users_need() -> None:
    x = ag.TensorSpec((1, 2, 6, 8), torch.float32)
    plan = ag.compile(ag.attention(x, x, x), target=CPU)
    shown = {"at", "check", "cost", "explain", "memory", "prepare", "text", "verify", "vjp", "jvp"}
    shown |= {"graph", "target", "backend", "cause", "refusals", "executable"}
    assert {*dir(plan)} == shown
    assert all(hasattr(plan, name) for name in shown)


@pytest.mark.parametrize("part", [extend, types], ids=["extend", "types"])
def test_an_error_says_where_a_moved_name_is(part: ModuleType) -> None:
    for name in part.__all__:
        assert not hasattr(ag, name)
        with pytest.raises(AttributeError, match=rf"{name}'; it is attn_graph\.\w+\.{name}$"):
            getattr(ag, name)
    frontend = "Frontend"
    with pytest.raises(AttributeError, match=r"attn_graph has no attribute 'Frontend'$"):
        getattr(ag, frontend)


def test_completion_offers_the_public_names_alone() -> None:
    assert {*dir(ag)} == {*ag.__all__, "__version__"}
    assert all(getattr(ag, name) is not None for name in dir(ag))
