"""What `benchmarks/cpu.py` compares is the same job, done in several ways."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from benchmarks import derivatives, timing
from benchmarks.cpu import OURS, Row, format_row, make_cotangent, make_ours, measure_job, run_pass
from benchmarks.cpu_jobs import BEST, F32, GROUPS, Job, make_graph, make_operands, shrink_job
from benchmarks.cpu_peers import PEERS, make_flex, make_peers
from benchmarks.cpu_runtimes import RUNTIMES
from benchmarks.memory import peak_bytes
from benchmarks.ragged import (
    Sequences,
    attend_in_loop,
    attend_nested,
    attend_padded,
    attend_plan,
)
from docs.generate import speed

JOBS = [job for group in GROUPS.values() for job in group()]
SMALL = {evolve(job, title="", goal=1, beside=BEST): job for job in map(shrink_job, JOBS)}
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # a few roundings


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for each other longer than such small tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_row_has_its_own_name() -> None:
    names = [(job.name, job.backward) for job in JOBS]
    assert len(names) == len({*names})


def test_each_job_has_the_peer_of_its_goal() -> None:
    for job in JOBS:
        peers = [name for name, peer in PEERS.items() if peer.fits(job) and not peer.compiles]
        assert peers, job
        assert job.beside in (BEST, *peers), job


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("job", SMALL.values(), ids=lambda job: f"{job.name}, {job.backward}")
def test_all_peers_do_the_same_job(job: Job) -> None:
    x, do = make_operands(job), make_cotangent(job)
    plan = ag.compile(make_graph(job, x), target="cpu")
    ways = make_peers(job, x, PEERS | RUNTIMES)
    if PEERS["flex"].fits(job) and job.dtype == F32:  # each takes a third of a second
        ways["flex"] = make_flex(job, x, compiled=False)
    ours = run_pass(job, make_ours(plan), x, do)
    near = NEAR[job.dtype]
    for name, attend in ways.items():
        theirs = run_pass(job, attend, x, do)
        say = partial("{}: {}".format, name)
        torch.testing.assert_close(theirs, ours, rtol=near, atol=near, msg=say)


def test_a_row_says_what_was_compared() -> None:
    row = measure_job(Job("full", F32, (1, 4, 32, 8), key_heads=2, backward=True), runs=2)
    assert {*row["ratios"]} == {"sdpa", "sdpa, heads folded", "formula"}
    assert row["ratio"] == row["ratios"][row["peer"]]
    assert row["reached"] == (row["ratio"] >= row["goal"])
    assert row["gemm GFLOP/s"] > row["GFLOP/s"] > 0
    assert OURS not in row["ratios"]
    assert row["job"] in format_row(row)


def test_a_decode_row_says_how_fast_it_reads() -> None:
    row: Row = measure_job(Job("decode", F32, (1, 4, 1, 8), keys=512), runs=1)
    assert row["GB/s"] > 0
    assert row["read GB/s"] > 0


def test_only_peers_far_behind_have_fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much faster a yardstick is than all that is compared."""
    now = 0.0

    def pass_time(s: float) -> None:
        nonlocal now
        now += s

    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: now)
    lengths = {"ours": 0.25, "peer": 0.5, "yardstick": 0.0009765625, "far": 2.0}
    times = timing.seconds_in_turn({x: partial(pass_time, s) for x, s in lengths.items()}, runs=3)
    counts = {"ours": 3, "peer": 3, "yardstick": 3, "far": 1}
    assert times == {x: [s] * counts[x] for x, s in lengths.items()}


def test_memory_counts_what_comes_and_goes() -> None:
    x = torch.ones(2**18)
    few = 2**7  # numbers that operators make of scalars
    assert peak_bytes(lambda: x + 1) < few
    assert 0 <= peak_bytes(lambda: (x + 1) * 2) - 2**20 < few
    assert 0 <= peak_bytes(lambda: ((x + 1) * 2).sum()) - 2 * 2**20 < few


