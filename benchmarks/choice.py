"""Which lowering is the faster on this CPU: the figures behind planner.MATH_IS_FASTER.

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
from attn_graph.planner.choose import MATH_IS_FASTER
from attn_graph.spec import NAMES
from benchmarks.timing import save, versus

SHAPES = ((4, 12, 1024, 64), (1, 8, 2048, 128), (8, 12, 256, 64))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Run = Callable[[], object]


def runs(graph: ag.Graph, backend: str) -> tuple[Run, Run]:
    """The forward and the backward of one backend, on random tensors."""
    plan = ag.compile(graph, target="cpu", backends=(backend,))
    x = graph.inputs[0].spec
    q, k, v, do = (torch.randn(x.shape).to(x.dtype) for _ in range(4))
    _, saved = plan.run(q, k, v)
    return partial(plan.run, q, k, v), partial(plan.vjp.run, q, k, v, *saved, do)


def ratios(dtype: torch.dtype, rounds: int) -> Iterator[tuple[str, float]]:
    """(pass, how many times faster math is), for each shape and mask."""
    for shape in SHAPES:
        for mask in (None, ag.Causal()):
            x = ag.TensorSpec(shape, dtype)
            graph = ag.attention(x, x, x, mask=mask)
            pairs = zip(runs(graph, "math"), runs(graph, "torch_sdpa"), strict=True)
            for name, (ours, theirs) in zip(("forward", "backward"), pairs, strict=True):
                yield name, versus(ours, theirs, rounds).ratio


def rows(rounds: int) -> list[dict[str, Any]]:  # Any: figures and words
    native, found = ag.Target.of("cpu").native, []
    for dtype in DTYPES:
        measured = list(ratios(dtype, rounds))
        for pass_ in ("forward", "backward"):
            name = NAMES[dtype]
            case = (name, pass_, name in native)
            times = geometric_mean(ratio for p, ratio in measured if p == pass_)
            told = {"dtype": name, "pass": pass_, "native": name in native}
            found.append(
                told | {"math is faster": round(times, 3), "table": case in MATH_IS_FASTER}
            )
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--save", action="store_true", help="keep the figures, by date and CPU")
    given = options.parse_args()
    found = rows(given.rounds)
    for row in found:
        chosen = "math" if row["table"] else "torch_sdpa"
        native = "native" if row["native"] else "not native"
        told = f"{row['dtype']:5} {row['pass']:9} {native:11}"
        print(f"{told} math {row['math is faster']:6.2f}x faster; the table says {chosen}")
    if given.save:
        print(save("choice", found))


if __name__ == "__main__":
    main()
