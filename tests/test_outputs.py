"""Results in the caller's tensors: `plan(q, k, v, out=o)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.nn.attention.varlen import AuxRequest

import attn_graph as ag
from attn_graph import nn
from attn_graph.errors import TensorError
from attn_graph.machine.overlap import may_overlap, overlaps_itself
from attn_graph.spec import dense_strides
from attn_graph.testing.strategies import graphs, seeds, strides_of
from attn_graph.testing.tensors import tensors_for
from tests.ir.test_dims import draw_sizes, named_graphs
from tests.machine.test_memory import allocated

CPU = ag.Target.of("cpu")
X = ag.TensorSpec((2, 4, 48, 16), torch.float32)
BSHD = ag.TensorSpec((2, 4, 48, 16), torch.float32, layout="bshd")
CAUSAL = ag.attention(X, X, X, mask=ag.Causal(), stats=True)
NAN = float("nan")
attention: Any = nn.functional.attention  # Any: of arrays too
varlen_attn: Any = nn.varlen_attn
varlen_attn_out: Any = nn.varlen_attn_out
Around = list[tuple[torch.Tensor, torch.Tensor]]  # memory, and its places outside results


def rooms_like(results: Sequence[torch.Tensor], offset: int) -> tuple[list[torch.Tensor], Around]:
    """Tensors laid out as results, each within a larger memory of a number that no result has."""
    rooms, around = [], []
    for x in results:
        reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        memory = torch.full((2 * offset + max(reach, 0),), 7.25, dtype=x.dtype)
        inside = torch.zeros(len(memory), dtype=torch.bool)
        inside.as_strided(x.shape, x.stride(), offset).fill_(True)
        room = memory.as_strided(x.shape, x.stride(), offset)
        rooms.append(room.fill_(NAN))
        around.append((memory, ~inside))
    return rooms, around


def as_tuple(results: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else results


def check_written(plan: ag.Plan, tensors: Sequence[torch.Tensor], offset: int) -> None:
    """The results of a call lie in the caller's tensors, and nowhere around them: bit by bit, but
    where memory is not aligned to 16 bytes, since products on CPUs may sum in another order there.
    """
    with torch.no_grad():
        due = as_tuple(plan(*tensors))
        rooms, around = rooms_like(due, offset)
        given = plan(*tensors, out=rooms[0] if plan.single else tuple(rooms))
    assert all(x is room for x, room in zip(as_tuple(given), rooms, strict=True))
    for x, y, (memory, outside) in zip(rooms, due, around, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
        assert x.data_ptr() % 16 or torch.equal(x.nan_to_num(3.5), y.nan_to_num(3.5))
        assert (memory[outside] == 7.25).all()


@given(graph=graphs(), seed=seeds, offset=st.integers(0, 9), name=st.sampled_from(("math", "")))
def test_results_lie_in_the_callers_tensors_and_nowhere_around(
    graph: ag.Graph, seed: int, offset: int, name: str
) -> None:
    plan = ag.compile(graph, target=CPU, backends=(name,) if name else None)
    check_written(plan, tensors_for(graph, seed), offset)


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("x", [X, BSHD, ag.TensorSpec(X.shape, X.dtype, (3072, 16, 64, 1))])
def test_pytorchs_kernel_is_copied_once_and_explain_says_so(x: ag.TensorSpec, stats: bool) -> None:
    plan = ag.compile(ag.attention(x, x, x, stats=stats), target=CPU, backends=("torch_sdpa",))
    check_written(plan, tensors_for(plan.graph, 1), 3)
    assert "out= takes a copy" in str(plan.explain())


@given(graph=graphs(), seed=seeds)
def test_gradients_lie_in_the_callers_tensors(graph: ag.Graph, seed: int) -> None:
    plan = ag.compile(graph, target=CPU)
    assume(plan.graph.has_gradient)
    check_written(plan.vjp, tensors_for(plan.vjp.graph, seed), 2)


@given(graph=named_graphs(), seed=seeds, data=st.data())
def test_results_of_sizes_by_name_lie_in_the_callers_tensors(
    graph: ag.Graph, seed: int, data: st.DataObject
) -> None:
    plan = ag.compile(graph, target=CPU)
    for _ in range(2):
        exact = plan.at(**draw_sizes(data, graph))
        check_written(plan, tensors_for(exact.graph, seed), 1)


def test_packed_and_paged_results_lie_in_the_callers_tensors() -> None:
    starts = torch.tensor([0, 3, 3, 9, 14])
    q, k = torch.randn(16, 4, 8), torch.randn(16, 2, 8)
    spec = ag.TensorSpec.like
    rows = ag.attention(
        *map(spec, (q, k, k)),
        q_starts=spec(starts),
        max_lengths=(9, 9),
        mask=ag.Causal(),
        stats=True,
    )
    check_written(ag.compile(rows, target=CPU), (q, k, k, starts), 5)
    pool, pages = torch.randn(6, 4, 2, 8), torch.tensor([[3, 1], [0, 5]])
    lengths, one = torch.tensor([7, 2]), torch.randn(2, 4, 1, 8)
    paged = ag.attention(
        *map(spec, (one, pool, pool)), pages=spec(pages), kv_lengths=spec(lengths), stats=True
    )
    check_written(ag.compile(paged, target=CPU), (one, pool, pool, lengths, pages), 5)


# Memory


LONG = ag.TensorSpec((1, 2, 1024, 16), torch.float32)
DIRECT = (
    ag.attention(X, X, X, soft_cap=3.0, stats=True),
    ag.attention(BSHD, BSHD, BSHD, soft_cap=3.0, mask=ag.Causal()),
    ag.attention(X, X, X, stats=("lse", "max")),
    ag.attention(LONG, LONG, LONG, mask=ag.Causal() & ag.Window(100), stats=True),
)


@pytest.mark.parametrize("graph", DIRECT)
def test_a_call_allocates_nothing_for_results(graph: ag.Graph) -> None:
    plan = ag.compile(graph, target=CPU, backends=("math",))
    assert "out=" not in str(plan.explain())
    tensors = tensors_for(graph, 0)
    due = as_tuple(plan(*tensors))
    out = due[0] if plan.single else due
    plan(*tensors, out=out)
    before = allocated(lambda: plan(*tensors))[2]
    _, held, most = allocated(lambda: plan(*tensors, out=out))
    assert held == 0
    assert most <= before - sum(x.nbytes for x in due)


def test_a_copied_result_allocates_no_more_than_a_call_without_out() -> None:
    plan = ag.compile(CAUSAL, target=CPU, backends=("torch_sdpa",))
    tensors = tensors_for(CAUSAL, 0)
    out = as_tuple(plan(*tensors))
    before = allocated(lambda: plan(*tensors))[2]
    _, held, most = allocated(lambda: plan(*tensors, out=out))
    assert (held, most) == (0, before)


# Refusals


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    return tensors_for(CAUSAL, seed)


def test_other_tensors_than_the_results_are_refused_as_inputs_are() -> None:
    plan, tensors = ag.compile(CAUSAL, target=CPU), inputs()
    o, lse = as_tuple(plan(*tensors))
    wrong = {
        r"out: expected a tuple of 2 tensors \(o, lse\), got \(<tensor": (o,),
        r"out: expected a tuple of 2 tensors \(o, lse\), got <tensor": o,
        r"out o: expected a tensor f32\[2, 4, 48, 16\], got 3": (3, lse),
        r"out lse: expected f32\[2, 4, 48\], got f64\[2, 4, 48\]": (o, lse.double()),
        r"out o: expected f32\[2, 4, 48, 16\], got f32.*strides=": (o.mT.contiguous().mT, lse),
        r"out lse: expected a tensor on cpu, got one on meta": (o, lse.to("meta")),
    }
    for text, out in wrong.items():
        with pytest.raises(ag.PlanMismatchError, match=text):
            plan(*tensors, out=out)  # type: ignore[arg-type]  # the wrong ones


def test_memory_of_an_input_or_of_another_result_is_refused() -> None:
    plan, (q, k, v) = ag.compile(CAUSAL, target=CPU), inputs()
    o, lse = as_tuple(plan(q, k, v))
    for text, out in {
        "some of k's": (k, lse),
        "some of out o's": (o, o.view(-1)[:384].view(lse.shape)),
    }.items():
        with pytest.raises(ag.PlanMismatchError, match=f"expected memory of its own, got {text}"):
            plan(q, k, v, out=out)


def test_a_gradient_needs_a_place_for_each_element() -> None:
    back = ag.compile(ag.attention(X, X, X), target=CPU).vjp
    tensors = tensors_for(back.graph, 0)
    dq, dk, dv = as_tuple(back(*tensors))
    with pytest.raises(ag.PlanMismatchError, match="out dk: expected elements apart"):
        back(*tensors, out=(dq, dk[:, :1].clone().expand(X.shape), dv))


def test_results_are_not_written_where_autograd_records() -> None:
    plan, (q, k, v) = ag.compile(CAUSAL, target=CPU), inputs()
    out = as_tuple(plan(q, k, v))
    leaf = q.clone().requires_grad_()
    with pytest.raises(ag.GraphError, match="out= has no gradient"):
        plan(leaf, k, v, out=out)
    with pytest.raises(ag.GraphError, match="out= has no gradient"):
        plan(q, k, v, out=(out[0].clone().requires_grad_(), out[1]))
    with torch.no_grad():
        plan(leaf, k, v, out=out)
    with forward_ad.dual_level(), pytest.raises(ag.GraphError, match="out= has no tangent"):
        plan(forward_ad.make_dual(q, k), k, v, out=out)
    with torch.device("meta"), pytest.raises(ag.GraphError, match="traced or transformed"):
        torch.func.vmap(lambda x: plan(x, k, v, out=out))(q[None])


def test_autograd_sees_that_a_saved_tensor_was_written_over() -> None:
    plan, (q, k, v) = ag.compile(ag.attention(X, X, X), target=CPU), inputs()
    o = torch.zeros(X.shape)
    w = torch.ones(X.shape, requires_grad=True)
    loss = (o * w).sum()
    plan(q, k, v, out=o)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("form", ["plan", "function", "varlen"])
def test_tensors_of_inference_mode_are_written_within_it_alone(form: str) -> None:
    q, k, v = inputs()
    rows, starts = q[0].transpose(0, 1), torch.tensor([0, 48], dtype=torch.int32)
    cases: dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]] = {
        "plan": (lambda o: ag.compile(ag.attention(X, X, X), target=CPU)(q, k, v, out=o), q),
        "function": (lambda o: attention(q, k, v, out=o), q),
        "varlen": (lambda o: varlen_attn_out(o, rows, rows, rows, starts, starts, 48, 48), rows),
    }
    write, like = cases[form]
    with torch.inference_mode():
        o = torch.full_like(like, 7.0)
    with pytest.raises(ag.GraphError, match=r"made in torch.inference_mode.*out.clone\(\)"):
        write(o)
    assert (o == 7).all()
    with torch.inference_mode():
        write(o)
    due = torch.empty_like(like)
    write(due)
    assert torch.equal(o, due)


def test_an_input_named_out_stays_an_input() -> None:
    def cut(q: ag.Value, out: ag.Value) -> ag.Value:
        p, _ = ag.scores(q, out).softmax()
        return p.weigh(out)

    plan = ag.compile(ag.graph(cut, q=X, out=X), target=CPU)
    q, k, _ = inputs()
    assert torch.equal(as_tuple(plan(q, out=k))[0], as_tuple(plan(q, k))[0])


def test_arrays_with_dlpack_are_read_and_written_in_place() -> None:
    numpy = pytest.importorskip("numpy")
    plan, tensors = ag.compile(CAUSAL, target=CPU), inputs()
    due = as_tuple(plan(*tensors))
    arrays: Any = [x.numpy() for x in tensors]
    assert all(map(torch.equal, as_tuple(plan(*arrays)), due))
    o, lse = (numpy.zeros(x.shape, "float32") for x in due)
    made = as_tuple(plan(*arrays, out=(o, lse)))
    assert all(isinstance(x, torch.Tensor) for x in made)
    assert [x.data_ptr() for x in made] == [o.ctypes.data, lse.ctypes.data]
    assert all(map(torch.equal, map(torch.from_numpy, (o, lse)), due))


# Overlap


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of MEMORY."""
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 4)) for _ in range(rank))
    strides = draw(st.one_of(strides_of(shape), st.tuples(*[st.integers(0, 13)] * rank)))
    return MEMORY.as_strided(shape, strides, draw(st.integers(0, 60)))


