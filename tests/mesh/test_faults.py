"""Faults of ranks: said by all, before anything is sent, or ended by the process group."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

import attn_graph as ag
from attn_graph.mesh.layout import Method, Placement
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.site import BoxRun
from tests.support.ranks import TIMEOUT, Crew, count_bytes, start_crew


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with start_crew(3, tmp_path_factory.mktemp("ranks")) as crew:
        yield crew


def small(mask: ag.Mask | None = None) -> ag.Graph:
    x = ag.TensorSpec((1, 2, 12, 4), torch.float32)
    return ag.attention(x, x, x, mask=mask, stats=True)


def attend_twice(rank: int, group: Any, graphs: list[Sharded]) -> tuple[str, bool]:
    """What the first graph's error says, and whether a plan runs after it."""
    with count_bytes() as sent, pytest.raises(ag.GraphError) as error:
        run_plan(rank, group, graphs[rank])
    assert sent == [0, 0]
    return str(error.value), bool(run_plan(rank, group, graphs[0]).isfinite().all())


def run_plan(rank: int, group: Any, sharded: Sharded) -> torch.Tensor:
    """o of a rank, of ones."""
    plan = ag.compile(sharded, group=group, target="cpu")
    shards = [torch.ones(spec.shape) for spec in plan.specs.values()]
    o: torch.Tensor = plan(*shards)[0]
    return o


def test_ranks_that_disagree_say_both(crew: Crew) -> None:
    causal, window = (
        ag.shard(small(mask), ag.Mesh(2), "contiguous") for mask in (ag.Causal(), ag.Window(3))
    )
    for said, runs in crew.run(2, attend_twice, [causal, window]):
        assert "ranks disagree" in said
        assert "rank 0: def graph(" in said
        assert "mask=Band(high=0)" in said
        assert "mask=Band(low=-3, high=0)" in said
        assert runs  # no message is left


def count_comparisons(rank: int, group: Any, sharded: Sharded) -> int:
    """How often three calls of a plan compare what ranks compute."""
    plan = ag.compile(sharded, group=group, target="cpu")
    shards = [torch.ones(spec.shape) for spec in plan.specs.values()]
    with patch.object(distributed, "all_gather", wraps=distributed.all_gather) as compare:
        for _ in range(3):
            plan(*shards)
    return compare.call_count


def test_ranks_compare_once(crew: Crew) -> None:
    sharded = ag.shard(small(), ag.Mesh(2), "zigzag")
    assert crew.run(2, count_comparisons, sharded) == [1, 1]


class StumbleError(Exception):
    """A fault of a rank's own."""


def fail_at(number: int) -> Callable[..., Any]:
    """What fails at a call of that number, counted from 0; before, it does nothing of use."""
    calls = iter(range(number + 1))

    def fail(box: BoxRun, *args: Any) -> Any:
        if next(calls) == number:
            raise StumbleError
        return RIGHT[len(args) > 0](box, *args)

    return fail


RIGHT = BoxRun.forward, BoxRun.backward


def stumble(rank: int, group: Any, sharded: Sharded, side: str) -> bool:
    """Fail within each box in all ranks, and after each fault compute the same as before."""
    plan = ag.compile(sharded, group=group, target="cpu")
    shards = [torch.randn(spec.shape).requires_grad_() for spec in plan.specs.values()]

    def compute() -> tuple[torch.Tensor, ...]:
        o = plan(*shards)[0]
        return o, *torch.autograd.grad(o, shards, torch.ones_like(o))

    due = compute()
    for number in range(3):
        with patch.object(BoxRun, side, fail_at(number)), pytest.raises(StumbleError):
            compute()
        distributed.barrier(group=group)
    return all(torch.equal(x, y) for x, y in zip(compute(), due, strict=True))


@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_fault_within_a_hop_leaves_no_message(crew: Crew, method: Method, side: str) -> None:
    assert all(
        crew.run(3, stumble, ag.shard(small(), ag.Mesh(3), "contiguous", method=method), side)
    )


