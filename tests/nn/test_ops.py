"""torch.ops.attn_graph: what PyTorch asks of operators, and the texts by which they are keyed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from torch.library import opcheck

import attn_graph as ag
from attn_graph.extend import Options, Place, Switches
from attn_graph.ir.modifiers import Modifier
from attn_graph.nn.calls import content_of_call
from attn_graph.nn.functional import attention
from attn_graph.nn.ops import introduce
from attn_graph.plan import content_of
from attn_graph.planner.choose import BACKENDS
from attn_graph.planner.forms.content import OWN, read_content, write_plan
from attn_graph.testing.strategies import graphs, seeds
from attn_graph.testing.tensors import tensors_for

CPU = ag.Target.of("cpu")
X = ag.TensorSpec((2, 4, 6, 8), torch.float32)
FORWARD = torch.ops.attn_graph.attention.default
BACKWARD = torch.ops.attn_graph.attention_backward.default
USUAL: dict[str, Any] = {
    "mask": None, "scale": None, "align": None, "soft_cap": None, "alibi": False, "dropout": None,
    "stats": False, "max_lengths": None, "finite_pages": False,
    "all_rows": False, "outputs": None, "v": None, "modifiers": (),
    "backends": None, "avoid": (), "deterministic": False,
    "precision": None, "on_fallback": "ignore", "max_workspace": None, "batch_invariant": False,
}  # fmt: skip


def text_of(*names: str, **options: Any) -> str:
    return content_of_call(names, *(USUAL | options).values())


def o_of(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    o = attention(*tensors, **options)
    assert isinstance(o, torch.Tensor)
    return o


def laid(layout: str, heads: int, *, leaf: bool = True) -> torch.Tensor:
    x = torch.randn(2, 6, heads, 8).transpose(1, 2)
    return (x if layout == "bshd" else x.contiguous()).detach().requires_grad_(leaf)


def call(layout: str, leaf: bool = True) -> tuple[list[torch.Tensor], str]:
    """Tensors and text of a call with most that there is."""
    q, k, v = (laid(layout, heads, leaf=leaf) for heads in (4, 2, 2))
    bias = torch.randn(1, 4, 6, 6).requires_grad_(leaf)
    text = text_of("bias", "kv_lengths", mask=ag.Causal(), stats=("lse", "max"))
    return [q, k, v, bias, torch.tensor([6, 3])], text


def plan(layout: str, leaf: bool = True) -> tuple[list[torch.Tensor], str]:
    """The same of a plan, whose lse is not an output."""
    tensors = [laid(layout, heads, leaf=leaf) for heads in (4, 2, 2)]
    specs = map(ag.TensorSpec.like, tensors)
    mask = ag.Causal() & ag.Window(2)
    return tensors, content_of(ag.compile(ag.attention(*specs, mask=mask), target=CPU))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in 2.15
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("make", [call, plan])
def test_opcheck_passes(make: Callable[..., tuple[list[torch.Tensor], str]], layout: str) -> None:
    opcheck(FORWARD, make(layout))
    tensors, text = make(layout, leaf=False)
    opcheck(FORWARD, (tensors, text, True))
    o, *more = FORWARD(tensors, text, True)
    lse = more[0]
    needs = [t.is_floating_point() for t in tensors]
    given = [True] if make is plan else [True, True, False]
    grads = [torch.randn_like(o), *([torch.randn_like(lse)] if make is call else [])]
    opcheck(BACKWARD, ([*tensors, o, lse, *grads], text, needs, given))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@given(graph=graphs(), seed=seeds)
def test_gradients_are_dense_in_the_order_of_their_inputs(
    layout: str, graph: ag.Graph, seed: int
) -> None:
    """By the operator, whatever the backend gives: else a fake tensor could not foretell it."""
    q, k, v = (i.spec for i in graph.inputs[:3])
    relaid = [ag.TensorSpec(s.shape, s.dtype, layout=layout) for s in (q, k, v)]
    inputs = [evolve(i, spec=s) for i, s in zip(graph.inputs, relaid, strict=False)]
    graph = ag.parse(str(evolve(graph, inputs=(*inputs, *graph.inputs[3:]))))
    made = ag.compile(graph, target=CPU)
    leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors_for(graph, seed)]
    outputs = torch.ops.attn_graph.attention(leaves, content_of(made))
    used = [o for o in outputs if o.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not used:
        return
    for t, g in zip(wanted, torch.autograd.grad(used, wanted, used), strict=True):
        spec = ag.TensorSpec.like(t)
        due = ag.TensorSpec.like(torch.empty_like(t)) if 0 not in spec.strides else None
        assert due is None or ag.TensorSpec.like(g) == due


# Texts


@given(graph=graphs())
def test_the_text_of_a_plan_is_the_plan(graph: ag.Graph) -> None:
    made = ag.compile(graph, target=CPU, avoid=("triton",), deterministic=True, store=False)
    content = read_content(content_of(made))
    assert content.restore() == (made.graph, made.request.options, made.request.among)
    assert made.target == CPU


def test_all_that_bears_on_a_plan_is_in_its_text() -> None:
    """Each field of Options but those that tuning and sizes by name set, and who is allowed."""
    graph = ag.attention(X, X, X)
    request = ag.compile(graph, target=CPU).request
    others: dict[str, Any] = {
        "deterministic": True, "batch_invariant": True, "max_workspace": 5,
        "workspace": ag.Workspace(), "store": None, "tune": True, "precision": "tf32",
        "avoid": ("math",), "on_fallback": "warn",
        "switches": Switches(flash=False),
    }  # fmt: skip
    assert {f.name for f in attrs.fields(Options)} - others.keys() == {"variant", "resized"}
    texts = {write_plan(request.with_options(**{n: x})) for n, x in others.items()}
    texts |= {write_plan(evolve(request, among=b)) for b in (None, ("math",), ("torch_sdpa",))}
    assert len(texts) == len(others) + 3


def test_all_that_a_call_says_is_in_its_text() -> None:
    others: dict[str, Any] = {
        "mask": ag.Causal(), "scale": (0.1).hex(), "align": "top_left", "soft_cap": (3.0).hex(),
        "alibi": True, "dropout": (0.5).hex(), "stats": ("lse",), "max_lengths": (7, None),
        "finite_pages": True, "all_rows": True, "v": 5,
        "outputs": (("o", "bshd"), ("lse", ((2, 4, 6), "f32", (24, 1, 4)))),
        "modifiers": (ag.SoftCap(3.0), ag.Addend("real(i)")),
        "backends": ("math",), "avoid": ("math",), "deterministic": True, "precision": "tf32",
        "on_fallback": "raise", "max_workspace": "1GiB", "batch_invariant": True,
    }  # fmt: skip
    assert others.keys() == USUAL.keys()
    texts = {text_of(**{name: value}) for name, value in others.items()}
    assert len(texts | {text_of(), text_of("bias")}) == len(others) + 2
    for name, value in others.items():
        restored = read_content(text_of(**{name: value})).restore()
        assert isinstance(restored, dict)
        number = float.fromhex(value) if name in ("scale", "soft_cap", "dropout") else value
        assert restored[name] == number


def test_what_is_no_text_of_ours_is_refused() -> None:
    for text in ("3", "Causal()", "CallContent(mask='Nothing()')", "import os"):
        with pytest.raises(ag.GraphError):
            FORWARD([torch.zeros(1, 1, 1, 1)] * 3, text)


# What is a user's own


@frozen
class Every(ag.Mask):
    """Every n-th key."""

    n: int = 2

    def keep(self, at: Place) -> Any:  # Any: a tensor, or a number
        return at.j % self.n == 0


@frozen
class Shift(Modifier):
    """Scores of later queries grow."""

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        shifted: torch.Tensor = s + at.i
        return shifted

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        return ds


MINE = evolve(next(b for b in BACKENDS if b.name == "math"), name="mine")


def attend_own(q: Any, k: Any, v: Any) -> Any:
    return ag.scores(q, k).then(Shift()).mask(Every(3)).softmax()[0].weigh(v)


def test_what_is_a_users_own_is_known_where_it_was_used() -> None:
    q, k, v = (torch.randn(X.shape) for _ in range(3))
    made = ag.compile(ag.graph(attend_own, q=X, k=X, v=X), target=CPU, backends=(MINE,))
    planned = made(q, k, v)
    assert isinstance(planned, torch.Tensor)
    assert torch.equal(FORWARD([q, k, v], content_of(made))[0], planned)
    text = text_of(mask=Every(3) & ag.Causal(), backends=(MINE,))
    due = o_of(q, k, v, mask=Every(3) & ag.Causal(), backends=(MINE,))
    assert torch.equal(FORWARD([q, k, v], text)[0], due)


def test_what_a_process_does_not_know_is_said_with_the_way_out() -> None:
    q, k, v = (torch.randn(X.shape) for _ in range(3))
    text = text_of(mask=Every(5)).replace("Every", "Elsewhere")
    with pytest.raises(ag.GraphError, match=r"Elsewhere .*introduce\(Elsewhere\)"):
        FORWARD([q, k, v], text)

    @frozen
    class Elsewhere(ag.Mask):
        """Every n-th key, under another name."""

        n: int

        def keep(self, at: Place) -> Any:  # Any: as above
            return at.j % self.n == 0

    introduce(Elsewhere)
    assert torch.equal(FORWARD([q, k, v], text)[0], o_of(q, k, v, mask=Every(5)))


def test_classes_of_one_name_stay_apart_and_are_not_kept_alive() -> None:
    def make(n: int) -> type[ag.Mask]:
        @frozen
        class Same(ag.Mask):
            """Every n-th key."""

            def keep(self, at: Place) -> Any:  # Any: as above
                return at.j % n == 0

        return Same

    q, k, v = (torch.randn(X.shape) for _ in range(3))
    kinds = make(2), make(3)
    texts = [text_of(mask=kind()) for kind in kinds]
    assert texts[0] != texts[1]
    for text, n in zip(texts, (2, 3), strict=True):
        assert torch.equal(FORWARD([q, k, v], text)[0], o_of(q, k, v, mask=Every(n)))
    with pytest.raises(ag.GraphError, match="two of your own are named Same"):
        text_of(mask=kinds[0]() & kinds[1]())
    read_content.cache_clear()
    ag.clear_cache()
    del kinds
    gc.collect()
    assert [*OWN.things].count(("Same", 3)) == 0


def test_a_workspace_of_ones_own_is_the_one_that_is_used() -> None:
    workspace = ag.Workspace()
    x = ag.TensorSpec(X.shape, torch.float16)  # computed in float32, in the workspace
    graph = ag.attention(x, x, x, mask=ag.Causal())
    made = ag.compile(graph, target=CPU, backends=("math",), workspace=workspace)
    tensors = tensors_for(graph, 0)
    FORWARD(tensors, content_of(made))
    assert workspace.bytes
    elsewhere = content_of(made).replace("workspace=1", "workspace=77")
    assert FORWARD(tensors, elsewhere)  # where it is not known there is a new one, as of a pickle


# Fake tensors


def test_fake_tensors_are_checked_as_tensors_are() -> None:
    tensors, text = plan("bhsd", leaf=False)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        with pytest.raises(ag.PlanMismatchError, match="q: expected"):
            FORWARD([fakes[0][:1], *fakes[1:]], text)
        with pytest.raises(ag.GraphError, match="k has head size 8"):
            FORWARD([fakes[0][..., 1:], *fakes[1:]], text_of())
        with pytest.raises(ag.PlanMismatchError, match="one device"):
            FORWARD([fakes[0].to("meta"), *fakes[1:]], text_of())
        assert o_of(*fakes).shape == (2, 4, 6, 8)
    assert o_of(*fakes).shape == (2, 4, 6, 8)  # outside of the mode
    assert o_of(*tensors).shape == (2, 4, 6, 8)
