"""Throughput in vLLM, by its own CPU kernel and by ours, in the venv of `make vllm`.

Two engines of one process take turns. CPU seconds of one thread are compared, so that other
programs may run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from attn_graph.integrations.vllm.backend import LayerAttention, StepBuilder
from attn_graph.integrations.vllm.layers import ServedLayer
from benchmarks.timing import save
from tests.support.vllm_models import Case, engine, generate

ROUNDS = 5
ONE_CACHE = {"enable_prefix_caching": False, "max_model_len": 1024}
LENGTHS = (60, 200, 130, 300)
JOBS = {
    "width 1,024, 8 layers, bf16, 8 requests": Case(
        "wide", 8, LENGTHS, tokens=40, dtype="bfloat16", engine={**ONE_CACHE, "block_size": 128}
    ),
    "width 128, 2 layers, f32, 8 requests": Case("llama", 8, LENGTHS, tokens=40, engine=ONE_CACHE),
}
TIMED = (  # whose method it is, the method, and what it is a part of
    (CPUAttentionBackendImpl, "forward", "vllm layer"),
    (CPUAttentionMetadataBuilder, "build", "vllm step"),
    (LayerAttention, "forward", "our layer"),
    (StepBuilder, "build", "our step"),
    (ServedLayer, "prepare", "our preparing"),  # within the first layer of a step
)


class Clock:
    """CPU seconds within the attention of layers, by whose it is."""

    def __init__(self) -> None:
        self.spent = defaultdict[str, list[float]](list)

    def wrap(self, kind: Any, name: str, who: str) -> Callable[[], None]:
        """Time a method of a class. Returns what undoes it."""
        run = getattr(kind, name)

        def timed(*args: Any, **named: Any) -> Any:
            start = time.process_time()
            made = run(*args, **named)
            self.spent[who].append(time.process_time() - start)
            return made

        setattr(kind, name, timed)
        return lambda: setattr(kind, name, run)

    def means(self) -> dict[str, float]:
        """Microseconds of a layer and of a step, all layers' preparing being of the step."""
        total = {part: 1e6 * sum(times) for part, times in self.spent.items()}
        prepared = total["our preparing"]
        return {
            "vllm layer": 1e6 * mean(self.spent["vllm layer"]),
            "vllm step": 1e6 * mean(self.spent["vllm step"]),
            "our layer": (total["our layer"] - prepared) / len(self.spent["our layer"]),
            "our step": (total["our step"] + prepared) / len(self.spent["our step"]),
        }


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Runs in turn; one more round times the attention of layers, where it counts."""
    with ExitStack() as stack:
        engines = {
            who: stack.enter_context(engine(folder, case, who == "ours"))
            for who in ("vllm", "ours")
        }
        made = {who: generate(llm, case) for who, llm in engines.items()}  # warms up
        pairs = zip(*made.values(), strict=True)
        equal = sum(x[0][0] == y[0][0] for x, y in pairs)
        spent: dict[str, list[float]] = {who: [] for who in engines}
        for _ in range(ROUNDS):
            for who, llm in engines.items():
                start = time.process_time()
                generate(llm, case)
                spent[who].append(time.process_time() - start)
        clock = Clock()
        undo = [clock.wrap(*timed) for timed in TIMED]
        for llm in engines.values():
            generate(llm, case)
        for each in undo:
            each()
    return {
        "requests": case.requests,
        "equal answers": equal,
        "seconds": spent,
        "throughput": [a / b for a, b in zip(spent["vllm"], spent["ours"], strict=True)],
        "microseconds": clock.means(),
    }


def main() -> None:
    """Measure all, print and save."""
    torch.set_num_threads(1)
    rows = list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        for name, case in JOBS.items():
            rows.append({"job": name, **measure(case, Path(folder))})
            each = rows[-1]
            parts = {part: round(x) for part, x in each["microseconds"].items()}
            print(
                f"{name}: throughput {median(each['throughput']):.2f} of vLLM's "
                f"({min(each['throughput']):.2f} to {max(each['throughput']):.2f}), "
                f"{each['equal answers']} of {each['requests']} answers equal; "
                f"microseconds {parts}",
                flush=True,
            )
    print(save("vllm", rows))


if __name__ == "__main__":
    main()
