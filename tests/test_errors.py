"""Nonsense raises, with everything that is wrong, both sides of each, and the line that said it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.errors import DEVICE, join_lines, refusal_lines
from attn_graph.extend import Reason
from attn_graph.ir import ops
from attn_graph.ir.builder import Builder
from attn_graph.ir.modifiers import Alibi

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I64 = torch.int64
NAN, INF = math.nan, math.inf


def spec(*shape: int, dtype: torch.dtype = F16) -> ag.TensorSpec:
    return ag.TensorSpec(shape, dtype)


Q, K = spec(2, 4, 6, 8), spec(2, 2, 6, 8)
Bad = tuple[Callable[[], object], list[list[str]]]


def call(
    q: ag.TensorSpec = Q, k: ag.TensorSpec = K, v: ag.TensorSpec = K, **options: Any
) -> Callable[[], ag.Graph]:  # Any: options of `attention`
    return lambda: ag.attention(q, k, v, **options)


# What is called, and for each problem that must be told the words that must be in it.
BAD: dict[str, Bad] = {
    "batches differ": (
        call(k=spec(3, 2, 6, 8)),
        [["k has batch size 3 (axis 0), and q has 2"]],
    ),
    "the batch of v differs": (
        call(v=spec(3, 2, 6, 8)),
        [["v has batch size 3 (axis 0), and q has 2"]],
    ),
    "head sizes differ": (
        call(k=spec(2, 2, 6, 7)),
        [["k has head size 7 (axis 3), and q has 8"]],
    ),
    "keys and values differ in number": (
        call(v=spec(2, 2, 5, 8)),
        [["v has 5 keys (axis 2), and k has 6"]],
    ),
    "heads are not a multiple": (
        call(k=spec(2, 3, 6, 8), v=spec(2, 3, 6, 8)),
        [["k and v have 3 heads (axis 1), not a divisor of q's 4"]],
    ),
    "there are no heads to read": (
        call(k=spec(2, 0, 6, 8)),
        [["k has 0 heads (axis 1)", "q's 4"]],
    ),
    "the head size is 0": (
        call(spec(2, 4, 6, 0), spec(2, 2, 6, 0), spec(2, 2, 6, 0)),
        [["scores", "head size 0"], ["weigh", "head size 0"]],
    ),
    "q and k differ in dtype": (
        call(k=spec(2, 2, 6, 8, dtype=F32)),
        [
            [
                "k is torch.float32, and q is torch.float16 (k_scale= and v_scale= of 1.0 have "
                "kernels convert both); write k.half()"
            ]
        ],
    ),
    "q and v differ in dtype": (
        call(v=spec(2, 2, 6, 8, dtype=F32)),
        [
            [
                "v is torch.float32, and q is torch.float16 (k_scale= and v_scale= of 1.0 have "
                "kernels convert both); write v.half()"
            ]
        ],
    ),
    "v is of another precision than the weights": (
        call(v=spec(2, 2, 6, 8, dtype=F64)),
        [["v is torch.float64, and q is torch.float16; write v.half()"]],
    ),
    "a tensor instead of a spec": (
        lambda: ag.attention(Q, K, K, bias=torch.zeros(1, 1, 6, 6)),  # type: ignore[arg-type]  # is wrong
        [["'bias'", "Tensor", "TensorSpec.like"]],
    ),
    "a switch instead of a spec": (call(keep=True), [["'keep'", "bool", "TensorSpec"]]),
    "integers": (
        call(*[spec(2, 2, 6, 8, dtype=I64)] * 3),
        [["q, k and v are torch.int64", "torch.float16", "write q.float(), k.float(), v.float()"]],
    ),
    "too few axes": (
        call(spec(2, 4, 6)),
        [["q f16[2, 4, 6] has 3 axes and needs 4", "write q[None]"]],
    ),
    "an alignment is not said": (
        call(spec(2, 4, 5, 8), mask=ag.Causal()),
        [["Causal()", "5 queries", "6 keys", '"top_left"', '"bottom_right"']],
    ),
    "an alignment is not said for a window or ALiBi": (
        call(
            spec(2, 4, 5, 8), mask=ag.Keep() | ag.Window(3), alibi=True,
            keep=spec(1, 1, 1, 6, dtype=torch.bool),
        ),
        [["alibi", "5 queries", "6 keys"], ["Window(left=3)", "5 queries", "6 keys"]],
    ),
    "an alignment is neither": (
        call(mask=ag.Causal(), align="left"),
        [["align 'left'", '"top_left"', '"bottom_right"']],
    ),
    "a window holds no key": (lambda: ag.Window(2, -3), [["left=2", "right=-3", "no key"]]),
    "a window is bounded by others' -1": (
        lambda: ag.Window(-1),
        [["left=-1", "right=0", "no bound is None here, not -1"]],
    ),
    "a prefix is negative": (lambda: ag.Prefix(-3), [["Prefix(-3)", "at least 0"]]),
    "anything that is not a mask": (call(mask=ag.Causal), [["Causal", "not a mask"]]),
    "a mask and a number": (lambda: ag.Causal() & 3, [["3", "not a mask"]]),  # type: ignore[operator]  # is wrong
    "the scale is not a number": (call(scale=NAN), [["scale nan", "finite"]]),
    "the scale is infinite": (call(scale=-INF), [["scale -inf", "finite"]]),
    "the cap is 0": (call(soft_cap=0), [["cap 0.0", "positive"]]),
    "the cap is negative": (call(soft_cap=-1), [["cap -1.0", "positive"]]),
    "the cap is infinite": (call(soft_cap=INF), [["cap inf", "finite"]]),
    "the rate is 1": (call(dropout=1), [["rate 1.0", "[0, 1)"]]),
    "the rate is negative": (call(dropout=-0.1), [["rate -0.1", "[0, 1)"]]),
    "the rate is not a number": (call(dropout=NAN), [["rate nan", "[0, 1)"]]),
    "the bias does not broadcast": (
        call(bias=spec(2, 3, 6, 6)),
        [["bias has 3 heads (axis 1), and q has 4; pass as many, or 1"]],
    ),
    "the bias has too few axes": (
        call(bias=spec(6, 6)),
        [["bias has 2 axes, [6, 6], and needs 4", "write bias[None, None]"]],
    ),
    "the flags have too few axes": (
        call(keep=spec(4, 6, 6, dtype=torch.bool)),
        [["keep has 3 axes, [4, 6, 6], and needs 4", "write keep[None]"]],
    ),
    "the bias is of another dtype": (
        call(bias=spec(1, 1, 6, 6, dtype=torch.bfloat16)),
        [["bias is torch.bfloat16", "torch.float16", "torch.float32", "bias.float()"]],
    ),
    "the bias is boolean": (
        call(bias=spec(1, 1, 6, 6, dtype=torch.bool)),
        [["bias is torch.bool", "torch.float32", "keep="]],
    ),
    "slopes for other heads": (
        call(alibi=spec(3, dtype=F32)),
        [["alibi has 3 heads (axis 0), and q has 4"]],
    ),
    "slopes of another dtype": (
        call(alibi=spec(4, dtype=BF16)),
        [["alibi is torch.bfloat16", "torch.float16", "torch.float32"]],
    ),
    "sinks for other heads": (
        call(sinks=spec(3, dtype=F32)),
        [["sinks has 3 heads (axis 0), and q has 4"]],
    ),
    "sinks of another dtype": (
        call(sinks=spec(4, dtype=F64)),
        [["sinks is torch.float64", "torch.float16", "torch.float32"]],
    ),
    "sinks that are integers": (
        call(sinks=spec(4, dtype=I64)), [["sinks is torch.int64", "sinks.float()"]],
    ),
    "lengths for another batch": (
        call(kv_lengths=spec(3, dtype=I64)),
        [["kv_lengths has batch size 3 (axis 0), and q has 2"]],
    ),
    "lengths that are not integers": (
        call(q_lengths=spec(2, dtype=F32)),
        [["q_lengths is torch.float32", "q_lengths.int()", "torch.int32", "torch.int64"]],
    ),
    "lengths of two axes": (
        call(kv_lengths=spec(2, 1, dtype=I64)),
        [["kv_lengths has 2 axes, [2, 1], and needs 1", "kv_lengths.flatten()"]],
    ),
    "segments of each other's sizes": (
        call(spec(2, 4, 5, 8), segments=(spec(2, 6, dtype=I64), spec(2, 5, dtype=I64))),
        [["q_segments has 6 queries (axis 1)"], ["kv_segments has 5 keys (axis 1)"]],
    ),
    "flags that are numbers": (
        call(keep=spec(1, 1, 6, 6)),
        [["keep is torch.float16", "bias=", "torch.bool"]],
    ),
    "data that a mask needs is missing": (
        call(mask=ag.Keep("local")),
        [["Keep(name='local') reads local", "pass local="]],
    ),
    "data that nothing reads": (
        call(mask=ag.Keep("local"), locale=spec(1, 1, 6, 6, dtype=torch.bool)),
        [["locale; did you mean local?"]],
    ),
    "two inputs of one name": (
        call(mask=ag.Keep("v"), sinks=spec(4, dtype=F32)),
        [["v has 2 heads (axis 1), and q has 4", "8 keys"], ["v is torch.float16", "torch.bool"]],
    ),
    "two problems of two steps": (
        call(scale=NAN, soft_cap=-1, sinks=spec(4, dtype=I64), bias=spec(1, 1, 1, 5), dropout=2.0),
        [["scale"], ["cap"], ["bias"], ["sinks"], ["rate"]],
    ),
    "everything at once": (
        call(
            k=spec(3, 3, 7, 7), v=spec(2, 2, 9, 8), mask=ag.Causal(),
            kv_lengths=spec(5, 5, dtype=I64), alibi=spec(2, dtype=F32), nonsense=Q,
        ),
        [
            ["k has batch size 3"], ["k has head size 7"], ["k has 3 heads", "q's 4"],
            ["alibi has 2 heads"], ["kv_lengths has 2 axes"], ["nonsense"], ["v has 9 keys"],
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_every_problem_is_told_once_with_both_sides(name: str) -> None:
    attempt, due = BAD[name]
    with pytest.raises(ag.GraphError) as caught:
        attempt()
    problems = caught.value.problems
    missing = [words for words in due if not any(all(w in p for w in words) for p in problems)]
    assert not missing, f"{missing} not told by\n{caught.value}"
    assert len(problems) == len(set(problems)) == len(due), str(caught.value)


@pytest.mark.parametrize("name", [name for name in BAD if name.startswith(("the", "q", "too"))])
def test_a_problem_names_the_file_and_line_that_said_it(name: str) -> None:
    attempt, _ = BAD[name]
    with pytest.raises(ag.GraphError) as caught:
        attempt()
    line = call.__code__.co_firstlineno + 3
    assert all(problem.endswith(f"(at {__file__}:{line})") for problem in caught.value.problems)


# Graphs that are said step by step


def traced(fn: Callable[..., Any], **more: ag.TensorSpec) -> tuple[str, ...]:  # Any: values
    """The problems of tracing `fn` over q, k, v."""
    with pytest.raises(ag.GraphError) as caught:
        ag.graph(fn, q=Q, k=K, v=K, **more)
    return caught.value.problems


def test_each_problem_of_a_traced_function_is_at_its_own_line() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> ag.Value:
        s = ag.scores(q, k, scale=INF)
        s = s.soft_cap(-3.0)
        s = s.mask(ag.Causal(), local=k)
        p, _ = s.softmax()
        return p.dropout(2.0, q, k).weigh(v)

    problems = traced(attend)
    first = attend.__code__.co_firstlineno
    lines = [int(problem.rsplit(":", 1)[1].rstrip(")")) - first for problem in problems]
    assert lines == [1, 2, 3, 5]
    for words, problem in zip(("inf", "-3.0", "local", "2.0"), problems, strict=True):
        assert words in problem


def test_an_output_that_is_an_input_would_alias_it() -> None:
    (problem,) = traced(lambda q, k, v: (ag.scores(q, k), v))
    assert "output 1 is the input 'v'" in problem


def test_one_value_returned_twice_would_alias_itself() -> None:
    def twice(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ...]:
        p, lse = ag.scores(q, k).softmax()
        return lse, p, lse

    (problem,) = traced(twice)
    assert "outputs 0 and 2 are one value" in problem


def test_a_graph_that_returns_nothing_means_nothing() -> None:
    (problem,) = traced(lambda q, k, v: ())
    assert "returns nothing" in problem


def test_values_of_another_graph_are_refused() -> None:
    stranger = Builder().input("x", Q)
    (problem,) = traced(lambda q, k, v: ag.scores(q, stranger))
    assert "not a value of the graph" in problem


def test_what_is_no_value_is_refused() -> None:
    (problem,) = traced(lambda q, k, v: ag.scores(q, 3))  # type: ignore[arg-type]  # is wrong
    assert "3 is not a value" in problem


def test_inputs_have_names_that_python_takes_as_keywords() -> None:
    problems = traced(lambda q, k, v, **_: ag.scores(q, k), **{"lambda": Q, "a b": Q})
    assert ["'lambda'" in problems[0], "'a b'" in problems[1]] == [True, True]


def test_two_inputs_of_one_name_are_refused() -> None:
    builder = Builder()
    builder.input("x", Q)
    builder.input("x", K)
    with pytest.raises(ag.GraphError, match="two inputs are named 'x'"):
        builder.check()


def test_inputs_come_before_steps() -> None:
    builder = Builder()
    ag.scores(builder.input("q", Q), builder.input("k", K))
    builder.input("v", K)
    with pytest.raises(ag.GraphError, match="'v' comes after the first equation"):
        builder.check()


def test_steps_on_the_wrong_kind_of_value_say_so() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> ag.Value:
        _, lse = ag.scores(q, k).softmax()
        return lse.soft_cap(3.0)

    (problem,) = traced(attend)
    assert "soft_cap" in problem
    assert "f32[2, 4, 6]" in problem
    assert "3 axes" in problem


def test_lengths_that_alibi_does_not_know_are_refused() -> None:
    (problem,) = traced(lambda q, k, v, n: ag.scores(q, k).alibi(lengths=n), n=spec(2, dtype=I64))
    assert "'lengths'" in problem
    assert "kv_lengths" in problem


def test_what_is_no_mask_is_no_step() -> None:
    (problem,) = traced(lambda q, k, v: ag.scores(q, k).mask(3))  # type: ignore[arg-type]  # is wrong
    assert "3 is not a mask" in problem


def test_seeds_are_single_numbers() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, n: ag.Value, x: ag.Value) -> ag.Value:
        return ag.scores(q, k).softmax()[0].dropout(0.5, n, x).weigh(v)

    number, real = ag.TensorSpec((), I64), ag.TensorSpec((), F32)
    (problem,) = traced(attend, n=number, x=real)
    assert "offset f32[()] must be i64[()]" in problem


def test_steps_without_all_their_operands_say_how_many_they_need() -> None:
    (problem,) = traced(lambda q, k, v: q.then(ops.Scores()))
    assert "1 operands given, 2 needed" in problem


def test_a_gradient_is_told_when_what_it_reads_does_not_fit() -> None:
    _, back = ag.vjp(call()())
    said = str(back).replace("o: f16[2, 4, 6, 8]", "o: f16[2, 4, 6, 9]")
    with pytest.raises(ag.GraphError) as caught:
        ag.parse(said)
    for name in ("o", "do"):
        told = f"attention_grad: {name} f16[2, 4, 6, 9] should be f16[2, 4, 6, 8]"
        assert any(told in problem for problem in caught.value.problems)


def test_lengths_of_other_names_are_refused() -> None:
    with pytest.raises(ag.GraphError, match=r"'x' is none of kv_lengths, q_lengths"):
        Alibi(True, ragged=("x",))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scale": 3.5e38}, "scores: scale 3.5e+38 is beyond 8.51e+37"),
        ({"scale": -1e308}, "scores: scale -1e+308 is beyond 8.51e+37"),
        ({"soft_cap": 3.5e38}, "soft_cap: cap 3.5e+38 is beyond 8.51e+37"),
        ({"soft_cap": 1e-46}, r"soft_cap: 1 / cap 1e+46 is beyond 8.51e+37"),
    ],
)
def test_numbers_that_float32_scores_have_no_room_for_are_refused(
    options: dict[str, Any], told: str
) -> None:
    """Whatever the backend; float64 has room."""
    with pytest.raises(ag.GraphError) as caught:
        call(**options)()
    assert [p for p in caught.value.problems if p.startswith(told)]
    double = spec(1, 1, 4, 8, dtype=F64)
    if abs(options.get("scale", 0)) < 1e300:
        assert ag.attention(double, double, double, **options).eqns


def test_gradients_are_of_floating_inputs_alone() -> None:
    graph = call(kv_lengths=spec(2, dtype=I64))()
    for wants in (["kv_lengths"], ["q", "nonsense"]):
        with pytest.raises(ag.GraphError, match=wants[-1]):
            ag.vjp(graph, wants=wants)


def test_a_title_stands_above_several_problems_alone() -> None:
    assert join_lines("two", ("a",)) == "a"
    assert join_lines("two", ("a", "b")) == "two\n  - a\n  - b"
    assert str(ag.GraphError("a", "b")) == "the graph has 2 problems\n  - a\n  - b"


def test_the_line_is_told_whatever_calls_lie_between() -> None:
    frame = sys._getframe()
    with pytest.raises(ag.GraphError) as caught:
        ag.attention(Q, K, K, soft_cap=-1.0)
    assert caught.value.problems[0].endswith(f"(at {__file__}:{frame.f_lineno - 1})")


def test_backends_that_only_lack_the_device_are_told_last() -> None:
    device, other = Reason(DEVICE, "needs a GPU", "there is none"), Reason.of("is closed")
    refusals = [("a", (device,)), ("b", (other, device)), ("c", (device,)), ("d", (other,))]
    assert [*refusal_lines(refusals)] == [
        "b can't: is closed; needs a GPU, and there is none",
        "d can't: is closed",
        "a, c can't: needs a GPU, and there is none",
    ]
