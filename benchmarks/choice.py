"""What each way of attention takes on this CPU, beside its price in lowering/rates.toml.

Prices only have to be in order: `lost` says how many times as long as the fastest way the chosen
one takes. A row of rates for another CPU is right if that is little everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch

import attn_graph as ag
from attn_graph.extend import Options
from attn_graph.lowering.cpu.math import ready_alone
from attn_graph.lowering.cpu.ways import WAYS, CpuCase, own_products
from attn_graph.lowering.folding import fold_problem, shape_each
from attn_graph.lowering.problem import sole
from benchmarks.cpu_jobs import F16, GROUPS, Job, make_graph, make_operands
from benchmarks.timing import microseconds_in_turn, save

Row = dict[str, Any]  # Any: figures and words


def make_case(job: Job) -> tuple[CpuCase, Sequence[torch.Tensor]]:
    """The case of a job's attention, or of its gradient, and its operands."""
    own = {n: x.detach() for n, x in make_operands(job).items()}
    graph = make_graph(job, own)
    plan = ag.compile(graph, target="cpu", backends=("math",))
    tensors = [own[x.name] for x in graph.inputs]
    if job.backward:
        (o, *_), saved = plan.run(*tensors)
        tensors = [*tensors, *saved, torch.randn_like(o)]
        plan = plan.vjp
    problem = sole(plan.graph)
    assert problem is not None  # a job is one attention
    operands = [tensors[n] for n in plan.graph.eqns[0].args]
    folded = fold_problem(problem)  # as plans do
    if folded is not None:
        shapes = {n: x.shape for n, x in enumerate(folded.specs) if x != problem.specs[n]}
        problem, operands = folded, shape_each(operands, shapes)
    return CpuCase(problem, own_products(ag.Target.of("cpu"))), operands


def measure_ways(job: Job, rounds: int) -> Row:
    """The price and the time of each way, in microseconds."""
    case, operands = make_case(job)
    able = [way for way in WAYS if way.refuses(case) is None]
    runs: dict[str, Callable[[], object]] = {}
    for way in able:
        call, infer = ready_alone(way.tile(case), Options())
        work = call if job.backward else infer
        runs[way.name] = partial(work, operands[0].device, *operands)
    times = microseconds_in_turn(runs, calls=1, rounds=rounds)
    chosen = case.cheapest[0].name
    prices = {way.name: round(way.seconds(case) * 1e6) for way in able}
    lost = round(times[chosen] / min(times.values()), 2)
    row: Row = {"job": job.name, "backward": job.backward, "chosen": chosen, "lost": lost}
    return row | {"prices": prices, "times": {name: round(t) for name, t in times.items()}}


def choose_jobs(groups: Sequence[str]) -> Iterator[Job]:
    """The jobs without a modifier. Products of float16 take seconds on most CPUs."""
    for group in groups:
        for job in GROUPS[group]():
            changed = job.alibi or job.bias or job.soft_cap is not None
            if not changed and (job.dtype != F16 or job.sizes[2] == 1):
                yield job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=["decode", "short"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="keep the figures, by date and CPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for job in choose_jobs(options.groups):
        rows.append(measure_ways(job, options.rounds))
        print(*(f"{name}={value}" for name, value in rows[-1].items()))
    print(f"lost, geometric mean: {geometric_mean(row['lost'] for row in rows):.3f}")
    if options.save:
        print(save("choice", rows))


if __name__ == "__main__":
    main()
