"""torch.compile of models that call plans, and of models that call attention without one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import attn_graph as ag
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from tests.support.sources import ROOT
from tests.support.tracing import traces

CPU = ag.Target.of("cpu")
X = ag.TensorSpec((2, 4, 16, 8), torch.float32)
Attend = Callable[..., Any]

pytestmark = [  # and warnings of torch's own, while it compiles
    traces,
    pytest.mark.filterwarnings("ignore:.*does not support code generation for complex:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Frames:
    """A backend of torch.compile that counts the frames it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


def results(call: Attend, leaves: list[Tensor]) -> list[Tensor]:
    """What a call returns, and the gradients of all that requires them."""
    returned = call(*leaves)
    outputs = [*returned] if isinstance(returned, tuple) else [returned]
    wanted = [t for t in leaves if t.requires_grad]
    loss = sum(o.square().sum() for o in outputs if o.requires_grad)
    assert isinstance(loss, Tensor)
    return [*outputs, *torch.autograd.grad(loss, wanted)]


def check(call: Attend, leaves: list[Tensor], backend: str) -> None:
    """Compiled as one graph, the call gives what it gives eagerly."""
    due = results(call, leaves)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for a, b in zip(results(compiled, leaves), due, strict=True):
        assert torch.equal(a, b)


def three(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(X.shape, dtype=dtype).requires_grad_() for _ in range(3)]


# Masks and named tensors, in both forms


@frozen
class Third(ag.Mask):
    """Every third key, and the first."""

    first: bool = True

    def keep(self, at: ag.extend.Place) -> Any:  # Any: a tensor, or a number
        return (at.j % 3 == 0) | ((at.j == 0) & self.first)


def named() -> dict[str, Tensor]:
    return {
        "bias": torch.randn(1, 4, 16, 16).requires_grad_(),
        "alibi": torch.rand(4).requires_grad_(),
        "sinks": torch.randn(4).requires_grad_(),
        "keep": torch.rand(2, 1, 16, 16) < 0.7,
        "kv_lengths": torch.tensor([16, 9]),
        "q_lengths": torch.tensor([12, 16]),
    }


KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "none": ({}, ()),
    "causal": ({"mask": ag.Causal()}, ()),
    "window": ({"mask": ag.Causal() & ag.Window(4), "soft_cap": 3.0}, ()),
    "or, not": ({"mask": ~ag.Window(2, 2) | ag.Prefix(3)}, ()),
    "own": ({"mask": ag.Causal() & Third()}, ()),
    "bias": ({"scale": 0.3}, ("bias",)),
    "slopes": ({"mask": ag.Causal()}, ("alibi",)),
    "sinks": ({"mask": ag.Window(4, 0)}, ("sinks",)),
    "keep": ({}, ("keep",)),
    "lengths": ({"mask": ag.Causal("bottom_right")}, ("kv_lengths", "q_lengths")),
    "all": ({"mask": ag.Causal(), "soft_cap": 5.0}, ("bias", "keep", "sinks", "kv_lengths")),
}


def cases_of(form: int) -> list[Any]:  # Any: parameters of pytest
    """Each kind by each backend in one form, by slow Inductor too; in both forms all at once."""
    both = {kind: n % 2 == form or kind == "all" for n, kind in enumerate(KINDS)}
    return [
        *((kind, BACKENDS[not mine]) for kind, mine in both.items()),
        ("all", "eager"),
        *(pytest.param(x, "inductor", marks=pytest.mark.slow) for x, mine in both.items() if mine),
    ]


@pytest.mark.parametrize(("kind", "backend"), cases_of(0))
def test_a_plan_compiles(kind: str, backend: str) -> None:
    options, names = KINDS[kind]
    more = [named()[name] for name in names]
    specs: dict[str, Any] = dict(zip(names, map(ag.TensorSpec.like, more), strict=True))
    plan = ag.compile(ag.attention(X, X, X, **options, **specs, stats=True), target=CPU)

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        return plan(q, k, v, **dict(zip(names, more, strict=True)))

    check(attend, [*three(), *more], backend)


@pytest.mark.parametrize(("kind", "backend"), cases_of(1))
def test_a_call_compiles(kind: str, backend: str) -> None:
    options, names = KINDS[kind]
    more = [named()[name] for name in names]

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        given: Any = dict(zip(names, more, strict=True))
        return attention(q, k, v, **options, **given, stats=("lse",))

    check(attend, [*three(), *more], backend)


