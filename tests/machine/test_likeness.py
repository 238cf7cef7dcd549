"""A check passes those tensors alone on which a plan may run as on those it was made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_graph.machine.likeness import likeness, look_at

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda t: t[:1],
    "number of axes": lambda t: t[None],
    "strides": lambda t: t.mT.contiguous().mT,
    "dtype": torch.Tensor.double,
    "device": lambda t: t.to("meta"),
    "negative bit": torch._neg_view,  # pyright: ignore[reportPrivateImportUsage]  # no public name
    "requires_grad": lambda t: t.clone().requires_grad_(),
    "class": torch.nn.Parameter,
    "layout": torch.Tensor.to_sparse,
    "nested": lambda t: torch.nested.as_nested_tensor([*t], layout=torch.jagged),
    "no tensor": torch.Tensor.tolist,
    "looks like one": torch.Tensor.numpy,
    "nothing": lambda t: None,
}


class Own(torch.Tensor):
    """A class of a user's."""


def three() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 3, 8) for _ in range(3)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n", range(3))
def test_what_a_plan_rests_on_sets_apart(change: str, n: int) -> None:
    tensors = three()
    check = likeness(tensors)
    others: list[Any] = three()
    assert check(*others)
    others[n] = CHANGES[change](others[n])
    assert not check(*others)


@given(shape=st.lists(st.integers(0, 4), max_size=4), turn=st.booleans())
def test_what_looks_the_same_passes(shape: list[int], turn: bool) -> None:
    one, two = torch.randn(shape), torch.randn(shape)
    if turn:
        one, two = (t.T.contiguous().T if t.ndim == 2 else t for t in (one, two))
    assert likeness([one])(two)
    assert look_at(one) == look_at(two)


def test_the_thread_s_state_sets_apart_where_tensors_would_be_others() -> None:
    tensors = three()
    check = likeness(tensors)
    with torch.no_grad():  # asked at each call
        assert check(*tensors)
    for context in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            assert not check(*tensors)


def test_a_tensor_may_be_passed_several_times() -> None:
    x, y, z = three()
    check = likeness([x, y, x])
    assert check(x, y, x)
    assert check(y, z, y)
    assert not check(x, y, z)
    assert not check(x.double(), y, x.double())
    assert not check(*[x.mT.contiguous().mT] * 2, x)
    assert not likeness([x, y, z])(x, y, x)  # another likeness takes it


def test_classes_of_users_never_pass() -> None:
    """They are known by their place in memory, where another may be later."""
    t = torch.randn(3).as_subclass(Own)
    assert not likeness([t])(t)


def test_a_check_keeps_no_tensor_alive() -> None:
    tensors = three()
    gone = weakref.ref(tensors[0])
    check = likeness(tensors)
    del tensors
    assert gone() is None
    assert check(*three())


def test_what_is_not_dense_has_no_look() -> None:
    for change in ("layout", "nested", "no tensor", "looks like one"):
        assert look_at(CHANGES[change](torch.randn(2, 3))) is None