MEMORY = torch.arange(4096)


@given(a=views(), b=views())
def test_tensors_that_share_a_place_are_seen(a: torch.Tensor, b: torch.Tensor) -> None:
    places = [{*x.flatten().tolist()} for x in (a, b)]
    if places[0] & places[1]:
        assert may_overlap(a, b)
    if len(places[0]) < a.numel():
        assert overlaps_itself(a)


@given(order=st.permutations(range(4)), axis=st.integers(0, 3), n=st.integers(2, 4))
def test_parts_side_by_side_share_nothing(order: list[int], axis: int, n: int) -> None:
    """As q, k, v and o of one buffer, on any axis."""
    shape = [2, 3, 4, 5]
    shape[axis] *= n
    parts = MEMORY.as_strided(shape, dense_strides(shape, order)).chunk(n, axis)
    for m, x in enumerate(parts):
        assert not overlaps_itself(x)
        assert not any(may_overlap(x, y) for y in parts[:m])


# Functions of tensors


@pytest.mark.parametrize("stats", [False, True])
def test_functions_of_tensors_write_into_the_callers_tensors(stats: bool) -> None:
    for n in (40, 48, 48, 40):
        q, k, v = (x[:, :, :n] for x in inputs(n))
        due = as_tuple(attention(q, k, v, mask=ag.Causal(), stats=stats))
        rooms, around = rooms_like(due, 3)
        made = attention(q, k, v, mask=ag.Causal(), stats=stats, out=rooms if stats else rooms[0])
        assert all(x is y for x, y in zip(as_tuple(made), rooms, strict=True))
        assert all(map(torch.equal, rooms, due))
        assert all((memory[outside] == 7.25).all() for memory, outside in around)


