"""All that leads to cuDNN and back, with what its documentation says in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, example, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import backward
from attn_graph.lowering.backend import write_named
from attn_graph.lowering.cudnn.backend import BACKEND as cudnn
from attn_graph.lowering.cudnn.backend import describe_problem, read_case
from attn_graph.lowering.cudnn.run import Run, run_notes, temporary_bytes
from attn_graph.lowering.libraries.cudnn_limits import reasons
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Workspace
from attn_graph.plan.building import loses
from attn_graph.planner.choose import choose
from attn_graph.spec import FLOATS
from attn_graph.testing import formula, rule
from attn_graph.testing.strategies import seeds, with_layouts
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.machine.test_memory import allocated
from tests.support.cudnn_graphs import aligned, cudnn_graphs, spaced
from tests.support.cudnn_model import Model
from tests.test_outputs import rooms_like

VERSIONS = (
    ("triton", "3.4"),
    ("nvidia-cudnn-frontend", "1.28.0"),
    ("nvidia-cudnn-cu13", "9.20.0.48"),
)
H200 = Target("h200", "cuda", 90, (), VERSIONS)
NEWER = evolve(H200, libraries=(*VERSIONS[:2], ("nvidia-cudnn-cu13", "9.24.0.43")))
X = ag.TensorSpec((2, 4, 6, 8), torch.float16)
ENDED = tuple(f"{x} is copied, 768 B, with 0 in rows past the lengths" for x in "kv")
LONG = ag.TensorSpec((2, 4, 128, 64), torch.float16)


def refusals(graph: Graph, target: Target = H200) -> list[Reason]:
    case = read_case(Request(graph, target, Options()))
    assert case is not None
    return [*reasons(case)]


def modelled(graph: Graph, target: Target = H200) -> Run:
    """How a simplified graph, one that cuDNN takes, would run."""
    assert not refusals(graph, target)
    case, call = describe_problem(Request(graph, target, Options()))
    return Run.of(case, call, graph, Workspace(), 128, Model(call))


def results(graph: Graph, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return modelled(graph)(*tensors)[0]


def notes(graph: Graph) -> tuple[str, ...]:
    run = modelled(graph)
    return tuple(run_notes(run.case, run.call, graph))


def besides(graph: Graph) -> int:
    run = modelled(graph)
    return temporary_bytes(run.case, run.call, graph)


def gradient_of(graph: Graph, do: torch.Tensor) -> tuple[Graph, list[str]]:
    """The backward graph by every floating input, and their names."""
    wants = [n for n, i in enumerate(graph.inputs) if i.spec.dtype in FLOATS]
    return backward(graph, wants, [ag.TensorSpec.like(do)]), [graph.inputs[n].name for n in wants]


LENGTHS, HALF_SINKS = (
    ag.attention(
        *(X, X, X),
        mask=ag.Causal(),
        kv_lengths=ag.TensorSpec((2,), torch.int64),
        sinks=ag.TensorSpec((4,), dtype),
    )
    for dtype in (torch.float32, torch.float16)
)


@given(graph=with_layouts(cudnn_graphs(), spaced), seed=seeds)
@example(graph=LENGTHS, seed=0)
@example(graph=LENGTHS, seed=3)
@example(graph=HALF_SINKS, seed=0)
def test_what_cudnn_is_told_means_what_the_graph_means(graph: Graph, seed: int) -> None:
    simple = cudnn.seen(simplify(graph))
    assume(not refusals(simple))
    tensors = tuple(map(aligned, tensors_for(graph, seed)))
    run = modelled(simple)
    outputs, (o, lse) = run(*tensors)
    for found, due, i in zip(
        outputs, rule.expect_outputs(graph, tensors), simple.outputs, strict=True
    ):
        due.check(found)
        assert ag.TensorSpec.like(found) == result_spec(simple, i)
    cotangents = cotangents_for(simple, seed)
    back, names = gradient_of(simple, *cotangents)
    dues = rule.expect_gradients(graph, tensors, cotangents)
    assume(not refusals(back))
    poisoned = formula.poison_blind_rows(graph, tensors, cotangents, seed)
    gradients = results(back, (*tensors, o, lse, *poisoned))
    for name, gradient in zip(names, gradients, strict=True):
        dues[name].check(gradient)


@given(graph=with_layouts(cudnn_graphs(stats=("lse", "max")), spaced), seed=seeds)
def test_newer_cudnn_gives_the_largest_scores_beside_lse(graph: Graph, seed: int) -> None:
    simple = cudnn.seen(simplify(graph))
    assume(not refusals(simple, NEWER))
    assert [why.key for why in refusals(simple)] == ["statistics"]
    tensors, run = tuple(map(aligned, tensors_for(graph, seed))), modelled(simple, NEWER)
    assert [slot.argument for slot in run.call.outputs] == ["o", "stats", "score_max"]
    outputs, (o, lse) = run(*tensors)
    assert outputs[0] is o
    assert outputs[1] is lse
    dues = rule.expect_outputs(graph, tensors)
    for made, due, i in zip(outputs, dues, simple.outputs, strict=True):
        due.check(made)
        assert ag.TensorSpec.like(made) == result_spec(simple, i)


@given(graph=with_layouts(cudnn_graphs(), spaced), seed=seeds)
@example(graph=LENGTHS, seed=0)
def test_results_are_written_into_the_callers_tensors(graph: Graph, seed: int) -> None:
    simple = cudnn.seen(simplify(graph))
    assume(not refusals(simple))
    tensors = tuple(map(aligned, tensors_for(graph, seed)))
    run = modelled(simple)
    outputs, saved = run(*tensors)
    check_rooms(run, simple, tensors, outputs)
    (do, *_) = cotangents_for(simple, seed)
    back, _ = gradient_of(simple, do)
    assume(not refusals(back))
    given = (*tensors, *saved, do)
    check_rooms(modelled(back), back, given, results(back, given))


@given(graph=cudnn_graphs(), seed=seeds, data=st.data())
def test_gradients_lie_as_declared(graph: Graph, seed: int, data: st.DataObject) -> None:
    simple = simplify(graph)
    (do, *_) = cotangents_for(simple, seed)
    back, _ = gradient_of(simple, do)
    laid = cudnn.seen(data.draw(with_layouts(st.just(back), spaced)))
    assume(not refusals(simple) and not refusals(back))
    tensors = tuple(map(aligned, tensors_for(graph, seed)))
    given = (*tensors, *modelled(simple)(*tensors)[1], do)
    dues = results(back, given)
    for x, due, spec in zip(results(laid, given), dues, laid.declared_outputs, strict=True):
        assert torch.equal(x.nan_to_num(), due.nan_to_num())
        assert ag.TensorSpec.like(x) == (spec or ag.TensorSpec.like(due))
    check_rooms(modelled(laid), laid, given, results(laid, given))


def check_rooms(
    run: Callable[..., Any],
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    due: Sequence[torch.Tensor],
) -> None:
    """A call's results lie in tensors laid out as `due`, but the gradient of sinks, which is cast,
    and nowhere around."""
    rooms, around = rooms_like(due, 8)
    made = write_named(run, graph.result_names, rooms, *tensors)
    for name, x, room, y in zip(graph.result_names, made, rooms, due, strict=True):
        assert x.data_ptr() == room.data_ptr() or name == "dsinks"
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
    assert all((memory[outside] == 7.25).all() for memory, outside in around)


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_captured_call_is_cudnns_plan_alone(side: str) -> None:
    """With `out=` a call allocates nothing, and a replay of what it launched writes the results of
    other numbers in the same places."""
    graph = simplify(ag.attention(X, X, X, mask=ag.Causal("top_left"), stats=True))
    do = ag.TensorSpec(X.shape, X.dtype)
    back = backward(graph, (0, 1, 2), [do, None])
    run = modelled(graph if side == "forward" else back)
    drawn = [tuple(map(aligned, tensors_for(run.graph, seed))) for seed in range(2)]
    tensors, call = [t.clone() for t in drawn[0]], run
    rooms = [torch.full_like(x, torch.nan) for x in call(*tensors)[0]]
    launched: list[tuple[Any, ...]] = []
    recorded = evolve(run, execute=lambda *given: launched.append(given))

    def step() -> object:
        return write_named(recorded, run.graph.result_names, rooms, *tensors)

    step()  # warms up: the workspace grows
    launched.clear()
    _, held, most = allocated(step)
    assert (held, most) == (0, 0)
    for x, y in zip(tensors, drawn[1], strict=True):
        x.copy_(y)
    for arguments in launched:
        run.execute(*arguments)
    for x, y in zip(rooms, call(*drawn[1])[0], strict=True):
        assert torch.equal(x, y)


def test_a_room_off_16_bytes_is_an_error_that_says_so() -> None:
    graph = simplify(ag.attention(X, X, X))
    tensors = tensors_for(graph, 0)
    room = off(torch.zeros(X.shape, dtype=X.dtype))
    with pytest.raises(ag.PlanMismatchError, match=r"o: expected an address .* 2 bytes past"):
        write_named(modelled(graph), ("o",), [room], *map(aligned, tensors))


def test_what_cudnn_adds_to_is_zero_before(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = simplify(LENGTHS)
    tensors = tuple(map(aligned, tensors_for(graph, 0)))
    (do,) = cotangents_for(graph, 0)
    saved = modelled(graph)(*tensors)[1]
    back, names = gradient_of(graph, do)
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *x, **y: empty(*x, **y).fill_(9))
    gradients = results(back, (*tensors, *saved, do))
    due = rule.expect_gradients(graph, tensors, (do,))["sinks"]
    due.check(gradients[names.index("sinks")])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_address_off_16_bytes_is_an_error_that_says_so(name: str) -> None:
    graph = simplify(ag.attention(X, X, X))
    tensors = dict.fromkeys("qkv", torch.zeros(2, 4, 6, 8, dtype=torch.float16))
    tensors[name] = torch.zeros(1 + X.type.bytes // 2, dtype=torch.float16)[1:].view(X.shape)
    with pytest.raises(ag.PlanMismatchError, match=f"{name}: expected an address .* 2 bytes past"):
        results(graph, [*tensors.values()])


def off(x: torch.Tensor) -> torch.Tensor:
    """The same numbers and strides, beginning 2 bytes past a multiple of 16."""
    room = torch.zeros(1 + x.numel(), dtype=x.dtype)
    return room[1:].as_strided(x.shape, x.stride()).copy_(x)


@pytest.mark.parametrize("name", ["q", "o", "do"])
def test_what_autograd_hands_over_off_16_bytes_is_copied(name: str) -> None:
    """Nobody can clone it there. That of do is told, and counted."""
    graph = ag.attention(X, X, X)
    forward = simplify(graph)
    tensors = [torch.randn(X.shape, dtype=X.dtype) for _ in "qkv"]
    o, lse = modelled(forward)(*tensors)[1]
    do = torch.randn(X.shape, dtype=X.dtype)
    back, names = gradient_of(forward, do)
    roles = ("q", "k", "v", "o", "lse", "do")
    given: dict[str, torch.Tensor] = dict(zip(roles, (*tensors, o, lse, do), strict=True))
    given[name] = off(given[name])
    dues = rule.expect_gradients(graph, tensors, (do,))
    for each, gradient in zip(names, results(back, [*given.values()]), strict=True):
        dues[each].check(gradient)
    told = "do is copied, 768 B, where it is broadcast, or begins off 16 bytes"
    assert notes(back) == (told,)


def test_a_cotangent_that_cudnn_refuses_does_not_change_who_runs_the_gradient() -> None:
    """Of `o.sum()` it is one number, broadcast: it is laid out as o is, and cuDNN runs."""
    plan = ag.compile(ag.attention(LONG, LONG, LONG), target=H200, backends=("triton",))
    broadcast = ag.TensorSpec(LONG.shape, LONG.dtype, (0, 0, 0, 0))
    ((*_, do),) = [plan.backward((0, 1, 2), [broadcast]).graph.inputs]
    assert do.spec == broadcast
    simple = simplify(plan.graph)
    dense, odd = (backward(simple, (0, 1, 2), [x]) for x in (LONG, broadcast))
    both = Request(dense, H200, Options(), ("cudnn", "triton"))
    assert choose(both).backend.name == "cudnn"
    assert choose(both.with_graph(odd)).backend.name == "triton"
    assert loses(both.with_graph(odd), both)
    triton = evolve(both, among=("triton",))
    assert not loses(triton.with_graph(odd), triton)


def test_lengths_are_read_where_they_lie_if_cudnn_can() -> None:
    """Others are copied, which is told, and counted."""
    for dtype, told in ((torch.int32, False), (torch.int64, True)):
        graph = simplify(ag.attention(X, X, X, kv_lengths=ag.TensorSpec((2,), dtype)))
        said = ("kv_lengths is copied to a dense i32 at each call",)
        assert notes(graph) == said * told + ENDED
        assert besides(graph) == 8 * told + 2 * X.type.bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cudnn_is_given_no_row_past_a_length(dtype: torch.dtype) -> None:
    """NaN and Inf there reach neither o nor gradients, which are those of zeros."""
    lengths, spec = torch.tensor([3, 6], dtype=torch.int32), ag.TensorSpec(X.shape, dtype)
    graph = ag.attention(spec, spec, spec, kv_lengths=ag.TensorSpec.like(lengths))
    forward, found = simplify(graph), []
    (do,) = cotangents_for(forward, 1)
    for value in (0.0, torch.nan, torch.inf):
        q, k, v = (aligned(x) for x in tensors_for(graph, 1)[:3])
        for x in (k, v):
            x[0, :, 3:] = value
        o, lse = modelled(forward)(q, k, v, lengths)[1]
        back, _ = gradient_of(forward, do)
        found.append((o, lse, *modelled(back)(q, k, v, lengths, o, lse, do)[0]))
    for each in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], each, strict=True))


def test_gradients_that_nobody_asked_for_are_counted() -> None:
    forward = simplify(ag.attention(X, X, X))
    specs = [result_spec(forward, i) for i in forward.outputs]
    run = modelled(backward(forward, [0], specs))
    copy = X.type.bytes  # of do
    assert besides(run.graph) == 2 * X.type.bytes + copy
    found = run(*(torch.zeros(i.spec.shape, dtype=i.spec.dtype) for i in run.graph.inputs))
    assert [t.shape for t in found[0]] == [X.shape]


def test_the_workspace_is_leased_and_no_more_than_told() -> None:
    graph = simplify(ag.attention(X, X, X))
    run = modelled(graph)
    run(*(torch.zeros(X.shape, dtype=X.dtype) for _ in range(3)))
    assert run.workspace.bytes == 128


def test_gradients_are_of_their_inputs_in_whatever_order() -> None:
    graph = ag.attention(X, X, X)
    forward = simplify(graph)
    tensors = tuple(map(aligned, tensors_for(graph, 1)))
    o, lse = modelled(forward)(*tensors)[1]
    (do,) = cotangents_for(forward, 1)
    dues = rule.expect_gradients(graph, tensors, (do,))
    back = backward(forward, (2, 0), [ag.TensorSpec.like(do)])
    dv, dq = results(back, (*tensors, o, lse, do))
    dues["v"].check(dv)
    dues["q"].check(dq)


def test_another_backends_lse_may_lie_anyhow() -> None:
    """PyTorch's efficient kernel saves rows of more than M."""
    graph = ag.attention(X, X, X)
    forward = simplify(graph)
    tensors = tuple(map(aligned, tensors_for(graph, 1)))
    o, lse = modelled(forward)(*tensors)[1]
    loose = torch.zeros(*lse.shape[:2], 32)[:, :, : lse.shape[2]].copy_(lse)
    (do,) = cotangents_for(forward, 1)
    back, names = gradient_of(forward, do)
    dues = rule.expect_gradients(graph, tensors, (do,))
    for name, gradient in zip(names, results(back, (*tensors, o, loose, do)), strict=True):
        dues[name].check(gradient)


