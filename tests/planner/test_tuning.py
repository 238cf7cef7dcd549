"""The fastest is chosen by measuring, once, and said with its figures."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.backend import Executable
from attn_graph.lowering.cpu import math as torch_math
from attn_graph.lowering.cudnn import backend as cudnn_backend
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.store import Store
from attn_graph.machine.target import Target
from attn_graph.measuring import timing, tuning
from attn_graph.testing.strategies import graphs

CPU = Target.of("cpu")
X = ag.TensorSpec((1, 2, 16, 8), torch.float32)
GRAPH = ag.attention(X, X, X, mask=ag.Causal(), stats=True)
Run = Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def made(name: str, change: Callable[[Run, str | None], Run], *variants: str) -> ag.extend.Backend:
    """math by another name, with something done to each run."""

    def lower(graph: ag.Graph, target: Target, options: Options) -> Executable:
        plain = torch_math.BACKEND.lower(Request(graph, target, evolve(options, variant=None)))
        return evolve(plain, run=change(plain.run, options.variant))

    return ag.extend.Backend(name, lambda *asked: (), lower, variants=lambda *asked: variants)


def sleeping(seconds: dict[str | None, float]) -> Callable[[Run, str | None], Run]:
    def change(run: Run, variant: str | None) -> Run:
        def slow(*tensors: torch.Tensor) -> object:
            time.sleep(seconds[variant])
            return run(*tensors)

        return slow  # type: ignore[return-value]  # what `run` returns

    return change


SLOW = made("slow", sleeping({None: 0.05}))
VARIED = made("varied", sleeping({None: 0.03, "quick": 0.0}), "quick")


def test_the_fastest_variant_of_the_fastest_backend_is_chosen(store: Store) -> None:
    plan = ag.compile(GRAPH, target=CPU, backends=(SLOW, VARIED), tune=True, store=store)
    assert plan.backend == "varied"
    assert plan.also == ("slow",)
    assert plan.cause.startswith("it was the fastest when measured here: varied, quick ")
    assert re.search(r", varied \d", plan.cause)
    assert plan.cause in str(plan.explain())
    q, k, v = torch.randn(3, *X.shape).unbind()
    assert plan.verify(q, k, v).ok


def test_figures_are_stored_and_measured_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ag.compile(GRAPH, target=CPU, backends=(SLOW, VARIED), tune=True, store=store)
    ag.clear_cache()
    monkeypatch.setattr(tuning, "add_medians", None)
    again = ag.compile(GRAPH, target=CPU, backends=(SLOW, VARIED), tune=True, store=store)
    assert again is not first
    assert again.cause == first.cause
    (key,) = (entry.key for entry in store.entries())
    assert key is not None
    assert key.startswith("tune {")


@pytest.mark.parametrize("data", [b"", b"[1, 2]", b'{"slow": "much"}', b'{"slow": null}', b"3"])
def test_what_is_stored_but_holds_no_figures_is_measured_anew(
    store: Store, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ag.compile(GRAPH, target=CPU, backends=(SLOW,), tune=True, store=store)
    ag.clear_cache()
    (key,) = (entry.key for entry in store.entries())
    assert key is not None
    store.put(key, data)
    assert ag.compile(GRAPH, target=CPU, backends=(SLOW,), tune=True, store=store).backend == "slow"
    assert "it holds no figures" in caplog.text
    assert store.get(key) != data


def test_an_interrupt_keeps_what_is_known_and_the_rest_is_measured_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def interrupted(jobs: dict[str, object], **options: object) -> Iterator[tuple[str, float]]:
        asked.append([*jobs])
        yield "slow", 0.5
        raise KeyboardInterrupt

    def whole(jobs: dict[str, object], **options: object) -> Iterator[tuple[str, float]]:
        asked.append([*jobs])
        yield from dict.fromkeys(jobs, 0.25).items()

    monkeypatch.setattr(timing, "samples", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ag.compile(GRAPH, target=CPU, backends=(SLOW, VARIED), tune=True, store=store)
    monkeypatch.setattr(timing, "samples", whole)
    plan = ag.compile(GRAPH, target=CPU, backends=(SLOW, VARIED), tune=True, store=store)
    assert asked == [["slow", "varied", "varied, quick"], ["varied", "varied, quick"]]
    assert plan.cause.endswith("varied 250 ms, varied, quick 250 ms, slow 500 ms")


def test_who_refuses_when_it_runs_is_passed_over(store: Store) -> None:
    def change(run: Run, variant: str | None) -> Run:
        def refuse(*tensors: torch.Tensor) -> object:
            raise ag.extend.RefusedError("needs 9 of something, of which there are 3")

        return refuse if variant else run  # type: ignore[return-value]  # as above

    fussy = made("fussy", change, "larger")
    plan = ag.compile(GRAPH, target=CPU, backends=(fussy,), tune=True, store=store)
    assert plan.backend == "fussy"
    assert "larger" not in plan.cause


def test_both_passes_are_measured_by_themselves(store: Store) -> None:
    plan = ag.compile(GRAPH, target=CPU, tune=True, store=store)
    assert len([*store.entries()]) == 1
    assert plan.vjp.cause.startswith("it was the fastest when measured here: ")
    assert len([*store.entries()]) == 2


def test_another_machine_cannot_be_measured() -> None:
    with pytest.raises(ag.GraphError, match=r"tune: measures on this machine, .* target is h200"):
        ag.compile(GRAPH, target="h200", tune=True)


@given(graph=graphs())
def test_examples_are_what_the_graph_declares(graph: ag.Graph) -> None:
    simple = simplify(graph)
    for x, tensor in zip(simple.inputs, tuning.examples(simple, torch.device("cpu")), strict=True):
        assert ag.TensorSpec.like(tensor) == x.spec
        if x.name == "kv_lengths":
            assert (tensor == simple.inputs[1].spec.shape[2]).all()


@pytest.mark.parametrize("drawn", [False, True])
def test_examples_of_packed_and_paged_tensors_fill_them(drawn: bool) -> None:
    """Else tuning measures what empty sequences take."""
    q, starts = ag.TensorSpec((120, 2, 16), torch.float32), ag.TensorSpec((5,), torch.int32)
    pool, table = ag.TensorSpec((9, 4, 2, 16), torch.float32), ag.TensorSpec((4, 2), torch.int32)
    lengths = ag.TensorSpec((4,), torch.int32)
    packed = ag.attention(q, q, q, q_starts=starts, q_lengths=lengths, kv_starts=starts)
    paged = ag.attention(q, pool, pool, q_starts=starts, pages=table, kv_lengths=lengths)
    for graph in map(simplify, (packed, paged)):
        tensors = tuning.examples(graph, torch.device("cpu"), drawn=drawn)
        given = dict(zip((i.name for i in graph.inputs), tensors, strict=True))
        rows, most = given["q_starts"].diff(), {"q_lengths": 120, "kv_lengths": 8, "pages": 8}
        assert (rows >= 0).all()
        assert rows.sum() > 0
        assert all(0 <= given[n].min() <= given[n].max() <= most[n] for n in most if n in given)
        if not drawn:
            assert rows.tolist() == [30] * 4
            assert given.get("q_lengths", rows).tolist() == rows.tolist()
            assert given.get("kv_lengths", torch.tensor(8)).min() == 8
        ag.compile(graph, target=CPU)(*tensors)


def test_cudnn_builds_each_plan_that_it_proposes(store: Store) -> None:
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend: make venv installs it")
    x = ag.TensorSpec((1, 2, 256, 64), torch.float16)
    graph, target = simplify(ag.attention(x, x, x)), Target.of("h200")
    options = Options(store=store)
    names = cudnn_backend.BACKEND.variants(Request(graph, target, options))
    plans = [
        cudnn_backend.BACKEND.lower(Request(graph, target, evolve(options, variant=name))).notes[0]
        for name in (None, *names)
    ]
    assert len(names) >= 2
    assert len({*plans}) == len(plans) == len([*store.entries()])


def late(name: str) -> ag.extend.Backend:
    """Finds out only when it lowers."""

    def lower(graph: ag.Graph, target: Target, options: Options) -> Executable:
        raise ag.extend.RefusedError("needs what shows late, and there is none")

    return ag.extend.Backend(name, lambda *asked: (), lower)


def test_who_refuses_when_it_lowers_is_told(store: Store) -> None:
    plan = ag.compile(GRAPH, target=CPU, backends=(late("late"), SLOW), tune=True, store=store)
    assert plan.backend == "slow"
    reason = ag.extend.Reason.of("needs what shows late, and there is none")
    assert plan.refusals == (("late", (reason,)),)
    assert plan.also == ()
    with pytest.raises(ag.NoBackendError, match="needs what shows late"):
        ag.compile(GRAPH, target=CPU, backends=(late("late"),), tune=True, store=store)


def test_a_stored_winner_that_needs_too_much_now_is_passed_over(store: Store) -> None:
    X32 = ag.TensorSpec((1, 2, 64, 16), torch.float32)
    graph = ag.attention(X32, X32, X32, soft_cap=3.0)
    first = ag.compile(graph, target=CPU, tune=True, store=store)
    assert first.backend == "math"
    with pytest.raises(ag.NoBackendError, match="max_workspace is 16 bytes"):
        ag.compile(graph, target=CPU, tune=True, store=store, max_workspace=16)
