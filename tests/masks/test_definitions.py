"""What is wrong with the definition of a mask or modifier is said when a graph is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, final

import pytest
import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.extend import Block, Keys, Place
from attn_graph.ir.modifiers import Modifier
from attn_graph.masks import canonical
from attn_graph.masks.leaves import LEAVES
from tests.support.extensions import graph_of

SMALL = ag.TensorSpec((2, 2, 6, 8), torch.float32)


@frozen
class Leaf(ag.Mask):
    """What leaves below have in common: `size`."""

    size: int = 3

    def keep(self, at: Place) -> Any:
        return at.i // self.size == at.j // self.size


@final
class Undecorated(ag.Mask):
    """Equal to all others of its kind, whatever its size is."""

    def __init__(self, size: int) -> None:
        object.__setattr__(self, "size", size)

    def keep(self, at: Place) -> Any:
        return at.j < self.size  # type: ignore[attr-defined]  # set behind attrs' back


@final
@frozen
class Tabled(ag.Mask):
    table: torch.Tensor

    def keep(self, at: Place) -> Any:
        return self.table[at.i, at.j]


@final
@frozen
class Numbered(Leaf):
    def keep(self, at: Place) -> Any:
        return (at.i - at.j) % 2


@final
@frozen
class Anded(Leaf):
    def keep(self, at: Place) -> Any:
        return at.j <= at.i and at.j >= at.i - self.size


@final
@frozen
class Spanned(Leaf):
    def span(self, block: Block) -> Keys:
        return Keys.between(block.rows.start, min(block.N, block.rows.stop))


@final
@frozen
class Stripped(Leaf):
    def strip(self, at: Place) -> Any:
        return ag.Causal().strip(at)


@final
@frozen
class Relative(Leaf):
    @property
    def relative(self) -> bool:
        return True


@final
@frozen
class Unindexed(Leaf):
    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"table": ag.Data("bj")}

    def keep(self, at: Place) -> Any:
        return at.load("table") > at.i


@final
@frozen
class Unnamed(Leaf):
    def keep(self, at: Place) -> Any:
        return at.load("table", at.b) > at.j


@final
@frozen
class Limited(Leaf):
    """Reads a tensor, and holds what it says."""

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"limits": ag.Data("b")}

    def keep(self, at: Place) -> Any:
        return at.j <= at.load("limits", at.b)


LIMITS = {"limits": ag.TensorSpec((2,), torch.int64), "table": ag.TensorSpec((2, 6), torch.int64)}
WRONG_MASKS: dict[str, tuple[Callable[[], ag.Mask], str]] = {
    "no attrs class": (lambda: Undecorated(3), "Undecorated is not decorated"),
    "tensor as a field": (
        lambda: Tabled(torch.ones(6, 6, dtype=torch.bool)),
        "Tabled: table is a Tensor",
    ),
    "numbers": (Numbered, "Numbered.keep gives torch.int64 instead of booleans"),
    "numbers under ~": (lambda: ~Numbered() & ag.Causal(), "Numbered.keep gives torch.int64"),
    "Python's and": (Anded, "Anded.keep fails on a block of places"),
    "bounds of its own": (Spanned, "Spanned defines span, which follows from keep"),
    "strip of another mask": (Stripped, "Stripped.strip disagrees with keep at"),
    "not relative": (Relative, "Relative declares relative = True"),
    "load without indices": (Unindexed, "'table' has 2 axes but got 0 indices"),
    "load of a stranger": (Unnamed, "'table' is not in `needs`"),
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_a_mask_that_does_not_hold_what_it_says_is_refused(name: str) -> None:
    make, words = WRONG_MASKS[name]
    mask = make()
    more: dict[str, Any] = {n: LIMITS[n] for n in mask.needs}
    with pytest.raises(ag.GraphError) as caught:
        ag.attention(SMALL, SMALL, SMALL, mask=mask & ag.Window(9, 9), **more)
    assert words in str(caught.value)


@frozen
class Step(Modifier):
    """What steps below have in common."""

    def change(self, s: torch.Tensor, at: Place) -> Any:
        return s.mul_(2.0)

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> Any:
        return ds.mul_(2.0)


@final
class Plain(Step):
    pass


@final
@frozen
class Silent(Step):
    def change(self, s: torch.Tensor, at: Place) -> Any:
        s.mul_(2.0)


@final
@frozen
class SilentBack(Step):
    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> Any:
        ds.mul_(2.0)


@final
@frozen
class Summed(Step):
    def change(self, s: torch.Tensor, at: Place) -> Any:
        return s.sum(-1)


@final
@frozen
class Scaling(Step):
    additive = True


@final
@frozen
class AddingBack(Step):
    additive = True

    def change(self, s: torch.Tensor, at: Place) -> Any:
        return s + 1.0


@final
@frozen
class Diagonal(Step):
    @property
    def relative(self) -> bool:
        return True

    def change(self, s: torch.Tensor, at: Place) -> Any:
        return s * (at.i + 1)

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> Any:
        return ds * (at.i + 1)


@final
@frozen
class Branching(Step):
    def change(self, s: torch.Tensor, at: Place) -> Any:
        return s * 2 if at.i < at.j else s


@final
@frozen
class Turned(Modifier):
    """Adds table[j, h], of which `load` gives a copy."""

    additive = True

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"table": ag.Data("jh", (torch.float32,))}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("table",)

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        changed: torch.Tensor = s + at.load("table", at.j, at.h)
        return changed

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        share = at.reading(totals).load("table", at.j, at.h)
        share += ds.sum_to_size(share.shape)


def test_a_gradient_that_is_added_to_a_copy_is_refused() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, table: ag.Value) -> ag.Value:
        return ag.scores(q, k).then(Turned(), table).softmax()[0].weigh(v)

    table = ag.TensorSpec((6, SMALL.shape[1]), torch.float32)
    with pytest.raises(ag.GraphError, match=r"Turned.collect adds nothing to totals\['table'\]"):
        ag.graph(attend, q=SMALL, k=SMALL, v=SMALL, table=table)


WRONG_STEPS: dict[Modifier, str] = {
    Plain(): "Plain is not decorated",
    Silent(): "Silent.change returns NoneType",
    SilentBack(): "SilentBack.back returns NoneType",
    Summed(): "Summed.change returns torch.float64 [2, 2, 6]",
    Scaling(): "Scaling declares additive = True, but back does not return ds itself",
    AddingBack(): "AddingBack declares additive = True, but back does not return ds itself",
    Diagonal(): "Diagonal declares relative = True",
    Branching(): "Branching.change fails on a block of places",
}


@pytest.mark.parametrize("modifier", WRONG_STEPS, ids=lambda m: type(m).__name__)
def test_a_modifier_that_does_not_hold_what_it_says_is_refused(modifier: Modifier) -> None:
    with pytest.raises(ag.GraphError) as caught:
        graph_of(modifier, SMALL, ag.Window(20, 5))
    assert WRONG_STEPS[modifier] in str(caught.value)


def test_definitions_are_checked_once_whatever_the_length() -> None:
    from attn_graph.ir.terms.promises import check_once

    check_once.cache_clear()
    for length in (1024, 2048, 4096):
        x = ag.TensorSpec((8, 4, length, 64), torch.bfloat16)
        ag.attention(x, x, x, mask=Leaf(64) & ag.Causal())
    assert check_once.cache_info().misses == 1


def test_checks_that_need_tensors_are_made_under_a_transform() -> None:
    from attn_graph.ir.terms.promises import check_once

    def attend(x: torch.Tensor) -> torch.Tensor:
        graphs.append(ag.attention(SMALL, SMALL, SMALL, mask=Limited(), limits=LIMITS["limits"]))
        return x

    check_once.cache_clear()
    graphs: list[ag.Graph] = []
    torch.vmap(attend)(torch.zeros(2))
    assert [i.name for i in graphs[0].inputs] == ["q", "k", "v", "limits"]


def test_checks_are_made_under_any_mode() -> None:
    from torch._subclasses import FakeTensorMode

    from attn_graph.ir.terms.promises import check_once

    for mode in (FakeTensorMode(), torch.device("meta"), torch.inference_mode()):
        check_once.cache_clear()
        with mode:
            graph_of(Step(), SMALL, Leaf(64))
            with pytest.raises(ag.GraphError, match=r"Numbered\.keep"):
                ag.attention(SMALL, SMALL, SMALL, mask=Numbered(64))


def test_a_mask_of_the_library_is_simplified_under_fake_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its `keep` alone, of which a leaf with neither a strip nor data has bounds."""
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(canonical, "LEAVES", (*LEAVES, Leaf))
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            assert canonical.simplify_mask(Leaf(64), 8, 8) == canonical.EVERYTHING
            assert canonical.simplify_mask(Leaf(2), 8, 8) == Leaf(2)
