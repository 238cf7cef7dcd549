"""attn_graph on a CUDA GPU, in TFLOP/s, beside PyTorch's fused kernels and FlexAttention.

Every figure of one shape is measured in one run, interleaved, by CUDA events. FLOPs are those of
the places that the mask keeps: 2 (D + E) a place forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_graph as ag
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.builder import build_graph
from attn_graph.lowering.cudnn.run import Run, handle
from benchmarks.timing import save

Sizes = tuple[int, int, int, int]
WINDOW = 1024
# TFLOP/s of the kernel in Triton's tutorial by S: forward, full, D = 128, float16, on an H100.
# Published in pytorch/benchmark#2391.
TUTORIAL = {2048: 434, 16384: 477}
# Goals in TFLOP/s on an H200, bfloat16, D = 128, S from 4096 on.
GOALS = {("full", "forward"): 480, ("causal", "forward"): 430, ("full", "backward"): 320}


@frozen
class Job:
    """One kernel, forward or backward, on one shape."""

    name: str
    run: Callable[[], object]


def qkv(sizes: Sizes, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random q, k and v on the GPU that require gradients."""
    torch.manual_seed(0)
    return [torch.randn(sizes, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


def count_places(S: int, kind: str) -> int:
    """The number of places that the mask keeps in one head."""
    if kind == "full":
        return S * S
    return sum(min(i + 1, WINDOW if kind == "window" else S) for i in range(S))


def ways_to_attend(
    kind: str, tensors: list[torch.Tensor]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each way to compute it: a function of q, k, v."""
    S, specs = tensors[0].shape[2], [ag.TensorSpec.like(t) for t in tensors]
    masks = {"full": None, "causal": ag.Causal(), "window": ag.Causal() & ag.Window(WINDOW - 1)}
    graph = ag.attention(*specs, mask=masks[kind])
    for backend in ("triton", "cudnn"):
        yield f"attn_graph {backend}", ag.compile(graph, backends=(backend,))
    if kind != "window":
        for other in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            yield f"SDPA {other.name.lower()}", peer(other, kind == "causal")
    keep = {
        "causal": lambda b, h, i, j: j <= i,
        "window": lambda b, h, i, j: (j <= i) & (j > i - WINDOW),
    }.get(kind)
    blocks = create_block_mask(keep, None, None, S, S, device="cuda") if keep else None
    flex: Any = torch.compile(flex_attention, dynamic=False)
    yield "FlexAttention", lambda q, k, v: flex(q, k, v, block_mask=blocks)


def peer(backend: SDPBackend, causal: bool) -> Callable[..., torch.Tensor]:
    """PyTorch's function, by one of its kernels."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def frontend_call(graph: ag.Graph, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A call of cuDNN's frontend alone, with everything that it needs made beforehand."""
    import cudnn

    problem, _, call = describe_problem(graph, ag.Target.here(), ag.Options())
    device = tensors[0].device
    its = handle(device)
    plan = build_graph(call.plain, handle=its)
    run = Run.of(
        call, problem, graph, ag.Workspace(), 0, lambda *arguments: packs.append(arguments[0])
    )
    packs: list[Any] = []
    (run.forward if problem.grad is None else run.backward)(*tensors)
    workspace = torch.empty(plan.get_workspace_size(), dtype=torch.uint8, device=device)

    def execute() -> None:
        cudnn.set_stream(handle=its, stream=torch.cuda.current_stream().cuda_stream)
        plan.execute(packs[0], workspace, handle=its)

    return execute


def beside_raw(sizes: Sizes, causal: bool, runs: int) -> Iterator[dict[str, Any]]:
    """Plans of cuDNN's and cuDNN itself, in one run: device time, and host time of a call."""
    tensors = [t.detach() for t in qkv(sizes, torch.bfloat16)]
    specs = [ag.TensorSpec.like(t) for t in tensors]
    plan = ag.compile(
        ag.attention(*specs, mask=ag.Causal() if causal else None), backends=("cudnn",)
    )
    o, lse = plan.run(*tensors)[1]
    for name, one, operands in (
        ("forward", plan, tensors),
        ("backward", plan.vjp, [*tensors, o, lse, torch.randn_like(o)]),
    ):
        ours, its = (lambda p=one, g=operands: p(*g)), frontend_call(one.graph, operands)
        times = milliseconds([Job("ours", ours), Job("raw", its)], runs)
        yield {
            "job": f"bf16 {'causal' if causal else 'full'} {sizes}",
            "pass": name,
            "by": "attn_graph cudnn, beside cudnn.pygraph itself",
            "ms": round(times["ours"], 4),
            "of its speed": round(times["raw"] / times["ours"], 3),
            "goal": 0.97,
            "host us": round(host_microseconds(ours), 1),
            "host us, raw": round(host_microseconds(its), 1),
            "host goal": 15,
        }


def host_microseconds(call: Callable[[], object], count: int = 200) -> float:
    """How long a call keeps the host, while the device lags behind."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / count * 1e6


def milliseconds(jobs: list[Job], runs: int) -> dict[str, float]:
    """The median time of each job on the device; the jobs take turns."""
    for job in jobs:
        for _ in range(3):
            job.run()
    times: dict[str, list[float]] = {job.name: [] for job in jobs}
    for _ in range(runs):
        for job in jobs:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            job.run()
            stop.record()
            torch.cuda.synchronize()
            times[job.name].append(start.elapsed_time(stop))
    return {name: statistics.median(each) for name, each in times.items()}


def measure_shape(
    sizes: Sizes, dtype: torch.dtype, kind: str, runs: int
) -> Iterator[dict[str, Any]]:
    """Rows of one shape: every way forward, then every way backward."""
    B, H, S, D = sizes
    tensors = qkv(sizes, dtype)
    do = torch.randn(sizes, device="cuda").to(dtype)
    ways = [*ways_to_attend(kind, tensors)]
    plain = [t.detach() for t in tensors]
    forward = [Job(name, lambda f=f: f(*plain)) for name, f in ways]  # type: ignore[misc]  # bound now
    outputs = [(name, f(*tensors)) for name, f in ways]
    backward = [
        Job(name, lambda o=o: torch.autograd.grad(o, tensors, do, retain_graph=True))  # type: ignore[misc]  # bound now
        for name, o in outputs
    ]
    flops = 4 * B * H * D * count_places(S, kind)
    for pass_, jobs, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
        for name, ms in milliseconds(jobs, runs).items():
            yield {
                "job": f"{str(dtype)[6:]} {kind} {sizes}",
                "pass": pass_,
                "by": name,
                "ms": round(ms, 4),
                "tflops": round(work / ms / 1e9, 1),
                "goal": GOALS.get((kind, pass_)) if D == 128 and S >= 4096 else None,
                "tutorial": TUTORIAL.get(S)
                if (kind, pass_, D) == ("full", "forward", 128)
                else None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    rows = []
    for sizes in ((1, 1, 64, 64), (2, 16, 4096, 128), (1, 16, 16384, 128)):
        for causal in (False, True):
            for row in beside_raw(sizes, causal, options.runs):
                print(*row.values(), flush=True)
                rows.append(row)
    for S in (2048, 4096, 8192, 16384):
        for D in (64, 128):
            for kind in ("full", "causal", "window"):
                sizes = (max(1, 16384 // S), 2048 // D, S, D)
                for row in measure_shape(sizes, torch.bfloat16, kind, options.runs):
                    print(*row.values(), flush=True)
                    rows.append(row)
    if options.save:
        print(save(torch.cuda.get_device_name().lower().replace(" ", "-"), rows))


if __name__ == "__main__":
    main()
