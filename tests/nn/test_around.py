"""What surrounds a model in PyTorch: recomputing, saving elsewhere, modes, copies, workers."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.data import DataLoader, Dataset

import attn_graph as ag
from attn_graph.nn.functional import attention
from tests.support.forking import forks

SPEC = ag.TensorSpec((2, 4, 6, 8), torch.float32)
CPU = ag.Target.of("cpu")
Run = Callable[..., torch.Tensor]


def tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 6, 8, generator=g).requires_grad_() for _ in range(3)]


def by_plan(*backends: str) -> Run:
    graph = ag.attention(SPEC, SPEC, SPEC, mask=ag.Causal() & ag.Window(3))
    return ag.compile(graph, target=CPU, backends=backends or None)  # type: ignore[return-value]  # one output


def by_function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o = attention(q, k, v, mask=ag.Causal() & ag.Window(3))
    assert isinstance(o, torch.Tensor)
    return o


FORMS: dict[str, Run] = {"plan": by_plan("torch_sdpa", "math"), "function": by_function}


def gradients(run: Run, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Of a block: a product, attention, a product."""
    return [*torch.autograd.grad((run(*leaves) ** 2).sum(), leaves)]


@pytest.fixture(params=FORMS)
def block(request: pytest.FixtureRequest) -> Run:
    """A piece of a model."""
    attend = FORMS[request.param]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(torch.tanh(q), k * 2, v).sin()

    return run


def check_same(run: Run, block: Run, around: Any = nullcontext) -> None:
    """The gradients of the block, as it is and as something around it lets it run."""
    due = gradients(block, *tensors())
    with around():
        result = gradients(run, *tensors())
    for x, ref in zip(result, due, strict=True):
        assert torch.equal(x, ref)


def test_a_checkpoint_recomputes_it(block: Run) -> None:
    check_same(lambda *x: checkpoint(block, *x, use_reentrant=False), block)
    leaves, due = tensors(), gradients(block, *tensors())
    (checkpoint(block, *leaves, use_reentrant=True) ** 2).sum().backward()
    for leaf, ref in zip(leaves, due, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, ref)


OP = "attn_graph.attention.default"


def policy(save: CheckpointPolicy, log: list[str]) -> Callable[..., CheckpointPolicy]:
    """What to do with attention; everything else is recomputed."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        log.append(f"{'again ' if ctx.is_recompute else ''}{op}")
        return save if str(op) == OP else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


@pytest.mark.parametrize("save", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpoints_see_one_operator_and_may_save_it(
    block: Run, save: CheckpointPolicy
) -> None:
    log: list[str] = []

    def contexts() -> Any:  # Any: two contexts
        return create_selective_checkpoint_contexts(policy(save, log))

    check_same(lambda *x: checkpoint(block, *x, use_reentrant=False, context_fn=contexts), block)
    assert log.count(OP) == 1
    assert not [op for op in log if "scaled_dot" in op or ".mm." in op]


def test_a_policy_that_saves_everything(block: Run) -> None:
    def contexts() -> Any:  # Any: two contexts
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    check_same(lambda *x: checkpoint(block, *x, use_reentrant=False, context_fn=contexts), block)


def test_what_is_saved_may_lie_elsewhere(block: Run) -> None:
    check_same(block, block, save_on_cpu)
    saved: list[torch.Tensor] = []

    @contextmanager
    def as_bytes() -> Iterator[None]:
        def pack(x: torch.Tensor) -> bytes:
            saved.append(x)
            return pickle.dumps(x.detach())

        with saved_tensors_hooks(pack, pickle.loads):
            yield

    check_same(block, block, as_bytes)
    assert len(saved) >= 5  # q, k, v, o and lse, and what the products save


def test_inference_mode_gives_the_same_and_tensors_of_it_are_taken(block: Run) -> None:
    leaves = tensors()
    due = block(*leaves)
    with torch.inference_mode():
        o = block(*leaves)
        inner = block(*(x.clone() for x in leaves))
    assert o.is_inference()
    for x in (o, inner, block(*leaves)):
        assert torch.equal(x, due)


def test_a_default_device_and_dtype_change_nothing(block: Run) -> None:
    leaves, due = tensors(), block(*tensors())
    ag.clear_cache()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        attend = by_plan("math")
        o, planned = by_function(*leaves), attend(*leaves)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert o.device.type == "cpu"
    torch.testing.assert_close(o, planned)
    assert torch.equal(due, block(*leaves))


def test_autocast_leaves_plans_alone_and_casts_for_functions() -> None:
    leaves = tensors()
    plan = by_plan()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plan(*leaves), plan(*leaves))
        assert plan(*leaves).dtype == torch.float32
        assert by_function(*leaves).dtype == torch.bfloat16
        with pytest.raises(ag.PlanMismatchError):
            plan(*(x.bfloat16() for x in leaves))


def run_here(plan: Run, connection: Any) -> None:  # Any: of multiprocessing
    """What a spawned process does with a plan."""
    torch.set_num_threads(1)
    connection.send(plan(*(x.detach() for x in tensors())).detach().numpy())


@pytest.mark.slow
def test_a_spawned_process_gets_the_plan() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    plan: Any = by_plan("math")
    process = context.Process(target=run_here, args=(plan, theirs))
    process.start()
    theirs.close()  # so that `recv` raises where the process ends early
    result = torch.from_numpy(mine.recv())
    process.join()
    assert torch.equal(result, plan(*tensors()).detach())


class Attended(Dataset[torch.Tensor]):
    """A dataset whose workers call a plan."""

    def __init__(self, plan: Run) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> torch.Tensor:
        return self.plan(*((x + n).detach() for x in tensors()))


@forks
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")  # where there is 1 core
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_call_plans(start: str) -> None:
    data = Attended(by_plan("math"))
    due = [data[n] for n in range(4)]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start)
    for x, ref in zip(loader, due, strict=True):
        assert torch.equal(x, ref)
