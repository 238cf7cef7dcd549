"""What surrounds a call: looks of tensors, autograd's hooks and orders, PyTorch's ambient state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import example, given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

import attn_graph as ag
from attn_graph.extend import Place
from attn_graph.ir.modifiers import Modifier
from attn_graph.testing import rule
from attn_graph.testing.strategies import graphs, seeds
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.calls import Leaves, check_gradients, leaves_of, output_of
from tests.support.tracing import Watch

CPU = ag.Target.of("cpu")
X = ag.TensorSpec((2, 4, 16, 8), torch.float32)
NAMES = ("math", "torch_sdpa", *(("triton",) if CPU.interprets else ()))

Route = Callable[[ag.Plan, Leaves], None]


# The look of tensors


def turned(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "shape": (lambda t: t[:1], "k: expected .*, got f32.1, 4, 16, 8"),
    "strides": (turned, "k: expected .*, got f32.* 1, 16"),
    "dtype": (torch.Tensor.double, "k: expected .*, got f64"),
    "device": (lambda t: t.to("meta"), "k: expected a tensor on cpu, got one on meta"),
    "negative bit": (
        torch._neg_view,  # pyright: ignore[reportPrivateImportUsage]  # no public name
        r"k: expected its numbers .* pass k\.resolve_neg\(\)",
    ),
    "layout": (lambda t: t.to_sparse(), "sparse_coo; pass x.to_dense"),
    "no tensor": (torch.Tensor.tolist, "k: expected a tensor"),
    "looks like one": (lambda t: t.detach().numpy()[:1], "k: expected .*, got f32.1, 4, 16, 8"),
}


@pytest.mark.parametrize("backend", NAMES)
def test_every_call_is_compared_and_not_the_first_alone(backend: str) -> None:
    """Right, then wrong in one thing, each in turn, then right again."""
    plan = ag.compile(ag.attention(X, X, X), target=CPU, backends=(backend,))
    q, k, v = tensors_for(plan.graph, 0)
    due = output_of(plan, (q, k, v))
    for spoil, told in WRONG.values():
        with pytest.raises(ag.PlanMismatchError, match=told):
            plan(q, spoil(k), v)
        assert torch.equal(output_of(plan, (q, k, v)), due)


# What autograd hands back


def packed(dtype: torch.dtype = torch.float32) -> tuple[ag.Graph, list[torch.Tensor]]:
    """Attention on the three parts of one packed tensor [B,S,3,H,D]."""
    qkv = torch.randn(2, 16, 3, 4, 8, dtype=dtype, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    specs = map(ag.TensorSpec.like, (q, k, v))
    return ag.attention(*specs, mask=ag.Causal()), [q, k, v]


def squeezed() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), identity)


def identity(t: torch.Tensor) -> torch.Tensor:
    return t


def shuffled() -> saved_tensors_hooks:
    """Saved tensors come back with their last two axes turned in memory."""
    return saved_tensors_hooks(identity, lambda t: turned(t) if t.ndim > 2 else t)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("hooks", [squeezed, save_on_cpu, shuffled])
def test_saved_tensors_may_come_back_with_other_strides(
    backend: str, hooks: Callable[[], AbstractContextManager[None]]
) -> None:
    graph, leaves = packed()
    plan = ag.compile(graph, target=CPU, backends=(backend, "math"))
    do = torch.randn(2, 4, 16, 8)
    for around in (nullcontext, hooks, nullcontext):
        with around():
            o = output_of(plan, leaves)
        check_gradients(graph, leaves, torch.autograd.grad(o, leaves, do), do)


def test_a_saved_tensor_that_comes_back_as_another_is_refused() -> None:
    plan = ag.compile(ag.attention(X, X, X), target=CPU)
    for spoil, told in (
        (torch.Tensor.half, "q: expected f32.*, got f16"),
        (lambda t: t.to("meta"), "q: expected a tensor on cpu, got one on meta"),
    ):
        with saved_tensors_hooks(identity, spoil):
            o = output_of(plan, leaves_of(plan.graph))
        with pytest.raises(ag.PlanMismatchError, match=told):
            o.sum().backward()


def negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-x)  # pyright: ignore[reportPrivateImportUsage]  # no public name


COTANGENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "turned": turned,
    "expanded": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "one row": lambda x: x[:, :, :1].expand(x.shape),
    "every other": lambda x: torch.stack((x, x), -1)[..., 0],
    "negated": negated,
    "off 16 bytes": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


@pytest.mark.parametrize("backend", NAMES)
def test_cotangents_of_every_layout_in_turn_give_the_gradients(backend: str) -> None:
    """One plan, so that a backward plan for one layout would be taken for another's."""
    graph = ag.attention(X, X, X, mask=ag.Causal())
    plan = ag.compile(graph, target=CPU, backends=(backend,))
    leaves, do = leaves_of(graph), torch.randn(X.shape)
    for lay in (*COTANGENTS.values(), *COTANGENTS.values()):
        o = output_of(plan, leaves)
        found = torch.autograd.grad(o, leaves, lay(do))
        check_gradients(graph, leaves, found, lay(do).contiguous())
    assert {pull.plan.backend for pull in plan.memo.pulls.values()} == {backend}


