"""Which lowering is faster on this CPU: figures for `MATH_IS_FASTER` in lowering/cpu/math.py.

For each dtype and pass the geometric mean, over shapes and masks that both lowerings take, of how
many times faster `math` is than `torch_sdpa`. The table holds the rows that are over 1.05.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch

import attn_graph as ag
from attn_graph.lowering.cpu.math import MATH_IS_FASTER
from attn_graph.spec import NAMES
from benchmarks.timing import save, versus

SHAPES = ((4, 12, 1024, 64), (1, 8, 2048, 128), (8, 12, 256, 64))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Run = Callable[[], object]


def make_runs(graph: ag.Graph, backend: str) -> tuple[Run, Run]:
    """The forward and the backward of one backend, on random tensors."""
    plan = ag.compile(graph, target="cpu", backends=(backend,))
    x = graph.inputs[0].spec
    q, k, v, do = (torch.randn(x.shape).to(x.dtype) for _ in range(4))
    _, saved = plan.run(q, k, v)
    return partial(plan.run, q, k, v), partial(plan.vjp.run, q, k, v, *saved, do)


def measure_ratios(dtype: torch.dtype, rounds: int) -> Iterator[tuple[str, float]]:
    """(pass, how many times faster math is), for each shape and mask."""
    for shape in SHAPES:
        for mask in (None, ag.Causal()):
            x = ag.TensorSpec(shape, dtype)
            graph = ag.attention(x, x, x, mask=mask)
            pairs = zip(make_runs(graph, "math"), make_runs(graph, "torch_sdpa"), strict=True)
            for name, (ours, theirs) in zip(("forward", "backward"), pairs, strict=True):
                yield name, versus(ours, theirs, rounds).ratio


def measure_rows(rounds: int) -> list[dict[str, Any]]:  # Any: figures and words
    """A row for each dtype and pass."""
    native, rows = ag.Target.of("cpu").native, []
    for dtype in DTYPES:
        measured = list(measure_ratios(dtype, rounds))
        for pass_ in ("forward", "backward"):
            name = NAMES[dtype]
            case = (name, pass_, name in native)
            times = geometric_mean(ratio for p, ratio in measured if p == pass_)
            row = {"dtype": name, "pass": pass_, "native": name in native}
            rows.append(row | {"math is faster": round(times, 3), "table": case in MATH_IS_FASTER})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the figures, by date and CPU")
    options = parser.parse_args()
    rows = measure_rows(options.rounds)
    for row in rows:
        winner = "math" if row["table"] else "torch_sdpa"
        native = "native" if row["native"] else "not native"
        name = f"{row['dtype']:5} {row['pass']:9} {native:11}"
        print(f"{name} math {row['math is faster']:6.2f}x faster; the table says {winner}")
    if options.save:
        print(save("choice", rows))


if __name__ == "__main__":
    main()
