"""What values show in a notebook: well-formed HTML that holds what they print, escaped."""

from __future__ import annotations

from html import escape
from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.instruments.pictures import MOST_MARKS, kinds, telling_size
from attn_graph.printing import html
from tests.support.html import Reader

X = ag.TensorSpec((2, 8, 512, 64), torch.float32)
MASK = ag.Causal() & (ag.Window(64) | ag.Prefix(4))
GRAPH = ag.attention(X, X, X, mask=MASK, stats=True)
PLAN = ag.compile(GRAPH, target="cpu")
SHOWN: dict[str, Any] = {
    "graph": GRAPH,
    "gradient": ag.vjp(GRAPH)[1],
    "no mask": ag.attention(X, X, X),
    "no queries": ag.attention(
        ag.TensorSpec((2, 8, 0, 64), torch.float32), X, X, mask=~ag.Prefix(4)
    ),
    "plan": PLAN,
    "mask": MASK,
    "data": ag.Causal() & ag.SameSegment(),
    "memory": PLAN.memory(),
    "cost": PLAN.cost(),
    "no gradient": ag.compile(ag.vjp(GRAPH)[1], target="cpu").cost(),
    "explanation": PLAN.explain(),
}


def read(value: Any) -> Reader:
    return Reader(value._repr_html_())


@pytest.mark.parametrize("name", SHOWN)
def test_every_value_shows_as_one_closed_element_that_loads_nothing(name: str) -> None:
    page = read(SHOWN[name])
    assert not page.open
    assert page.tags[0] == ("div", {"class": "attn-graph"})
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe"})
    assert not any("href" in attributes or "src" in attributes for _, attributes in page.tags)


@pytest.mark.parametrize("name", ["graph", "gradient", "no mask", "no queries"])
def test_a_graph_shows_its_text_and_each_mask_once(name: str) -> None:
    graph = SHOWN[name]
    page = read(graph)
    assert str(graph) in page.text
    assert [tag for tag, _ in page.tags].count("svg") == (name in ("graph", "gradient"))


def test_a_plan_shows_who_runs_it_who_does_not_and_the_graph() -> None:
    page = read(PLAN)
    for part in (f"a plan for {PLAN.target}", PLAN.backend, PLAN.cause, str(PLAN.graph)):
        assert part in page.text
    for text in (*PLAN.executable.notes, *(x for _, reasons in PLAN.refusals for x in reasons)):
        assert str(text) in page.text


def test_memory_shows_every_figure_and_bars_that_are_parts_of_the_peak() -> None:
    memory = ag.types.Memory(2**20, 2**21, 0, 3 * 2**20, 2**10, 0, 2**21, untold=("forward",))
    page = read(memory)
    for text in (
        "outputs1 MiB",
        "saved for backward2 MiB",
        "workspace forwardknown after compile()",
    ):
        assert str(text) in page.text
    assert page.text.endswith("peakat least 7 MiBat one time")
    widths = [a["style"] for tag, a in page.tags if tag == "span"]
    assert widths[:2] == [f"width:{160 / 7:.0f}px", f"width:{320 / 7:.0f}px"]
    forward = read(ag.types.Memory(1, 1, 0, 0, 0, 0, 0)).text
    assert "backward" not in forward
    assert "gradients" not in forward


def test_cost_shows_a_row_for_each_pass() -> None:
    cost = PLAN.cost()
    assert cost.backward is not None
    page = read(cost)
    for work in (cost.forward, cost.backward):
        assert "".join(work.figures()) in page.text
    assert page.text.endswith(cost.pairs_text())
    assert cost.pairs_text() in str(cost)


def test_a_mask_shows_at_a_size_at_which_its_bounds_show() -> None:
    assert telling_size(ag.Causal()) == MOST_MARKS
    assert telling_size(MASK) == 256
    assert telling_size(~ag.Window(4095) | ag.Causal()) == 4 * 4095
    assert telling_size(ag.Window(10**15)) == 2**20
    assert "256 queries down, 256 keys across; tiles of 4 x 4: " in read(MASK).text


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.integers(0, 2), min_size=n,
       max_size=n), min_size=1, max_size=6)))  # fmt: skip
def test_a_picture_draws_each_tile_in_the_colour_of_its_kind(tiles: list[list[int]]) -> None:
    drawn = [[0] * len(tiles[0]) for _ in tiles]
    for kind, (_, path) in enumerate(
        (each for each in Reader(html.tile_picture(tiles, "")).tags if each[0] == "path"), start=1
    ):
        for run in (path["d"] or "").split("z")[:-1]:
            place, length = run.removeprefix("M").split("v")[0].split("h")
            x, y = map(int, place.split())
            for n in range(int(length)):
                assert drawn[y][x + n] == 0
                drawn[y][x + n] = kind
    assert drawn == tiles


def test_a_picture_is_of_the_tiles_that_the_mask_has() -> None:
    page = read(MASK)
    tiles = kinds(MASK, 256, 256, (4, 4))
    paths = [a["d"] or "" for tag, a in page.tags if tag == "path"]
    areas = [sum(int(run.split("h")[1].split("v")[0]) for run in d.split("z")[:-1]) for d in paths]
    assert areas == [int((tiles == 1).sum()), int((tiles == 2).sum())]


@given(st.text(), st.text())
def test_text_and_attributes_are_escaped_and_html_is_not(text: str, name: str) -> None:
    inner = html.element("b", text)
    page = Reader(html.page(html.element("p", inner, title=name), html.bullets([text])))
    assert not page.open
    assert [tag for tag, _ in page.tags] == ["div", "style", "p", "b", "ul", "li"]
    assert page.tags[2][1]["title"] == Reader(f'<p title="{escape(name)}"></p>').tags[0][1]["title"]


def test_what_a_value_says_is_text_and_no_markup() -> None:
    name = "<script>alert(1)</script>&amp;"

    @final
    @frozen
    class Odd(ag.Mask):
        """Its text is markup."""

        label: str = name

        def keep(self, at: ag.extend.Place) -> Any:  # Any: an int, a tensor, or a symbol
            return at.i == at.j

        def __str__(self) -> str:
            return name

    page = read(Odd())
    assert name in page.text
    assert "script" not in {tag for tag, _ in page.tags}
