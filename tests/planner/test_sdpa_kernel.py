"""sdpa_kernel and all that sets PyTorch's same switches: what they turn off, and in what order."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_graph as ag
from attn_graph.machine.torch_switches import CUDNN_FIRST, KERNELS, USUAL, Switches
from attn_graph.testing.agreement import as_leaves, check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.planner.test_controls import chosen, reasons, switched
from tests.support.equipped import equip

CPU, H200 = (ag.Target.of(name) for name in ("cpu", "h200"))
EQUIPPED, A100 = map(equip, ("h200", "a100"))
X = ag.TensorSpec((2, 4, 16, 8), torch.float32)
HALF = ag.TensorSpec((2, 4, 16, 8), torch.float16)
PLAIN = ag.attention(X, X, X)

SWITCHES: tuple[tuple[str, ag.Target, SDPBackend], ...] = (
    ("torch_sdpa", CPU, SDPBackend.FLASH_ATTENTION),
    ("torch_flash", H200, SDPBackend.FLASH_ATTENTION),
    ("torch_efficient", H200, SDPBackend.EFFICIENT_ATTENTION),
    ("torch_cudnn", H200, SDPBackend.CUDNN_ATTENTION),
)


@pytest.mark.parametrize(("backend", "target", "kernel"), SWITCHES)
def test_sdpa_kernel_turns_off_what_it_turns_off_in_pytorch(
    backend: str, target: ag.Target, kernel: SDPBackend
) -> None:
    graph = ag.attention(HALF, HALF, HALF)
    before = ag.compile(graph, target=target, backends=(backend, "math"))
    assert before.backend == backend
    with sdpa_kernel([k for k in (SDPBackend.MATH, *(s[2] for s in SWITCHES)) if k != kernel]):
        plan = ag.compile(graph, target=target, backends=(backend, "math"))
        assert plan.backend == "math"
        assert "this process has turned off, by sdpa_kernel" in reasons(plan, backend)
    with sdpa_kernel(kernel):
        assert chosen(graph, target=target, backends=(backend,)) == backend
        with pytest.raises(
            ag.NoBackendError, match=r"by sdpa_kernel or .*enable_math_sdp\(False\)"
        ):
            chosen(graph, target=target, backends=("math",))
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen(graph, target=target, backends=(backend, "math")) == "math"
    assert ag.compile(graph, target=target, backends=(backend, "math")) is before


def explained(graph: ag.Graph, target: ag.Target, **options: Any) -> ag.types.Explanation:
    """Of the forward alone. Any: options of `explain`."""
    return ag.explain(graph, target=target, store=False, gradients=(), **options)


CUDNN_OFF: tuple[tuple[Callable[[], AbstractContextManager[object]], str], ...] = (
    (lambda: switched(torch.backends.cuda.enable_cudnn_sdp, False), r"enable_cudnn_sdp\(False\)"),
    (lambda: torch.backends.cudnn.flags(enabled=False), "by torch.backends.cudnn.enabled = False"),
    (lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), "by sdpa_kernel"),
)


@pytest.mark.parametrize(("off", "words"), CUDNN_OFF)
def test_every_way_to_turn_cudnn_off_reaches_every_backend_that_is_cudnn(
    off: Callable[[], AbstractContextManager[object]], words: str
) -> None:
    graph = ag.attention(HALF, HALF, HALF)
    assert explained(graph, EQUIPPED).backend == "cudnn"
    with off():
        found = explained(graph, EQUIPPED)
        against = {r.backend: " ".join(map(str, r.reasons)) for r in found.refusals}
        for name in ("cudnn", "torch_cudnn"):
            assert re.search(
                f"cuDNN's attention, which this process has turned off, .*{words}", against[name]
            )
        assert "this process has turned off" in str(found)
        assert found.backend == "triton"
    assert explained(graph, EQUIPPED).backend == "cudnn"


def test_where_only_math_is_on_a_cpu_runs_no_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of `math` too are that kernel's, where it is on."""
    graph = ag.attention(X, X, X, mask=ag.Window(3), stats=True)
    assert "fused CPU kernel" in str(ag.compile(graph, target=CPU).explain())
    with sdpa_kernel(SDPBackend.MATH):
        plan = ag.compile(graph, target=CPU)
        told = str(plan.explain())
    assert "fused CPU kernel" not in told
    assert "matrix products" in told
    monkeypatch.setattr("attn_graph.kernels.fused_cpu.flash", None)
    check_outputs(plan, graph, as_leaves(tensors_for(graph, 0)))


# Their order


FLASH, EFFICIENT, MATH, CUDNN = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)
ORDERS: tuple[tuple[ag.Target, list[SDPBackend], str], ...] = (
    (A100, [CUDNN, FLASH], "cudnn torch_cudnn torch_flash triton"),
    (A100, [CUDNN, FLASH, MATH], "cudnn torch_cudnn torch_flash triton math"),
    (A100, [MATH, EFFICIENT], "math torch_efficient triton"),
    (EQUIPPED, [FLASH, CUDNN, MATH], "torch_flash cudnn torch_cudnn triton math"),
    (EQUIPPED, [EFFICIENT, FLASH], "torch_efficient torch_flash triton"),
    (EQUIPPED, [FLASH, MATH], "triton torch_flash math"),  # PyTorch's own order
    (EQUIPPED, [CUDNN, FLASH], "cudnn triton torch_flash torch_cudnn"),  # here too
)


@pytest.mark.parametrize(("target", "kernels", "names"), ORDERS)
def test_the_order_of_sdpa_kernel_is_the_order_of_pytorchs_kernels(
    target: ag.Target, kernels: list[SDPBackend], names: str
) -> None:
    graph = ag.attention(HALF, HALF, HALF)
    usual = explained(graph, target)
    with sdpa_kernel(kernels, set_priority=True):
        found = explained(graph, target)
        forced = explained(graph, target, backends=("triton",))
    assert " ".join((found.backend or "", *found.also)) == names
    assert forced.backend == "triton"
    set_here = names.split()[0] != "triton" and names.split()[1] != "triton"
    assert ("in the order that sdpa_kernel set: " in str(found)) == set_here
    assert explained(graph, target) == usual


def test_on_a_cpu_pytorch_heeds_no_order_and_neither_do_we() -> None:
    with sdpa_kernel([MATH, FLASH], set_priority=True):
        q = torch.zeros(X.shape)
        assert torch.ops.aten._fused_sdp_choice.default(q, q, q) == FLASH.value
        assert chosen(PLAIN) == "torch_sdpa"


@given(order=st.permutations(range(5)), on=st.lists(st.booleans(), min_size=4, max_size=4))
def test_an_order_is_of_all_that_is_on_or_pytorchs_own(order: list[int], on: list[bool]) -> None:
    math, flash, efficient, cudnn = on
    switches = Switches(
        math=math, flash=flash, efficient=efficient, cudnn=cudnn, priority=tuple(order)
    )
    found = switches.order("cuda", 90)
    due = tuple(KERNELS[n] for n in order if n < 4 and on[n])
    own = [tuple(k for k in each if getattr(switches, k)) for each in (USUAL, CUDNN_FIRST)]
    assert found == (() if due in own else due)
