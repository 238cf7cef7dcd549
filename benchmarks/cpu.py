"""attn_graph against every way to do the same job in PyTorch, on this CPU, and in other runtimes
where they are installed.

All ways of a job run in turn in one process. `ratio` says how many times as fast as the best of
the others ours is: wall time, the median of each run's ratio. Where other programs share the
machine, the ratio of the fastest runs, which they disturbed least, says more.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from attrs import frozen

import attn_graph as ag
from benchmarks.cpu_jobs import (
    BEST,
    BF16,
    F32,
    GROUPS,
    Job,
    Operands,
    make_graph,
    make_operands,
)
from benchmarks.cpu_peers import PEERS, Attend, make_peers
from benchmarks.cpu_runtimes import RUNTIMES, versions
from benchmarks.memory import peak_bytes
from benchmarks.timing import save, seconds_in_turn

OURS = "attn_graph"
SIDE = 1024  # of the matrices whose product is timed
Row = dict[str, Any]


@frozen
class Yardstick:
    """What the machine can do at best, beside what the job needs of it: work in `unit` of 1e9."""

    name: str
    unit: str
    work: float  # of the job
    own_work: float  # of the yardstick
    run: Callable[[], object]


def find_yardstick(job: Job) -> Yardstick | None:
    """A product of matrices for full attention, reading as many bytes for one query."""
    (B, H, M, D), G, N, E = job.sizes, job.G, job.N, job.E
    if not job.is_plain:
        return None
    if M == 1:
        count = B * G * N * (D + E) * job.dtype.itemsize
        memory = torch.ones(count // 4)
        return Yardstick("read", "GB/s", count, count, memory.sum)
    if job.dtype not in (F32, BF16):
        return None
    work = 2 * B * H * M * N * (D + E) * (3.5 if job.backward else 1)
    a, b = torch.randn(2, SIDE, SIDE, dtype=job.dtype).unbind()
    return Yardstick("gemm", "GFLOP/s", work, 2 * SIDE**3, partial(torch.mm, a, b))


def make_cotangent(job: Job) -> torch.Tensor:
    """A random gradient of o, or that of `o.sum()`: one number, seen as many."""
    B, H, M, _ = job.sizes
    o = torch.ones((), dtype=job.dtype).expand(B, H, M, job.E)
    return o if job.expanded else torch.randn_like(o, memory_format=torch.contiguous_format)


def run_pass(job: Job, attend: Attend, x: Operands, do: torch.Tensor) -> object:
    """One call: the output, or the gradients of what has one."""
    o = attend(x)
    if not job.backward:
        return o
    return torch.autograd.grad(o, [t for t in x.values() if t.requires_grad], do)


def make_ours(plan: ag.Plan) -> Attend:
    """Ours, which returns o alone."""
    operands = itemgetter(*plan.names)
    return lambda x: cast(torch.Tensor, plan(*operands(x)))


def measure_job(job: Job, runs: int, fill: float = 0.0, *, compiled: bool = False) -> Row:
    """One row: times and memory of ours and of the peers, the ratios, and the goal. runs, fill: as
    `seconds_in_turn` has them."""
    x, do = make_operands(job), make_cotangent(job)
    workspace = ag.Workspace()
    plan = ag.compile(make_graph(job, x), workspace=workspace)
    ways: dict[str, Attend] = {OURS: make_ours(plan)}
    ways |= make_peers(job, x, PEERS | RUNTIMES, compiled=compiled)
    calls = {name: partial(run_pass, job, attend, x, do) for name, attend in ways.items()}
    yardstick = find_yardstick(job)
    extra = {yardstick.name: yardstick.run} if yardstick else {}
    times = seconds_in_turn(calls | extra, runs, fill)
    row = {
        "job": job.name,
        "pass": "forward+backward" if job.backward else "forward",
        "threads": torch.get_num_threads(),
        "backend": plan.backend,
    }
    row |= compare_times(job, {name: times[name] for name in calls})
    if yardstick:
        row |= rate_work(yardstick, times)
    workspace.release()
    return row | {"MiB": peak_mebibytes(calls[OURS])} | sdpa_memory(calls)


def compare_times(job: Job, times: Mapping[str, Sequence[float]]) -> Row:
    """Our time beside the best peer's, how many times as fast as each ours is, and the goal."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios = {name: ratio(times[OURS], each) for name, each in times.items() if name != OURS}
    best = min(ratios, key=lambda name: medians[name])
    return {
        "ms": round(medians[OURS] * 1e3, 4),
        "peer": best,
        "peer ms": round(medians[best] * 1e3, 4),
        "ratio": ratios[best],
        "ratio of the fastest": round(min(times[best]) / min(times[OURS]), 3),
        "ratios": ratios,
        "goal": job.goal,
        "beside": job.beside,
        "reached": ratios[best if job.beside == BEST else job.beside] >= job.goal,
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of each run's ratio, so that drift cancels; of medians where one ran once."""
    if len(ours) != len(theirs):
        return round(statistics.median(theirs) / statistics.median(ours), 3)
    return round(statistics.median(t / o for o, t in zip(ours, theirs, strict=True)), 3)


def rate_work(yardstick: Yardstick, times: Mapping[str, Sequence[float]]) -> Row:
    """What ours does in a second, and the yardstick beside it."""
    ours, own = (statistics.median(times[name]) for name in (OURS, yardstick.name))
    return {
        yardstick.unit: round(yardstick.work / ours / 1e9, 2),
        f"{yardstick.name} {yardstick.unit}": round(yardstick.own_work / own / 1e9, 2),
    }


def peak_mebibytes(call: Callable[[], object]) -> float:
    """The most memory of a call above its inputs and outputs, workspaces that are new included."""
    return round(peak_bytes(call) / 2**20, 2)


def sdpa_memory(calls: Mapping[str, Callable[[], object]]) -> Row:
    """The same of SDPA, where it can do the job."""
    return {"sdpa MiB": peak_mebibytes(calls["sdpa"])} if "sdpa" in calls else {}


def format_row(row: Row) -> str:
    """A row as a line of text."""
    others = "; ".join(f"{name} {x:.2f}" for name, x in row["ratios"].items())
    rates = " ".join(f"{row[x]} {x}" for x in row if x.endswith("/s"))
    goal = f"goal {row['goal']} of {row['beside']}{'' if row['reached'] else ', missed'}"
    memory = f"{row['MiB']} MiB ({row.get('sdpa MiB', '-')})"
    times = f"{row['ratio']:7.2f}x {row['ms']:9.3f} ms {row['peer ms']:9.3f} ms"
    about = f"{row['job']}, {row['pass']}, {row['threads']} threads: {row['backend']}"
    fastest = f"{row['ratio of the fastest']:.2f} of the fastest"
    return "  ".join(filter(None, (times, about, f"[{others}]", goal, memory, rates, fastest)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument(
        "--fill", type=float, default=0.1, help="more runs of short jobs, until they take so many s"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument(
        "--flex", action="store_true", help="FlexAttention too, which compiles for seconds a job"
    )
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/cpu-<date>.json"
    )
    options, rows = parser.parse_args(), []
    if unknown := {*options.groups} - {*GROUPS}:
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for group in options.groups:
            for job in GROUPS[group]():
                rows.append(measure_job(job, options.runs, options.fill, compiled=options.flex))
                print(format_row(rows[-1]), flush=True)
    if options.save:
        print(save("cpu", rows, runtimes=dict(versions())))


if __name__ == "__main__":
    main()