def test_forward_and_backward_by_hand_read_as_training_does() -> None:
    graph = ag.attention(X, X, X, mask=ag.Causal(), stats=True)
    q, k, v = map(aligned, tensors_for(graph, 1))
    do, _ = cotangents_for(graph, 1)
    forward, backward_by_o = ag.vjp(graph, cotangents=("o",))
    o, lse = results(forward, (q, k, v))
    gradients = results(backward_by_o, (q, k, v, o, lse, do))
    dues = rule.expect_gradients(graph, (q, k, v), (do, None))
    for name, gradient in zip("qkv", gradients, strict=True):
        dues[name].check(gradient)


def test_do_and_lse_are_cleared_where_lengths_may_hide_rows_which_is_told() -> None:
    """What cuDNN makes of NaN in such rows, and of lse = -inf, nobody says."""
    lengths = ag.TensorSpec((2,), torch.int32)
    graph = ag.attention(X, X, X, kv_lengths=lengths)
    forward = simplify(graph)
    tensors = (*tensors_for(graph, 1)[:3], torch.tensor([0, 6], dtype=torch.int32))
    tensors = (*map(aligned, tensors[:3]), tensors[3])
    o, lse = modelled(forward)(*tensors)[1]
    (do,) = cotangents_for(forward, 1)
    back, _ = gradient_of(forward, do)
    run = modelled(back)
    seen: list[dict[str, torch.Tensor]] = []
    model = run.execute

    def execute(
        pack: Mapping[int, torch.Tensor], room: torch.Tensor | None, device: torch.device
    ) -> None:
        seen.append({x.source: pack[n] for n, x in enumerate(run.call.inputs, start=1)})
        model(pack, room, device)

    poisoned = formula.poison_blind_rows(graph, tensors, (do,), 0)
    found = evolve(run, execute=execute)(*tensors, o, lse, *poisoned)[0]
    assert all(g.isfinite().all() for g in found)
    assert torch.equal(seen[0]["do"], do.masked_fill(lse[..., None] == -torch.inf, 0))
    assert (seen[0]["lse"][0] == torch.inf).all()
    assert notes(back) == (*ENDED, "do is copied, 768 B, with 0 in rows that see nothing")
    assert besides(back) == 3 * X.type.bytes + 4 * lse.numel()
    whole, _ = gradient_of(simplify(ag.attention(X, X, X)), do)
    assert "with 0" not in "".join(notes(whole))