def misuse(rank: int, group: Any, sharded: Sharded) -> list[str]:
    """What the errors of wrong calls say; none of them sends a message."""
    plan = ag.compile(sharded, group=group, target="cpu")
    q, k, v = (torch.ones(spec.shape) for spec in plan.specs.values())
    faults = []
    for call in (
        lambda: plan(q[:, :, 1:], k, v),
        lambda: plan(q, k),
        lambda: ag.compile(ag.shard(small(), ag.Mesh(5), "batch"), group=group),
    ):
        with pytest.raises((ag.GraphError, ag.PlanMismatchError)) as caught:
            call()
        faults.append(str(caught.value))
    return faults


def test_wrong_calls_say_what_was_expected(crew: Crew) -> None:
    shape, missing, size = crew.run(2, misuse, ag.shard(small(), ag.Mesh(2), "zigzag"))[0]
    assert "q: expected f32[1, 2, 6, 4], got f32[1, 2, 5, 4]" in shape
    assert "v: expected f32[1, 2, 6, 4], got nothing" in missing
    assert "a mesh of 5 ranks, and a group of 2; say ag.Mesh(2)" in size


def refuse_alone(rank: int, group: Any, sharded: Sharded) -> tuple[str, str, bool]:
    """The errors where rank 0 has no v, and where rank 1 has another q; and whether a plan runs
    after them."""
    plan = ag.compile(sharded, group=group, target="cpu")
    q, k, v = (torch.ones(spec.shape) for spec in plan.specs.values())
    said = []
    with count_bytes() as sent:
        for given in ((q, k) if rank == 0 else (q, k, v), (q[rank:], k, v)):
            with pytest.raises((ag.GraphError, ag.PlanMismatchError)) as error:
                plan(*given)
            said.append(f"{type(error.value).__name__}: {error.value}")
    assert sent == [0, 0]
    return said[0], said[1], bool(plan(q, k, v)[0].isfinite().all())


def test_what_one_rank_refuses_all_refuse(crew: Crew) -> None:
    first, second = crew.run(2, refuse_alone, ag.shard(small(), ag.Mesh(2), "zigzag"))
    for own, other, rank in ((first[0], second[0], 0), (second[1], first[1], 1)):
        assert own.startswith("PlanMismatchError: the call differs from the plan")
        assert other.startswith(f"GraphError: rank {rank} refused its call, so no rank computes: ")
        assert other.endswith(own.removeprefix("PlanMismatchError: "))
    assert first[2]
    assert second[2]


def call_in_turn(rank: int, group: Any, graphs: list[Sharded]) -> bool:
    """Whether two plans give the same when the last rank begins with the other one."""
    plans = [ag.compile(sharded, group=group, target="cpu") for sharded in graphs]
    shards = [
        [
            torch.randn(x.shape, generator=torch.Generator().manual_seed(7 * n + rank))
            for x in inputs
        ]
        for n, inputs in enumerate(plan.specs.values() for plan in plans)
    ]
    dues = [plan(*own)[0] for plan, own in zip(plans, shards, strict=True)]
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(lambda: plans[1](*shards[1])[0]) if rank else None
        time.sleep(0.3 * rank)  # the other plan of rank 1 waits for its messages by now
        o = plans[0](*shards[0])[0]
        results = [o, last.result() if last else plans[1](*shards[1])[0]]
    return all(torch.equal(x, due) for x, due in zip(results, dues, strict=True))


def test_messages_of_two_plans_are_never_mixed(crew: Crew) -> None:
    """Messages of both are equally long."""
    graphs = [
        ag.shard(small(mask), ag.Mesh(2), "contiguous", method="ring")
        for mask in (None, ag.Window(9, 9))
    ]
    assert crew.run(2, call_in_turn, graphs) == [True, True]


