"""A text that code was exported with is read with care: it may come from anybody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import attn_graph as ag
from attn_graph.extend import Store
from attn_graph.nn.ops import introduce
from attn_graph.plan import content_of
from attn_graph.planner.arguments import CHOICE
from attn_graph.planner.forms.content import OWN, read_content

X = ag.TensorSpec((1, 2, 6, 8), torch.float32)
GRAPH = ag.attention(X, X, X)
TEXT = content_of(ag.compile(GRAPH, target="cpu", store=False))
THREE = [torch.randn(X.shape) for _ in range(3)]
RUN = torch.ops.attn_graph.attention


def with_field(name: str, value: object) -> str:
    content = read_content(TEXT)
    given = {f.name: getattr(content, f.name) for f in attrs.fields(type(content))}
    fields = (f"{n}={x!r}" for n, x in (given | {name: value}).items())
    return f"PlanContent({', '.join(fields)})"


@pytest.mark.parametrize("tune", [False, True])
def test_a_text_reaches_no_folder_that_the_process_has_not_named(
    tmp_path: Path, tune: bool
) -> None:
    folder = tmp_path / "made" / "by a text"
    text = with_field("store", str(folder))
    text = text.replace("tune=False", f"tune={tune}")
    for run in (lambda: RUN(THREE, text), lambda: read_content(text).restore()):
        with pytest.raises(ag.GraphError, match=r"has not used; say .*introduce\(Store\("):
            run()
    assert not folder.parent.exists()


def test_a_store_that_was_introduced_or_used_is_that_store(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "one", 2**20), Store(tmp_path / "two")
    introduce(store)
    made = ag.compile(GRAPH, target="cpu", store=other, tune=False)
    for known, text in ((store, with_field("store", str(store.folder))), (other, content_of(made))):
        content: Any = read_content(text)
        assert content.restore()[1].store == known
        assert torch.equal(RUN(THREE, text)[0], made(*THREE))  # type: ignore[arg-type]  # has one output
    assert OWN.stores[str(store.folder)] == store


WRONG = {  # a field of a plan's text, and what it can't have
    "max_workspace": (-1, "x", 1.5, [1]),
    "precision": ("x", None, 3, []),
    "on_fallback": ("x", None, []),
    "deterministic": ("yes", None, [], 2),
    "batch_invariant": ("yes", None, {}),
    "tune": ("yes", 3),
    "workspace": ("x", None, 1.5),
    "avoid": ("math", 3, (3,), [], None),
    "backends": ("math", 3, (3,), ("nobody",), [[]]),
    "own": ("x", (3,), (("x",),), (("x", "y"),), 3),
    "switches": ((), (1, 2), "x", None, ("x",) * 10),
    "store": (3, None, 1.5, ("x",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_fields_of_a_plan_s_text_are_checked_like_arguments(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ag.GraphError):
            RUN(THREE, with_field(name, value))


CALLS = {  # the same of a call's text
    "max_workspace": (-1, "x", 1.5, [1]),
    "precision": ("x", 3, []),
    "on_fallback": ("x", None, []),
    "names": ("x", 3, (3,), None, ("q",), ("keep", "keep")),
    "mask": (3, "x", "Causal", ("x",)),
    "scale": ("x", [], (1,)),
    "align": ("x", 3, []),
    "soft_cap": ("x", [], -1.0),
    "alibi": ("x", 3, []),
    "dropout": ("x", [], 2.0),
    "stats": ("x", 3, ("x",)),
    "outputs": ("x", 3, ("o",), (("o", 3),), (("o", ((1,), "f1", (1,))),)),
    "v": ("x", 1.5, (), 99),
    "max_lengths": ("x", 3, (1,), (1, 2)),
    "own": ("x", (3,)),
    **dict.fromkeys(("backends", "avoid"), ("math", 3, (3,))),
    **dict.fromkeys(("deterministic", "batch_invariant"), ("yes", [])),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_fields_of_a_call_s_text_are_checked_like_arguments(name: str) -> None:
    assert {*CHOICE} <= CALLS.keys()
    for value in CALLS[name]:
        with pytest.raises(ag.GraphError):
            RUN(THREE, f"CallContent({name}={value!r})")


@pytest.mark.parametrize(
    "run",
    [
        lambda tensors, text: RUN(tensors, text),
        lambda tensors, text: RUN([t.requires_grad_() for t in tensors], text),
        lambda tensors, text: torch.func.vmap(lambda *x: RUN([*x], text)[0])(*tensors),
    ],
    ids=["runs", "records", "maps"],
)
@pytest.mark.parametrize("text", ["CallContent()", TEXT, 'CallContent(names=("bias",))'])
def test_a_text_runs_on_as_many_tensors_as_it_names(
    run: Callable[[list[torch.Tensor], str], object], text: str
) -> None:
    for count in (1, 2, 5):
        with pytest.raises(ag.GraphError, match=rf"reads [34] tensors, q, k, v.*; got {count}"):
            run([torch.randn(X.shape) for _ in range(count)], text)


@pytest.mark.parametrize("names", [("first", "bias"), ("sinks", "bias"), ("bias", "bias")])
def test_a_text_names_its_tensors_in_the_order_of_a_graph(names: tuple[str, ...]) -> None:
    with pytest.raises(ag.GraphError, match=r"the text has names=.*, and their order is \('bias'"):
        read_content(f"CallContent(names={names!r})")


def test_fake_tensors_are_counted_too() -> None:
    with torch._subclasses.FakeTensorMode():
        two = [torch.empty(X.shape) for _ in range(2)]
        with pytest.raises(ag.GraphError, match="reads 3 tensors"):
            RUN(two, "CallContent()")


def test_a_field_is_given_once() -> None:
    with pytest.raises(ag.GraphError, match="each once"):
        RUN(THREE, "CallContent(scale=1.0, scale=2.0)")