def test_masks_may_be_made_inside() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        window = ag.Window(left=k.shape[2] // 4, align="top_left")
        mask = (ag.Causal() & window) | ~ag.Prefix(14) & Third(first=False)
        return attention(q, k, v, mask=mask, scale=1 / math.sqrt(q.shape[-1]))

    check(attend, three(), "aot_eager")


def test_the_drop_in_function_compiles() -> None:
    flags = torch.rand(16, 16) < 0.7

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        a = scaled_dot_product_attention(q, k, v, is_causal=True)
        b = scaled_dot_product_attention(q, k[:, :2], v[:, :2], flags, enable_gqa=True)
        c = scaled_dot_product_attention(q[0], k[0], v[0], scale=0.2)
        return a + b + c

    check(attend, three(), "aot_eager")


def test_autocast_and_grad_mode_are_those_around_the_call() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            o = attention(q, k, v, mask=ag.Causal())
        with torch.no_grad():
            p = scaled_dot_product_attention(q, k, v)
        return o, p

    check(attend, three(), "aot_eager")


def test_dropout_draws_inside() -> None:
    q, k, v = (t.detach() for t in three())  # eager code that may go back keeps its weights

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    due = attend(q, k, v)
    torch.manual_seed(3)
    one, two = compiled(q, k, v), compiled(q, k, v)
    assert torch.equal(one, due)
    assert not torch.equal(one, two)


def test_prefer_and_avoid_count_when_compiled_code_runs() -> None:
    """They are not part of the code: it runs as eager code would, here and after loading."""
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    q, k, v = (t.detach() for t in three())
    compiled(q, k, v)
    with ag.prefer("cudnn"), pytest.raises(ag.NoBackendError):
        compiled(q, k, v)
    compiled(q, k, v)


def test_a_plan_of_another_machine_is_refused() -> None:
    plan = ag.compile(ag.attention(X, X, X), target="h200")
    with pytest.raises(RuntimeError, match="plan is for"):
        torch.compile(plan, fullgraph=True, backend="eager")(*three())


# Frames


def step(model: Attend, tokens: Tensor) -> None:
    model(tokens).square().mean().backward()


class Layer(nn.Module):
    """A layer as Llama has it: RMS norm, RoPE, grouped heads, a gated MLP; x [B,S,32]."""

    def __init__(self, mask: ag.Mask) -> None:
        super().__init__()
        self.mask, self.scale = mask, 8**-0.5
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(2))
        self.q, self.o = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.k, self.v = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, turn), rotate(k, turn)
        o = attend(self, q, k, v)
        x = x + self.o(o.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = turn
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    """Four layers, of which odd ones see a window."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        masks = ag.Causal(), ag.Causal() & ag.Window(6)
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer(masks[n % 2]) for n in range(4))
        self.attend = attend

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * 1e4 ** -torch.linspace(0, 1, 4)
        angles = torch.cat((angles, angles), -1)
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()), self.attend)
        return x


def call_form(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(q, k, v, mask=layer.mask, scale=layer.scale)


def drop_in_form(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def plan_form(batch: int = 2, length: int = 24) -> Attend:
    q = ag.TensorSpec((batch, 4, length, 8), torch.float32, layout="bshd")
    k = ag.TensorSpec((batch, 2, length, 8), torch.float32, layout="bshd")
    masks = ag.Causal(), ag.Causal() & ag.Window(6)
    plans = {mask: ag.compile(ag.attention(q, k, k, mask=mask), target=CPU) for mask in masks}
    even, odd = plans.values()

    def attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Any:
        plan = even if layer.mask == masks[0] else odd
        return plan(q, k, v)

    return attend


FORMS: dict[str, Callable[[], Attend]] = {
    "plan": plan_form,
    "call": lambda: call_form,
    "sdpa": lambda: drop_in_form,
}


def gradients(model: nn.Module, run: Attend, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    step(run, tokens)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        *((form, "aot_eager") for form in FORMS),
        pytest.param("call", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_llama_trains_as_it_does_eagerly(form: str, backend: str) -> None:
    model, tokens = Llama(FORMS[form]()), torch.randint(50, (2, 24))
    due = gradients(model, model, tokens)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for a, b in zip(gradients(model, compiled, tokens), due, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_one_frame_serves_twenty_steps(form: str) -> None:
    """Each as it is eagerly."""
    model, frames = Llama(FORMS[form]()), Frames()
    compiled = torch.compile(model, fullgraph=True, backend=frames)
    for step in range(20):
        tokens = torch.randint(50, (2, 24))
        made = gradients(model, compiled, tokens)
        if step % 10 == 0:
            torch.testing.assert_close(made, gradients(model, model, tokens))
    assert frames.count == 1


@pytest.mark.parametrize("form", ["call", "sdpa"])
def test_two_frames_serve_every_length(form: str) -> None:
    model, frames = Llama(FORMS[form]()), Frames()
    compiled = torch.compile(model, fullgraph=True, backend=frames)
    for length in (24, 32, 17, 40, 100):
        tokens = torch.randint(50, (2, length))
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert frames.count == 2


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda m: m,
    "one row": lambda m: m[..., :1, :],
    "one key": lambda m: m[..., :1],
    "two axes": lambda m: m[0, 0],
    "padded": lambda m: F.pad(m, (0, -m.shape[-1] % 64))[..., : m.shape[-1]],
}


@pytest.mark.parametrize("kind", MASKS)
def test_no_question_about_symbols_has_two_parts(kind: str) -> None:
    """PyTorch's cache of code forgets the answer to `n in (1, full)`: that for 64 ran for 29."""

    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Any:
        mask = MASKS[kind](m)
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return o, attention(q, k, v, bias=mask[None, None] if mask.ndim == 2 else mask)

    questions: list[sympy.Basic] = []

    def list_questions(graph: torch.fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
        mode: Any = detect_fake_mode(fakes)  # Any: there is one
        questions.extend(x.expr for x in mode.shape_env.guards)
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=list_questions)
    for n in (13, 64, 29):
        q, k, v, m = (torch.randn(2, 2, n, x) for x in (8, 8, 8, n))
        torch.testing.assert_close(compiled(q, k, v, m), attend(q, k, v, m))
    assert questions
    assert not [x for x in questions if x.has(sympy.Or, sympy.And)]


def test_equal_masks_are_one_frame() -> None:
    """What is made anew for each call: it is compared by what it says."""
    frames = Frames()
    compiled = torch.compile(attention, fullgraph=True, backend=frames)
    q, k, v = three()
    for width in (3, 3, 3, 4):
        compiled(q, k, v, mask=ag.Causal() & ag.Window(width))
    assert frames.count == 2


def test_scales_are_constants() -> None:
    def attend(q: Tensor, scale: float) -> Any:
        return attention(q, q, q, scale=scale)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    (q, *_) = three()
    for scale in (0.1, 0.25, 1 / 3):
        assert torch.equal(compiled(q, scale), attend(q, scale))


def call_of(mask: ag.Mask) -> Attend:
    return lambda q, k, v: attention(q, k, v, mask=mask)


# Around compiled code


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_computes_again(reentrant: bool, backend: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(call_of(ag.Causal()), q, k, v, use_reentrant=reentrant)

    leaves = three()
    _, *due = results(call_of(ag.Causal()), leaves)
    for each in (attend, torch.compile(attend, fullgraph=not reentrant, backend=backend)):
        each(*leaves).square().sum().backward()
        for leaf, gradient in zip(leaves, due, strict=True):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, gradient)
            leaf.grad = None


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_selective_checkpointing_sees_one_operator(
    policy: CheckpointPolicy, is_compiled: bool
) -> None:
    """Eager plans too: under the mode that selects, a call is one operator to choose about."""
    seen = []

    def choose(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        seen.append(op)
        return policy

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(choose)

    plan = ag.compile(ag.attention(X, X, X, mask=ag.Causal()), target=CPU)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(plan, q, k, v, use_reentrant=False, context_fn=contexts)

    leaves = three()
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if is_compiled else attend
    for a, b in zip(results(run, leaves), results(plan, leaves), strict=True):
        assert torch.equal(a, b)
    assert torch.ops.attn_graph.attention.default in seen


SECOND = """
import sys
import torch
import attn_graph as ag
from torch._dynamo.utils import counters

torch.manual_seed(0)
x = ag.TensorSpec((1, 2, 16, 8), torch.float32)
masks = ag.Window(int(sys.argv[1]), 0), ag.Causal()
plans = [ag.compile(ag.attention(x, x, x, mask=m)) for m in masks[:: int(sys.argv[2])]]
q = torch.randn(x.shape, requires_grad=True)

def both(q):
    return plans[0](q, q, q) - 2 * plans[1](q, q, q)

o = torch.compile(both, fullgraph=True)(q)
torch.testing.assert_close(o, both(q))
(g,) = torch.autograd.grad(o.sin().sum(), q)
torch.testing.assert_close(g, torch.autograd.grad(both(q).sin().sum(), q)[0])
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_another_process_finds_the_code_of_this_plan_and_of_no_other(tmp_path: Path) -> None:
    """Inductor keeps code on disk: keyed by what the plans say, not by when they were made.

    Where $CI is set it calls no operator that PyTorch's table decomposes, but for ours.
    """

    def run(*arguments: int) -> list[int]:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CI": "1"}
        program = (sys.executable, "-P", "-c", SECOND, *map(str, arguments))
        output = subprocess.run(
            program, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
        )
        return [*map(int, output.stdout.split())]

    assert not any(run(3, 1))
    assert any(run(3, 1))
    assert not any(run(5, 1))
    assert not any(run(3, -1))  # the same plans, the other way round