def test_a_serving_loop_writes_packed_and_paged_rows_into_its_buffer() -> None:
    """As it does each step, with other lengths and pages. One plan serves all of them."""
    pool, buffer = torch.randn(9, 4, 2, 8), torch.zeros(16, 4, 8)
    for step in range(4):
        starts, rows = torch.tensor([0, 2, 5 + step]), 5 + step
        lengths, pages = torch.tensor([6, 8 + step]), torch.randint(9, (2, 4))
        reads = {"q_starts": starts, "pages": pages, "kv_lengths": lengths}
        options = {"mask": ag.Causal("bottom_right"), "max_lengths": (8, None)}
        q, out = torch.randn(rows, 4, 8), buffer[:rows]
        due = attention(q, pool, pool, **reads, **options)
        attention(q, pool, pool, **reads, **options, out=out)
        assert torch.equal(out, due)


def test_functions_of_tensors_read_arrays_with_dlpack() -> None:
    pytest.importorskip("numpy")
    q, k, v = inputs()
    bias = torch.randn(1, 4, 48, 48)
    due = attention(q, k, v, bias=bias)
    assert torch.equal(attention(*(x.numpy() for x in (q, k, v)), bias=bias.numpy()), due)
    o = torch.zeros(X.shape)
    attention(q.numpy(), k, v.numpy(), bias=bias, out=o.numpy())
    assert torch.equal(o, due)


