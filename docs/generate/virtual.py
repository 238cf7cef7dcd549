"""Writes docs/reports/virtual.md, what virtual GPUs executed: `make virtual-report`.

About ten minutes of one core, and as many again where Triton's cache has none of the kernels.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import final

from attrs import define, field

import attn_graph as ag
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.gpu import VirtualGpu, virtual_gpu
from attn_graph.testing.rule import distance, expect_gradients, expect_outputs
from attn_graph.testing.tensors import cotangents_for
from docs.generate.fa4_tests import kept_part
from docs.generate.pages import table
from tests.support.virtual_cases import (
    CASES,
    GENERATIONS,
    SHOWN,
    inputs_for,
    machine,
    plan_on,
    shorten_note,
)
from tests.virtual.test_sequences_on_virtual_gpus import BODIES

PAGE = Path(__file__).parents[1] / "reports" / "virtual.md"
SEQUENCES = 90  # where all packed sequences, pages and tangents run, both passes
SHOWN_BODIES = [name for name in BODIES if name in SHOWN]  # those that run everywhere
TEXT = """\
# What virtual GPUs executed

Written by `make virtual-report` with triton {triton}: the compiled kernels, executed and checked on
a CPU as [the guide](../guides/run-without-a-gpu.md) says. Every number was held to the formula in
float64 by the accuracy rule of [the semantics](../semantics.md), every access to memory, wait and
barrier to the PTX ISA. {programs:,} programs in {seconds:,.0f} seconds of one core, of which
comparing takes a part: {rates}.

NVIDIA's assembler and the GPUs themselves are not in it, nor is any time.

## By feature

How far the worst number of both passes is from the formula, as a share of what the rule allows.
The largest error is mostly that of rounding a result to its dtype, which is one and the same
wherever the result is right.

{features}

## By kernel

How many programs, in so many features. Features with packed sequences, pages and tangents ran on
sm_{sequences}, and on the others those that show a kernel which nothing else executes ({shown}):
{bodies}.

{kernels}

## What the kernels leave out

The PTX ISA asks for more than Triton {triton} writes. The virtual GPU notes these, by kernel:

{notes}

