"""Models by attn_graph beside eager and SDPA, on this CPU: layers, and whole models.

Layers are of real head sizes and few features: their projections cost next to nothing, so that what
is timed is attention, with what each implementation does around it. Of whole models, which
`model_jobs` lists, it is all: all implementations take turns in one run. --cpu takes the CPU time
of one thread, for a machine that others share.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Any

import torch
import transformers as hf
from attrs import frozen

from attn_graph.integrations.transformers import NAME
from benchmarks.model_jobs import WholeJob, list_jobs
from benchmarks.timing import save, versus

TOKENS = 4096
PEERS = ("eager", "sdpa")
GOAL, WHOLE_GOAL = 2, 0.98
Model = Any  # of transformers
FEATURES: dict[str, Any] = {  # Any: what a config takes
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "pad_token_id": 0,
}  # fmt: skip
Call = Callable[[], torch.Tensor]


@frozen
class Job:
    """A model of two layers, of which one is timed."""

    name: str
    make: Callable[[], Model]
    layer: int


def make_gemma() -> Model:
    """Gemma 2 with the heads of the 2B model, and a window that is shorter than the text."""
    config = hf.Gemma2Config(
        **FEATURES, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config).eval()


def make_mistral() -> Model:
    """Mistral with a quarter of the 7B model's heads."""
    config = hf.MistralConfig(
        **FEATURES, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, sliding_window=1024,
    )  # fmt: skip
    return hf.MistralForCausalLM(config).eval()


JOBS = (
    Job("Gemma 2, soft cap, causal (1, 8 over 4, 4096, 256)", make_gemma, 1),
    Job("Gemma 2, soft cap, window 1024 (1, 8 over 4, 4096, 256)", make_gemma, 0),
    Job("Mistral, window 1024 (1, 8 over 2, 4096, 128)", make_mistral, 0),
)


def layer_call(job: Job, implementation: str, *, backward: bool) -> Call:
    """A call of the layer's attention as the model makes it, with the mask it makes for it.

    Raises ValueError where transformers has no such implementation of the model.
    """
    torch.manual_seed(0)
    model = job.make()
    model.set_attn_implementation(implementation)
    layer = model.model.layers[job.layer].self_attn
    calls: list[Any] = []  # Any: arguments by place, and by name
    hook = layer.register_forward_pre_hook(
        lambda _, args, named: calls.append((args, named)), with_kwargs=True
    )
    with torch.no_grad():
        model(torch.randint(1, 64, (1, TOKENS)), use_cache=False)
    hook.remove()
    ((args, named),) = calls

    def run() -> torch.Tensor:
        with torch.set_grad_enabled(backward):
            o: torch.Tensor = layer(*args, **named)[0]
            if backward:
                o.sum().backward()
        return o.detach()

    return run


def measure_job(job: Job, backward: bool, runs: int) -> Iterator[dict[str, Any]]:
    """A row for each peer: times, and the ratio of medians and of the fastest runs."""
    ours = layer_call(job, NAME, backward=backward)
    for peer in PEERS:
        row = {"job": job.name, "pass": "forward+backward" if backward else "forward", "peer": peer}
        try:
            theirs = layer_call(job, peer, backward=backward)
        except ValueError as error:  # transformers' word on Gemma 2 and SDPA
            yield row | {"refused": str(error).split(". ")[0]}
            continue
        torch.testing.assert_close(ours(), theirs())
        time = versus(ours, theirs, runs)
        yield row | {
            "ms": round(time.ours * 1e3, 1),
            "peer ms": round(time.peer * 1e3, 1),
            "ratio": round(time.ratio, 2),
            "ratio of the fastest": round(time.least_ratio, 2),
            "goal": GOAL,
        }


def measure_whole(job: WholeJob, runs: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """A row for each peer, all of one run in which they take turns."""
    calls, refused = {NAME: job.make(NAME)}, dict[str, str]()
    for peer in job.peers:
        try:
            calls[peer] = job.make(peer)
        except ValueError as error:
            refused[peer] = str(error).split(". ")[0]
    first = {name: call() for name, call in calls.items()}
    if job.same and first[NAME].dtype != torch.bfloat16:
        for result in first.values():
            require_same(job, first[NAME], result)
    times = dict[str, list[float]]({name: [] for name in calls})
    for _ in range(runs):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    same = {"job": job.name, "pass": job.kind}
    rows: list[dict[str, Any]] = [
        same | {"peer": peer} | compare(times[NAME], times[peer]) for peer in calls if peer != NAME
    ]
    return rows + [same | {"peer": peer, "refused": why} for peer, why in refused.items()]


def require_same(job: WholeJob, ours: torch.Tensor, peer: torch.Tensor) -> None:
    """Raise AssertionError where results differ in rows that mean something."""
    if job.rows is not None:
        ours, peer = ours[job.rows], peer[job.rows]
    torch.testing.assert_close(ours, peer, rtol=1e-3, atol=1e-3)


def compare(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Medians, and the ratios of pairs that followed one another, in what a row has."""
    return {
        "ms": round(median(ours) * 1e3, 1),
        "peer ms": round(median(peer) * 1e3, 1),
        "ratio": round(median(p / o for o, p in zip(ours, peer, strict=True)), 2),
        "ratio of the fastest": round(min(peer) / min(ours), 2),
        "goal": WHOLE_GOAL,
    }


def format_row(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    what = f"{row['job']}, {row['pass']}, beside {row['peer']}"
    if "refused" in row:
        return f"{what}: {row['refused']}"
    ratios = f"{row['ratio']:6.2f}x {row['ratio of the fastest']:6.2f}x"
    return f"{ratios} {row['ms']:8.1f} ms {row['peer ms']:8.1f} ms  {what}  goal {row['goal']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/{models,layers}-<date>.json"
    )
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread, whole models")
    parser.add_argument(
        "--only", action="append", help="whole models whose names have this text, or another one"
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    if options.cpu:
        torch.set_num_threads(1)
    whole = [job for job in list_jobs() if any(x in job.name for x in options.only or [""])]
    found = {"models": print_rows(measure_whole(job, options.runs, clock) for job in whole)}
    if not options.cpu and not options.only:
        passes = [(job, backward) for job in JOBS for backward in (False, True)]
        found["layers"] = print_rows(measure_job(*each, options.runs) for each in passes)
    for name, rows in found.items() if options.save else ():
        kind = "CPU time" if options.cpu else "time"
        print(save(name, rows, transformers=hf.__version__, clock=kind))


def print_rows(parts: Iterable[Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All rows, each printed when it is measured."""
    rows = []
    for row in chain.from_iterable(parts):
        rows.append(row)
        print(format_row(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