def test_a_backward_plan_is_for_the_layout_of_its_cotangent() -> None:
    """The kernels' own reading of strides may hide it where one plan runs for all."""
    graph = ag.attention(X, X, X, mask=ag.Window(3))
    ag.clear_cache()  # of the plan that others may have called
    plan = ag.compile(graph, target=CPU, backends=("math",))
    leaves, do = leaves_of(graph), torch.randn(X.shape)
    for name in ("dense", "turned", "expanded", "dense"):
        given = COTANGENTS[name](do)
        torch.autograd.grad(output_of(plan, leaves), leaves, given)
        *_, last = plan.memo.pull
        assert last is not None
        assert last.plan.graph.inputs[-1].spec == ag.TensorSpec.like(given)
    assert len(plan.memo.pulls) == 3


def test_a_backward_plan_is_for_the_inputs_that_need_a_gradient() -> None:
    graph, do = ag.attention(X, X, X), torch.randn(X.shape)
    ag.clear_cache()  # of the plan that others may have called
    plan = ag.compile(graph, target=CPU)
    for wanted in ((0,), (1,), (2,), (0, 1), (1, 2), (0,)):
        leaves = [x.requires_grad_(n in wanted) for n, x in enumerate(tensors_for(graph, 0))]
        found = torch.autograd.grad(output_of(plan, leaves), [leaves[n] for n in wanted], do)
        check_gradients(graph, leaves, found, do)
    assert len(plan.memo.pulls) == 5


def test_a_backward_plan_is_for_the_outputs_that_have_a_cotangent() -> None:
    """Two outputs of one shape, so that their cotangents look the same."""

    def attend(q: ag.Value, k: ag.Value, v: ag.Value, w: ag.Value) -> tuple[ag.Value, ag.Value]:
        p, _ = ag.scores(q, k).softmax()
        return p.weigh(v), p.weigh(w)

    graph, do = ag.graph(attend, q=X, k=X, v=X, w=X), torch.randn(X.shape)
    plan, leaves = ag.compile(graph, target=CPU), leaves_of(graph)
    for n in (0, 1, 0):
        found = torch.autograd.grad(plan(*leaves)[n], [leaves[2 + n], leaves[3 - n]], do)
        assert (found[0] != 0).all()
        assert (found[1] == 0).all()


def test_a_cotangent_is_copied_only_for_a_backend_that_needs_it() -> None:
    """And what comes is planned for where the backend takes it; explain and memory tell."""
    graph, told = ag.attention(X, X, X), "do is copied, 4 KiB, where it is broadcast"
    anew = {}
    for backend in ("math", "torch_sdpa"):
        plan = ag.compile(graph, target=CPU, backends=(backend,))
        output_of(plan, leaves_of(graph)).sum().backward()
        (pull,) = plan.memo.pulls.values()
        anew[backend] = len(pull.anew)
        assert (told in str(plan.explain())) == bool(pull.anew)
        assert plan.memory().temporary_backward >= X.type.bytes * len(pull.anew)
    assert anew == {"math": 0, "torch_sdpa": 1}


# Ambient state


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AMBIENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "dispatch mode": Watch,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}
UNRECORDED = ("no grad", "inference")
IN_STEPS = ag.graph(
    lambda q, k, v: (lambda p: (p.weigh(v), p))(ag.scores(q, k).softmax()[0]), q=X, k=X, v=X
)
SLOPES = ag.attention(*(ag.TensorSpec((1, 12, 5, 8), torch.float32),) * 3, alibi=True)


@final
@frozen
class Weighed(Modifier):
    """A step of one's own that takes a product, which autocast would round."""

    hides = False

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s * (s.new_full((1, 1), 1.001) @ s.new_full((1, 1), 2.0))

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        return self.change(ds, at)


WEIGHED = ag.graph(
    lambda q, k, v: ag.scores(q, k).then(Weighed()).softmax()[0].weigh(v), q=X, k=X, v=X
)


def ran(graph: ag.Graph, tensors: Leaves, cotangents: Leaves) -> list[torch.Tensor]:
    """Outputs, and gradients where they are recorded, of a plan that is made anew."""
    ag.clear_cache()
    plan = ag.compile(graph, target=CPU, workspace=ag.Workspace())
    found = plan(*tensors)
    outputs = [*found] if isinstance(found, tuple) else [found]
    if not outputs[0].requires_grad:
        return outputs
    wanted = [t for t in tensors if t.requires_grad]
    pairs = [(o, d) for o, d in zip(outputs, cotangents, strict=True) if d is not None]
    used, given = zip(*pairs, strict=True)
    return [*outputs, *torch.autograd.grad(used, wanted, given)]


