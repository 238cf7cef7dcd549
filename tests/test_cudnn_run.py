"""All that leads to cuDNN and back, with what its documentation says in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given

import attn_graph as ag
from attn_graph.backend import Options
from attn_graph.ir import Graph
from attn_graph.lowering.cudnn_backend import asked
from attn_graph.lowering.cudnn_case import padded
from attn_graph.lowering.cudnn_graph import described
from attn_graph.lowering.cudnn_limits import reasons
from attn_graph.lowering.cudnn_run import Run, notes, temporary
from attn_graph.lowering.problem import sole
from attn_graph.passes import simplify
from attn_graph.spec import FLOATS
from attn_graph.target import Target
from attn_graph.vjp import backward, result_spec
from attn_graph.workspace import Workspace
from tests import plain
from tests.cudnn_model import Model
from tests.strategies import aligned, cotangents_for, cudnn_graphs, seeds, tensors_for

VERSIONS = (("nvidia-cudnn-frontend", "1.28.0"), ("nvidia-cudnn-cu13", "9.20.0.48"))
H200 = Target("h200", "cuda", 90, (), VERSIONS)
X = ag.TensorSpec((2, 4, 6, 8), torch.float16)


def refusals(graph: Graph) -> list[str]:
    problem = sole(graph)
    assert problem is not None
    return [*reasons(asked(problem, H200, Options()))]


def modelled(graph: Graph) -> Run:
    """How a simplified graph, one that cuDNN takes, would run."""
    problem = sole(graph)
    assert problem is not None
    assert not refusals(graph)
    call = described(problem, padded=padded(asked(problem, H200, Options())))
    return Run.of(call, problem, graph, Workspace(), 128, Model(call))


def results(graph: Graph, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    run = modelled(graph)
    return (run.forward if run.problem.grad is None else run.backward)(*tensors)[0]


def gradient_of(graph: Graph, do: torch.Tensor) -> tuple[Graph, list[str]]:
    """The backward graph by every floating input, and their names."""
    wants = [n for n, i in enumerate(graph.inputs) if i.spec.dtype in FLOATS]
    return backward(graph, wants, [ag.TensorSpec.like(do)]), [graph.inputs[n].name for n in wants]


@given(graph=cudnn_graphs(), seed=seeds)
def test_what_cudnn_is_told_means_what_the_graph_means(graph: Graph, seed: int) -> None:
    simple = simplify(graph)
    assume(not refusals(simple))
    tensors = tuple(map(aligned, tensors_for(graph, seed)))
    run = modelled(simple)
    outputs, (o, lse) = run.forward(*tensors)
    for found, due, i in zip(outputs, plain.expected(graph, tensors), simple.outputs, strict=True):
        due.check(found)
        assert ag.TensorSpec.like(found) == result_spec(simple, i)
    cotangents = cotangents_for(simple, seed)
    back, names = gradient_of(simple, *cotangents)
    dues = plain.expected_gradients(graph, tensors, cotangents)
    assume(not refusals(back))
    poisoned = plain.poisoned(graph, tensors, cotangents, seed)
    gradients = results(back, (*tensors, o, lse, *poisoned))
    for name, gradient in zip(names, gradients, strict=True):
        dues[name].check(gradient)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_address_off_16_bytes_is_an_error_that_says_so(name: str) -> None:
    graph = simplify(ag.attention(X, X, X))
    tensors = dict.fromkeys("qkv", torch.zeros(2, 4, 6, 8, dtype=torch.float16))
    tensors[name] = torch.zeros(1 + X.type.bytes // 2, dtype=torch.float16)[1:].view(X.shape)
    with pytest.raises(ag.PlanMismatchError, match=f"{name}: expected an address .* 2 bytes past"):
        results(graph, [*tensors.values()])


def test_lengths_are_read_where_they_lie_if_cudnn_can() -> None:
    """Others are copied, which is told, and counted."""
    for dtype, told in ((torch.int32, False), (torch.int64, True)):
        graph = simplify(ag.attention(X, X, X, kv_lengths=ag.TensorSpec((2,), dtype)))
        run = modelled(graph)
        said = ("kv_lengths is copied to a dense i32 at each call",)
        assert notes(run.problem, graph) == said * told
        assert temporary(run.call, run.problem, graph) == 8 * told


def test_gradients_that_nobody_asked_for_are_counted() -> None:
    forward = simplify(ag.attention(X, X, X))
    specs = [result_spec(forward, i) for i in forward.outputs]
    run = modelled(backward(forward, [0], specs))
    assert temporary(run.call, run.problem, run.graph) == 2 * X.type.bytes
    found = run.backward(*(torch.zeros(i.spec.shape, dtype=i.spec.dtype) for i in run.graph.inputs))
    assert [t.shape for t in found[0]] == [X.shape]


def test_the_workspace_is_leased_and_no_more_than_told() -> None:
    graph = simplify(ag.attention(X, X, X))
    run = modelled(graph)
    run.forward(*(torch.zeros(X.shape, dtype=X.dtype) for _ in range(3)))
    assert run.workspace.bytes == 128


def test_gradients_are_of_their_inputs_in_whatever_order() -> None:
    graph = ag.attention(X, X, X)
    forward = simplify(graph)
    tensors = tuple(map(aligned, tensors_for(graph, 1)))
    o, lse = modelled(forward).forward(*tensors)[1]
    (do,) = cotangents_for(forward, 1)
    dues = plain.expected_gradients(graph, tensors, (do,))
    back = backward(forward, (2, 0), [ag.TensorSpec.like(do)])
    dv, dq = results(back, (*tensors, o, lse, do))
    dues["v"].check(dv)
    dues["q"].check(dq)


def test_another_backends_lse_may_lie_anyhow() -> None:
    """PyTorch's efficient kernel saves rows of more than M."""
    graph = ag.attention(X, X, X)
    forward = simplify(graph)
    tensors = tuple(map(aligned, tensors_for(graph, 1)))
    o, lse = modelled(forward).forward(*tensors)[1]
    loose = torch.zeros(*lse.shape[:2], 32)[:, :, : lse.shape[2]].copy_(lse)
    (do,) = cotangents_for(forward, 1)
    back, names = gradient_of(forward, do)
    dues = plain.expected_gradients(graph, tensors, (do,))
    for name, gradient in zip(names, results(back, (*tensors, o, loose, do)), strict=True):
        dues[name].check(gradient)