[The guide](../guides/run-without-a-gpu.md#errors-it-reports) says of each why GPUs bear it.

## Kernels of other libraries

With Triton 3.7.1, for sm_90. *Known*: kernels of the library's sources, compiled with guessed
arguments, of which every instruction is one that the virtual GPU has (`make peers-survey`). Of
Liger's 82 kernels 11 did not compile; of flash-linear-attention's 346, those for Ascend left out,
61 did not, or took over 40 seconds. *Executed*: functions, both passes, against PyTorch, all of
them right (`make peers-virtual`; for the tutorials `make tutorials-virtual`, on sm_80, sm_90 and
sm_100).

| library | known | executed |
| --- | --- | --- |
| Liger Kernel 0.8.5 | 71 of 71 kernels | 24 functions |
| flash-linear-attention 0.6.0 | 285 of 285 kernels | 22 functions |
| Triton's tutorials | all | 21 kernels of 11 |

## How long

CPU seconds of one launch of our forward, 800 queries and 200 keys of two heads (26 programs; 14 on
sm_100), on one busy machine side by side with the first version of the virtual GPU, which made
fewer checks. With processes: of the longest one, and of the process that starts them.

| | sm_80 | sm_90 | sm_100 |
| --- | --- | --- | --- |
| the first version | 0.98 | 0.70 | 0.85 |
| one process | 0.76 | 0.67 | 0.66 |
| 4 processes | 0.29 | 0.28 | 0.32 |
| 8 processes | 0.24 | 0.24 | 0.25 |

One process takes 0.78 to 0.96 of the first version's time. It goes to many calls of NumPy, no line
of ours over 6 %, on arrays of one program's threads, 128 to 384; several programs in one array
would need another model of shared memory and of clocks. Where there are as many cores, 4 processes
take 0.38 to 0.48 of one's time, and 8 take 0.32 to 0.38.

## FlashAttention 4's own tests

{tests}"""


@final
@define
class Tally:
    """What was executed. shares: the worst of a feature, by compute capability.

    kernels: programs by kernel and compute capability. features: how many ran it. seconds: by
    compute capability.
    """

    shares: dict[tuple[str, int], float] = field(factory=dict)
    kernels: Counter[tuple[str, int]] = field(factory=Counter)
    features: Counter[tuple[str, int]] = field(factory=Counter)
    seconds: dict[int, float] = field(factory=dict)
    notes: set[tuple[str, str]] = field(factory=set)

    def add(self, sm: int, device: VirtualGpu, seconds: float) -> None:
        """Count what a device executed."""
        for name, programs in device.kernels.items():
            self.kernels[name, sm] += programs
            self.features[name, sm] += 1
        self.seconds[sm] = self.seconds.get(sm, 0.0) + seconds
        self.notes |= {(shorten_note(note), f"sm_{sm}") for note in device.notes}


def measure() -> Tally:
    """Execute all."""
    tally = Tally()
    for sm in GENERATIONS:
        for name, make in CASES.items():
            with virtual_gpu(machine(sm)) as device:
                start = process_time()
                tally.shares[name, sm] = worst_share(device, make())
                tally.add(sm, device, process_time() - start)
            print(sm, name, tally.shares[name, sm], flush=True)
    for sm in GENERATIONS:
        for name in BODIES if sm == SEQUENCES else SHOWN_BODIES:
            run, case = BODIES[name]
            with virtual_gpu(machine(sm)) as device:
                start = process_time()
                run(device, case)
                tally.add(sm, device, process_time() - start)
            print(sm, name, flush=True)
    return tally


def worst_share(device: VirtualGpu, graph: ag.Graph) -> float:
    """Execute both passes: the worst error over what the rule allows."""
    plan = plan_on(device, graph, "triton")
    assert not isinstance(plan, str), plan
    tensors = inputs_for(graph, "triton")
    outputs = check_outputs(plan, graph, tensors)
    pairs = [*zip(outputs, expect_outputs(graph, tensors), strict=True)]
    if graph.has_gradient:
        grads = check_gradients(plan, graph, tensors, 0)
        dues = expect_gradients(graph, tensors, cotangents_for(plan.graph, 0))
        pairs += [(grads[name], due) for name, due in dues.items()]
    return max(distance(x, due.ref) / due.allowance(x.dtype) for x, due in pairs)


def feature_table(tally: Tally) -> str:
    """A line for each feature."""
    head = ("feature", *(f"sm_{sm}" for sm in GENERATIONS))
    rows = [(name, *(f"{tally.shares[name, sm]:.2f}" for sm in GENERATIONS)) for name in CASES]
    return table(head, [tuple(row) for row in rows])


def kernel_table(tally: Tally) -> str:
    """A line for each kernel."""
    machines = sorted(tally.seconds)
    rows: list[tuple[object, ...]] = [
        (
            f"`{name}`",
            *(
                f"{tally.kernels[name, sm]:,} in {tally.features[name, sm]}"
                if tally.kernels[name, sm]
                else "-"
                for sm in machines
            ),
        )
        for name in sorted({name for name, _ in tally.kernels})
    ]
    return table(("kernel", *(f"sm_{sm}" for sm in machines)), rows)


def note_list(tally: Tally) -> str:
    """A line for each note, with where it is true."""
    texts = sorted({text for text, _ in tally.notes})
    return "\n".join(
        f"- {text} ({', '.join(sorted((w for t, w in tally.notes if t == text), key=len))})"
        for text in texts
    )


def main() -> None:
    tally = measure()
    rates = (
        f"sm_{sm} {sum(n for (_, at), n in tally.kernels.items() if at == sm) / seconds:.0f}"
        for sm, seconds in sorted(tally.seconds.items())
    )
    text = TEXT.format(
        triton=version("triton"),
        programs=tally.kernels.total(),
        seconds=sum(tally.seconds.values()),
        rates=f"{', '.join(rates)} programs a second",
        features=feature_table(tally),
        kernels=kernel_table(tally),
        sequences=SEQUENCES,
        shown="; ".join(SHOWN_BODIES),
        bodies="; ".join(BODIES),
        notes=note_list(tally),
        tests=kept_part(PAGE.read_text("utf-8")),
    )
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