def test_functions_refuse_traces_unknown_names_and_other_results() -> None:
    q, k, v = inputs()
    o = torch.zeros(X.shape)
    with pytest.raises(ag.GraphError, match="traced or transformed"):
        torch.func.vmap(lambda x: attention(x, k, v, out=o))(q[None])
    with pytest.raises(ag.GraphError, match="other"):
        attention(q, k, v, other=k, out=o)
    with pytest.raises(ag.PlanMismatchError, match="out o: expected"):
        attention(q, k, v, out=o[:1])
    with pytest.raises(ag.GraphError, match="out= has no gradient"):
        attention(q.clone().requires_grad_(), k, v, out=o)


def test_varlen_attn_out_writes_its_rows() -> None:
    q, starts = torch.randn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    rows, out = (q, q, q, starts, starts, 5, 5), torch.zeros(9, 2, 8)
    due = varlen_attn(*rows, window_size=(-1, 0))
    assert varlen_attn_out(out, *rows, window_size=(-1, 0)) is out
    assert torch.equal(out, as_tuple(due)[0])
    both = varlen_attn_out(out.zero_(), *rows, return_aux=AuxRequest(lse=True))
    assert all(map(torch.equal, both, varlen_attn(*rows, return_aux=AuxRequest(lse=True))))
    with pytest.raises(TensorError, match="out o: expected"):
        varlen_attn_out(out[1:], *rows)