def test_do_and_lse_are_cleared_where_lengths_may_hide_rows_which_is_told() -> None:
    """What cuDNN makes of NaN in such rows, and of lse = -inf, nobody says."""
    lengths = ag.TensorSpec((2,), torch.int32)
    graph = ag.attention(X, X, X, kv_lengths=lengths)
    forward = simplify(graph)
    tensors = (*tensors_for(graph, 1)[:3], torch.tensor([0, 6], dtype=torch.int32))
    tensors = (*map(aligned, tensors[:3]), tensors[3])
    o, lse = modelled(forward).forward(*tensors)[1]
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

    poisoned = plain.poisoned(graph, tensors, (do,), 0)
    found = evolve(run, execute=execute).backward(*tensors, o, lse, *poisoned)[0]
    assert all(g.isfinite().all() for g in found)
    assert torch.equal(seen[0]["do"], do.masked_fill(lse[..., None] == -torch.inf, 0))
    assert (seen[0]["lse"][0] == torch.inf).all()
    assert "do is copied with 0 in rows that see nothing" in notes(run.problem, back)
    assert temporary(run.call, run.problem, back) == X.type.bytes + 4 * lse.numel()
    whole, _ = gradient_of(simplify(ag.attention(X, X, X)), do)
    assert not notes(modelled(whole).problem, whole)
