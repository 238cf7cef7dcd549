"""A backend that needs a self-check runs only where it has passed; why not is said once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.extend import Backend, DeviceTest, Executable, Options, RefusedError, Store
from attn_graph.ir.passes import simplify
from attn_graph.ir.reference import compare, evaluate
from attn_graph.lowering.request import Request
from attn_graph.measuring import device_test, self_check
from attn_graph.measuring.self_check import Proof, find_check, lower_checked, proofs
from tests.support.checked_backends import (
    BY_VARIANT,
    CRASHES,
    GRAPH,
    HANGS,
    HANGS_WITHIN,
    RAISES,
    RIGHT,
    TRIALS,
    WRONG,
    X,
)
from tests.support.command_line import run as run_command
from tests.support.processes import is_running

CPU = ag.Target.of("cpu")
FINE = Proof("", (0.25, 0.5), 1.0)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No plan and no outcome from before."""
    ag.clear_cache()
    proofs.clear()
    yield
    ag.clear_cache()
    proofs.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checks that start no process and pass; each adds the name of its variant."""
    asked: list[str] = []

    def try_graphs(test: DeviceTest, target: ag.Target) -> Proof:
        asked.append(test.variant)
        return FINE

    monkeypatch.setattr(device_test, "try_graphs", try_graphs)
    return asked


def compile_with(
    backend: Backend,
    store: Store | bool,
    **options: Any,  # Any: of compile
) -> ag.Plan:
    return ag.compile(GRAPH, target=CPU, backends=(backend, "math"), store=store, **options)


def test_the_graphs_of_these_tests_parse_back() -> None:
    for graph in TRIALS:
        assert ag.parse(str(graph)) == graph


def test_gradients_are_checked_with_o_and_lse_of_their_attention() -> None:
    """So that the rule allows less than most of their elements are."""
    x = ag.TensorSpec((1, 2, 40, 16), torch.bfloat16)
    forward, backward = map(simplify, ag.vjp(ag.attention(x, x, x, mask=ag.Causal(), stats=True)))
    tensors = device_test.tensors_of(backward)
    drawn = dict(zip((i.name for i in backward.inputs), tensors, strict=True))
    results = evaluate(forward, [drawn[i.name] for i in forward.inputs])
    for name, exact in zip(("o", "lse"), results, strict=True):
        assert torch.equal(drawn[name], exact.to(drawn[name].dtype))
    verification = compare(backward, tensors, evaluate(backward, tensors))
    for most, due in zip(verification.allowed, evaluate(backward, tensors), strict=True):
        assert most < due.abs().median()
    shares = device_test.try_graph(RIGHT, Request(backward, CPU, Options()), torch.device("cpu"))
    assert max(shares) <= 1


def test_what_is_right_runs_and_says_so(store: Store) -> None:
    plan = compile_with(RIGHT, store)
    assert plan.backend == "right"
    (note,) = (note for note in plan.executable.notes if "self-check" in note)
    assert note.startswith("self-check on this device: passed on 2 graphs, errors up to ")
    assert note in str(plan.explain())
    q, k, v = torch.randn(3, *X.shape, generator=torch.Generator().manual_seed(0)).unbind()
    assert plan.verify(q, k, v).ok


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (HANGS, "it had not ended after 0.5 s"),
        (RAISES, "it ended with 1: RuntimeError: misaligned address"),
    ],
)
def test_what_hangs_or_raises_does_not_run(backend: Backend, why: str, store: Store) -> None:
    with pytest.warns(ag.SelfCheckWarning, match=f"{backend.name} is not used on cpu: .*{why}"):
        plan = compile_with(backend, store)
    assert plan.backend == "math"
    ((name, (reason,)),) = plan.refusals
    assert (name, reason.key) == (backend.name, "self_check")
    assert str(reason).startswith("runs only where its self-check passes, and on cpu it ")
    q, k, v = torch.randn(3, *X.shape, generator=torch.Generator().manual_seed(0)).unbind()
    assert plan.verify(q, k, v).ok


def test_each_variant_has_a_check_of_its_own(store: Store) -> None:
    """And what is wrong does not run."""

    def lower(variant: str | None) -> Executable:
        options = Options(store=store, variant=variant)
        return lower_checked(BY_VARIANT, Request(simplify(GRAPH), CPU, options))

    assert any("passed on 2 graphs" in note for note in lower(None).notes)
    why = r"it is wrong: an error is \S+ times what the accuracy rule allows"
    with (
        pytest.warns(ag.SelfCheckWarning, match=f"variant 'wrong', failed: {why}"),
        pytest.raises(RefusedError, match="runs only where its self-check passes"),
    ):
        lower("wrong")


@pytest.mark.slow
def test_a_kernel_that_never_ends_is_ended_with_its_process(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was launched, and its result is waited for where no signal is heard."""
    log = tmp_path / "processes"
    monkeypatch.setenv("PLAYED_DEVICE", str(log))
    with pytest.warns(ag.SelfCheckWarning, match="it had not ended after 20 s"):
        plan = compile_with(HANGS_WITHIN, store)
    assert plan.backend == "math"
    processes = [*map(int, log.read_text().split())]
    assert len(processes) == 2  # the check's own, and one that compiles for it
    assert not any(map(is_running, processes))