# Workspaces


WINDOWS = tuple(
    ag.attention(x, x, x, mask=ag.Causal() & ag.Window(9), soft_cap=2.0)
    for x in (X, ag.TensorSpec(X.shape, torch.bfloat16))
)


@given(graph=st.sampled_from(WINDOWS), seed=seeds, offset=st.integers(0, 130))
def test_a_plan_runs_in_the_callers_bytes_and_nowhere_else(
    graph: ag.Graph, seed: int, offset: int
) -> None:
    """At any address: what lies before a multiple of 64 bytes is not used."""
    plan = ag.compile(graph, target=CPU, backends=("math",))
    need = plan.memory().workspace_forward
    assert need
    room = torch.full((offset + 64 + need + 99,), 7, dtype=torch.uint8)
    lost = -(room.data_ptr() + offset) % 64
    workspace = ag.Workspace(memory=room[offset : offset + lost + need])
    own = ag.compile(graph, target=CPU, backends=("math",), workspace=workspace)
    tensors = tensors_for(graph, seed)
    for _ in range(2):
        assert torch.equal(own(*tensors), plan(*tensors))  # type: ignore[arg-type]
    assert (room[: offset + lost] == 7).all()
    assert (room[offset + lost + need :] == 7).all()
    assert not (room == 7).all()
    assert workspace.bytes == lost + need
    short = ag.Workspace(memory=room[offset : offset + lost + need - 1])
    small = ag.compile(graph, target=CPU, backends=("math",), workspace=short)
    with pytest.raises(
        ag.GraphError, match=f"has {lost + need - 1:,} bytes, and the call needs {lost + need:,};"
    ):
        small(*tensors)


def test_sequences_of_a_packed_call_share_the_callers_bytes() -> None:
    """A run within a run takes what lies behind it."""
    pool, pages = torch.randn(6, 4, 2, 8), torch.tensor([[3, 1], [0, 5]])
    lengths, q = torch.tensor([7, 2]), torch.randn(2, 4, 3, 8)
    spec = ag.TensorSpec.like
    graph = ag.attention(
        *map(spec, (q, pool, pool)), pages=spec(pages), kv_lengths=spec(lengths), soft_cap=2.0
    )
    plan = ag.compile(graph, target=CPU)
    memory = torch.empty(plan.memory().workspace_forward, dtype=torch.uint8)
    own = ag.compile(graph, target=CPU, workspace=ag.Workspace(memory=memory))
    for _ in range(2):
        given = (q, pool, pool, lengths, pages)
        assert torch.equal(own(*given), plan(*given))  # type: ignore[arg-type]


def test_other_memory_than_dense_bytes_is_refused() -> None:
    wrong: Any
    for wrong in (
        64,
        torch.empty(64),
        torch.empty(8, 8, dtype=torch.uint8),
        torch.empty(64, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(ag.GraphError, match="the workspace's memory is"):
            ag.Workspace(memory=wrong)