def test_the_page_names_the_best_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And reads files of before there were several, which test_docs.py holds the page to."""
    row = measure_job(Job("causal | prefix 9", F32, (1, 2, 16, 8), causal=True, prefix=9), runs=1)
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    short = {"threads": 1, "ms": 0.1234, "peer ms": 2.34, "ratio": 18.963}
    timing.save("cpu", [row | short, row | {"threads": 2}])
    text = speed.all_rows()
    assert "1 and 2 threads" in text
    assert f"forward | 1 | 0.123 | {row['peer']} | 2.3 | 18.96 |" in text


def test_the_picture_is_beside_ways_in_pytorch_alone() -> None:
    row = {"ratio": 0.5, "ratios": {"sdpa": 3.0, "formula": 2.0, "jax": 0.5}}
    assert speed.beside_torch(row) == 2.0
    assert speed.beside_torch({"ratio": 1.5}) == 1.5  # of when there was one peer


def test_the_chart_shows_jobs_that_are_slower_than_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the shapes of a job the slow one counts: a mean with a fast one would hide it."""
    rows = [
        {"job": f"float32 {job}", "pass": "forward", "ratio": ratio}
        for job, ratio in (("a (1, 2)", 0.8), ("a (1, 3)", 1.4), ("b", 1.05), ("c", 1.2))
    ]
    monkeypatch.setattr(speed, "newest", lambda: ("cpu.json", {"rows": rows}))
    monkeypatch.setattr(speed, "CHART", {"Group": {"first": "float32 a", "second": "float32 c"}})
    assert speed.common_jobs() == [
        ("Group", {}),
        ("first", {"forward": 0.8}),
        ("second", {"forward": pytest.approx(1.2)}),
    ]


def test_the_chart_names_jobs_of_the_newest_results() -> None:
    assert sum(len(jobs) for jobs in speed.CHART.values()) <= 14
    assert all(figures for name, figures in speed.common_jobs() if name not in speed.CHART)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_packed_sequences_are_the_same_job_in_every_way() -> None:
    work = Sequences(0.05, torch.float32, causal=False)
    tensors = work.tensors()
    o = attend_plan(work, tensors)(*tensors)
    torch.testing.assert_close(attend_in_loop(work, tensors)(*tensors), o)
    torch.testing.assert_close(attend_nested(work, tensors)(*tensors), o)
    causal = Sequences(0.05, torch.float32)
    due, padded = attend_plan(causal, tensors)(*tensors), attend_padded(causal, tensors)()
    rows = [x[:, :n].transpose(0, 1) for x, n in zip(padded, causal.lengths, strict=True)]
    torch.testing.assert_close(torch.cat(rows), due)


def test_both_ways_to_a_derivative_agree() -> None:
    sizes = (1, 2, 24, 8)
    for job in (derivatives.make_push(sizes), derivatives.make_double_backward(sizes)):
        rows = [*derivatives.measure_job(job, runs=1)]
        assert {row["peer"] for row in rows} == {*job.peers} == {*job.goals}
        for row in rows:
            assert row["reached"] in (True, False)
            assert f"beside {row['peer']}" in derivatives.format_row(row)
    assert job.least_memory == 10


def test_a_long_derivative_says_its_memory() -> None:
    pushed, pulled = derivatives.measure_long((1, 2, 64, 8))
    assert pushed["goal"] == pulled["goal"] == 250
    assert pushed["reached"]
    assert "MiB resident" in derivatives.format_row(pulled)


def test_rows_of_padding_are_not_compared() -> None:
    models = pytest.importorskip("benchmarks.models", reason="needs transformers")
    rows = torch.tensor([[True, False]])
    job = models.WholeJob("padded", "forward", make=lambda _: None, rows=rows)
    ours = torch.tensor([[[1.0], [2.0]]])
    models.require_same(job, ours, torch.tensor([[[1.0], [5.0]]]))
    with pytest.raises(AssertionError):
        models.require_same(job, ours, torch.tensor([[[5.0], [2.0]]]))