def use_elsewhere(rank: int, group: Any, sharded: Sharded) -> list[str]:
    """What the errors of a plan under transforms and of compilations say; and copies are it."""
    plan = ag.compile(sharded, group=group, target="cpu")
    q, k, v = (torch.ones(spec.shape) for spec in plan.specs.values())
    foreign: Any = distributed.GroupMember.NON_GROUP_MEMBER
    calls: list[Callable[[], object]] = [
        lambda: torch.func.vmap(lambda q: plan(q, k, v))(q[None]),
        lambda: torch.func.grad(lambda q: plan(q, k, v)[0].sum())(q),
        lambda: ag.compile(sharded, group=foreign),
        lambda: ag.compile(sharded, group=group, target="cpu", backends=("cudnn",)),
        lambda: ag.compile(sharded, group=group, target="cpu", backends=("cudnnn",)),
        lambda: pickle.dumps(plan),
    ]
    said = []
    for call in calls:
        with pytest.raises((ag.GraphError, ag.NoBackendError)) as error:
            call()
        said.append(str(error.value))
    module: Any = torch.nn.Linear(2, 2)
    module.plan = plan
    assert deepcopy(module).plan is plan
    assert copy(plan) is plan
    return said


@pytest.mark.parametrize("placement", ["zigzag", "batch"])
def test_what_a_ranks_plan_can_t_do_says_so(crew: Crew, placement: Placement) -> None:
    for said in crew.run(2, use_elsewhere, ag.shard(small(), ag.Mesh(2), placement)):
        vmap, grad, foreign, backend, unknown, pickled = said
        assert "outside of torch.func's transforms (vmap, grad, jvp)" in vmap
        assert vmap == grad
        assert "is not a process group of which this process is a member" in foreign
        assert "cudnn can't: " in backend
        assert "cudnnn" in unknown
        assert "belongs to its process group, and doesn't pickle" in pickled


def differentiate_twice(rank: int, group: Any, sharded: Sharded) -> list[str]:
    """What the errors of a second derivative and of forward mode say."""
    plan = ag.compile(sharded, group=group, target="cpu")
    q, k, v = (torch.ones(spec.shape).requires_grad_() for spec in plan.specs.values())
    outputs = plan(q, k, v)
    o = outputs[0] if isinstance(outputs, tuple) else outputs
    faults = []
    with pytest.raises(ag.GraphError) as second:
        torch.autograd.grad(o.sum(), q, create_graph=True)
    faults.append(str(second.value))
    with pytest.raises(ag.GraphError) as forward:
        torch.func.jvp(lambda q: plan(q, k.detach(), v.detach()), (q.detach(),), (q.detach(),))
    return [*faults, str(forward.value)]


def test_other_derivatives_than_the_first_are_refused(crew: Crew) -> None:
    for said in crew.run(2, differentiate_twice, ag.shard(small(), ag.Mesh(2), "zigzag")):
        assert all("ranks differentiate once, in reverse mode" in fault for fault in said)


def die(rank: int, group: Any, sharded: Sharded, when: str) -> str:
    """The last rank ends at once, or after a call; what the others' error says."""
    plan = ag.compile(sharded, group=group, target="cpu")
    shards = [torch.ones(spec.shape).requires_grad_() for spec in plan.specs.values()]
    o = None if when == "at first" else plan(*shards)[0]
    if rank == group.size() - 1:
        os._exit(1)

    def go_on() -> None:
        if o is not None and when == "before the backward":
            torch.autograd.grad(o.sum(), shards)
        else:
            plan(*shards)

    with pytest.raises(RuntimeError) as caught:
        go_on()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at first", "before a hop", "before the backward"])
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, when: str) -> None:
    task = pickle.dumps((2, die, (ag.shard(small(), ag.Mesh(2), "zigzag"), when)))
    with start_crew(2, tmp_path) as crew:
        began = time.monotonic()
        for pipe in crew.pipes:
            pipe.send_bytes(task)
        fault, said = pickle.loads(crew.pipes[0].recv_bytes())
        assert fault is None, fault
        assert said
        assert time.monotonic() - began < TIMEOUT.seconds