@pytest.mark.parametrize("name", AMBIENT)
@given(graph=graphs(), seed=seeds)
@example(graph=IN_STEPS, seed=0)
@example(graph=SLOPES, seed=0)
@example(graph=WEIGHED, seed=0)
@settings(max_examples=settings().max_examples // 3)  # of each state
def test_no_ambient_state_changes_a_bit(name: str, graph: ag.Graph, seed: int) -> None:
    leaves, cotangents = leaves_of(graph, seed), cotangents_for(graph, seed)
    plan = ag.compile(graph, target=CPU)
    due = ran(graph, leaves, cotangents)
    with AMBIENT[name]():
        found = ran(graph, leaves, cotangents)
    if name in UNRECORDED and plan.recorded is not plan:  # kept weights: docs/semantics.md
        for each, x in zip(rule.expect_outputs(graph, leaves), found, strict=True):
            each.check(x)
        return
    for a, b in zip(due, found, strict=False):  # gradients are not recorded under all
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_verify_is_the_same_under_autocast() -> None:
    plan = ag.compile(ag.attention(X, X, X), target=CPU)
    tensors = tensors_for(plan.graph, 0)
    due = plan.verify(*tensors)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert plan.verify(*tensors) == due


def fakes(plan: ag.Plan, tensors: Leaves) -> None:
    with FakeTensorMode() as mode:
        plan(*map(mode.from_tensor, tensors))


def traces(plan: ag.Plan, tensors: Leaves) -> None:
    again = [t + 1 for t in tensors]
    traced = make_fx(lambda *t: plan(*t))(*tensors)
    assert torch.equal(traced(*again), output_of(plan, again))


def exports(plan: ag.Plan, tensors: Leaves) -> None:
    class Wrapped(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return output_of(plan, (q, k, v))

    torch.export.export(Wrapped(), tuple(tensors), strict=False)


def transforms(plan: ag.Plan, tensors: Leaves) -> None:
    torch.func.grad(lambda x: (output_of(plan, tensors).sum() * x).sum())(tensors[0])


@pytest.mark.parametrize("trace", [fakes, traces, exports, transforms])
@pytest.mark.parametrize("fresh", [True, False])
def test_nothing_of_a_trace_stays_behind(trace: Route, fresh: bool) -> None:
    """Neither in the arena, nor in what planning keeps: by a plan that was called before or not."""
    ag.clear_cache()
    workspace = ag.Workspace()
    window = ag.attention(X, X, X, mask=ag.Causal() & ag.Window(5), alibi=True)
    plan = ag.compile(window, target=CPU, backends=("math",), workspace=workspace)
    tensors = tensors_for(window, 0)
    if not fresh:
        plan(*tensors)
    held = workspace.bytes
    trace(plan, tensors)
    assert workspace.bytes == held or trace is traces  # which calls the plan itself, after
    for graph in (window, ag.attention(X, X, X, soft_cap=3.0)):
        other = ag.compile(graph, target=CPU, backends=("math",), workspace=workspace)
        (due,) = rule.expect_outputs(graph, tensors)
        due.check(output_of(other, tensors))


def test_a_plan_made_under_fake_tensors_is_as_any() -> None:
    """With triton its lists of tiles are tensors, which it keeps."""
    mask = (ag.Causal() & ag.Window(5)) | ag.Prefix(2)
    graph = ag.attention(X, X, X, mask=mask)
    for backend in NAMES:
        if backend == "torch_sdpa":
            continue
        ag.clear_cache()
        with FakeTensorMode(), torch.device("meta"):
            plan = ag.compile(graph, target=CPU, backends=(backend,))
        tensors = tensors_for(graph, 0)
        (due,) = rule.expect_outputs(graph, tensors)
        due.check(output_of(plan, tensors))


# Copies


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_a_plan_pickles_as_what_it_was_made_of(target: str) -> None:
    workspace = ag.Workspace()
    graph = ag.attention(X, X, X, mask=ag.Causal() & ag.Window(5), soft_cap=3.0)
    plan = ag.compile(
        graph, target=target, avoid=("torch_sdpa",), deterministic=True, workspace=workspace
    )
    for each in (plan, plan.vjp):
        other = pickle.loads(pickle.dumps(each))
        assert other is not each
        assert (other.graph, other.target, other.backend) == (each.graph, each.target, each.backend)
        assert dict(other.refusals)["torch_sdpa"] == dict(each.refusals)["torch_sdpa"]
    if target == "cpu":
        tensors = tensors_for(graph, 0)
        there = pickle.loads(pickle.dumps(plan))
        assert torch.equal(output_of(there, tensors), output_of(plan, tensors))


def test_a_plan_of_the_shared_workspace_arrives_in_the_one_there() -> None:
    plan = ag.compile(ag.attention(X, X, X), target=CPU)
    assert pickle.loads(pickle.dumps(plan)) is plan  # planned again, and known


def test_a_copy_of_a_plan_is_the_plan() -> None:
    plan = ag.compile(ag.attention(X, X, X), target=CPU)
    assert copy.deepcopy({"plan": plan})["plan"] is copy.copy(plan) is plan