@pytest.mark.slow
def test_what_ends_its_process_does_not_run(store: Store) -> None:
    with pytest.warns(ag.SelfCheckWarning, match="it ended with 3: no message"):
        assert compile_with(CRASHES, store).backend == "math"


def test_an_outcome_is_remembered_and_warned_of_once_a_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_test, "try_graphs", lambda *_: Proof("had not ended after 300 s"))
    with pytest.warns(ag.SelfCheckWarning) as caught:
        compile_with(WRONG, store)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    monkeypatch.delattr(device_test, "try_graphs")  # nothing is checked again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for deterministic in (True, False):
            ag.clear_cache()
            assert compile_with(WRONG, store, deterministic=deterministic).backend == "math"
    proofs.clear()
    ag.clear_cache()
    with pytest.warns(ag.SelfCheckWarning, match="had not ended after 300 s"):  # another process
        assert compile_with(WRONG, store).backend == "math"


def test_without_a_store_it_is_checked_once_a_process(outcomes: list[str]) -> None:
    for deterministic in (True, False):
        assert compile_with(RIGHT, False, deterministic=deterministic).backend == "right"
    assert outcomes == ["its only one"]


@pytest.mark.parametrize("change", ["driver", "library", "kernel", "variant"])
def test_another_version_is_checked_anew(
    change: str, store: Store, outcomes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(RIGHT, store)
    ag.clear_cache()
    backend = RIGHT
    if change == "driver":
        monkeypatch.setattr(self_check, "driver_version", lambda: "NVRM version: 999")
    elif change == "kernel":
        monkeypatch.setattr(self_check, "kernel_digest", lambda: "other")
    elif change == "library":
        newer, check = (("triton", "99.0"),), self_check.SelfCheck
        monkeypatch.setattr(
            self_check,
            "SelfCheck",
            lambda name, test, target, store: check(
                name, test, evolve(target, libraries=newer), store
            ),
        )
    else:
        one = RIGHT.device_test(Request(GRAPH, CPU, Options()))
        assert one is not None
        backend = evolve(RIGHT, device_test=lambda *_: evolve(one, variant="another"))
    assert compile_with(backend, store).backend == "right"
    assert len(outcomes) == 2
    proofs.clear()
    ag.clear_cache()
    assert compile_with(backend, store).backend == "right"
    assert len(outcomes) == 2  # both are stored


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"3", b"null", b'{"failure": "", "shares": 3, "seconds": 1}', None]
)
def test_a_damaged_record_is_checked_anew(
    damage: bytes | None, store: Store, outcomes: list[str]
) -> None:
    check = find_check(RIGHT, Request(GRAPH, CPU, Options(store=store)))
    assert check is not None
    if damage is None:
        check.prove()
        proofs.clear()
        store.path(check.key).write_bytes(b"garbage")
        outcomes.clear()
    else:
        store.put(check.key, damage)
    assert compile_with(RIGHT, store).backend == "right"
    assert outcomes == ["its only one"]
    assert [proof for _, proof in self_check.stored_proofs(store)] == [FINE]


def test_explaining_checks_nothing_and_says_when_it_will_be(
    store: Store, outcomes: list[str]
) -> None:
    def explain(target: ag.Target) -> str:
        return str(ag.explain(GRAPH, target=target, backends=(RIGHT, "math"), store=store))

    assert "a self-check on this device comes before its first use" in explain(CPU)
    assert "a self-check on the device itself comes before" in explain(ag.Target.of("h200"))
    assert not outcomes
    compile_with(RIGHT, store)
    assert "self-check on this device: passed on 2 graphs, errors up to 50 % of" in explain(CPU)


def test_explaining_knows_a_failure_that_is_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_test, "try_graphs", lambda *_: Proof("is wrong"))
    with pytest.warns(ag.SelfCheckWarning):
        compile_with(WRONG, store)
    text = str(ag.explain(GRAPH, target=CPU, backends=(WRONG, "math"), store=store))
    assert "math runs this on cpu: the only backend allowed that supports the graph" in text
    assert "runs only where its self-check passes, and on cpu it is wrong; `attn-graph" in text


def test_a_plan_for_another_machine_needs_no_check_here(outcomes: list[str]) -> None:
    plan = ag.compile(GRAPH, target="h200", backends=(RIGHT,))
    assert plan.backend == "right"
    assert not outcomes


def test_tuning_measures_only_what_is_checked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_test, "try_graphs", lambda *_: Proof("is wrong"))
    with pytest.warns(ag.SelfCheckWarning):
        plan = compile_with(HANGS, store, tune=True)
    assert plan.backend == "math"


def test_commands_list_and_clear_outcomes(store: Store, outcomes: list[str]) -> None:
    compile_with(RIGHT, store)
    folder = ("--folder", str(store.folder))
    (entry,) = json.loads(run_command("cache", "list", *folder, "--json").output)["entries"]
    assert (entry["kind"], entry["what"]) == ("check", "right, its only one, on cpu")
    assert "1 file deleted" in run_command("cache", "clear", *folder).output
    proofs.clear()
    ag.clear_cache()
    compile_with(RIGHT, store)
    assert len(outcomes) == 2
