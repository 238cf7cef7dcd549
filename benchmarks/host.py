"""Host time: what a call costs beside the computation, on tensors too small to compute with."""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

import attn_graph as ag
from attn_graph.ir.graph import Input
from attn_graph.ir.passes import simplify
from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.codegen.tile_lists import list_ahead
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.offline import describe_target, driver_library
from attn_graph.lowering.cudnn.plan import CudnnPlan
from attn_graph.lowering.cudnn.run import Run
from attn_graph.lowering.problem import sole
from attn_graph.lowering.request import Request
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from benchmarks.timing import Job, microseconds, microseconds_in_turn, save, seconds

CPU, I32 = torch.device("cpu"), torch.int32
WINDOW_OR_PREFIX = ag.Window(255) | ag.Prefix(100)
SDPA = "F.scaled_dot_product_attention"


def measure_rows() -> list[dict[str, Any]]:
    """Microseconds of each call, with its goal."""
    graph = causal(1)
    return [
        *call_rows(),
        *compiled_rows(),
        make_row("compile(graph), cached", microseconds(lambda: ag.compile(graph)), 2),
        make_row("import attn_graph, beyond torch (ms)", import_milliseconds(), 150),
        *(
            make_row(
                f"compile(graph), new M and N, {who} on {target}", measure_new(who, target), 250
            )
            for who, target in (("math", "cpu"), ("torch_sdpa", "cpu"), ("triton", "h200"))
        ),
        make_row(
            "compile(graph), a new length, a window, math on cpu",
            measure_masked(ag.Causal() & ag.Window(255), range(256, 4096)),
            500,
        ),
        make_row(
            "compile(graph), a new length, a window or a prefix of 64k, math on cpu",
            measure_masked(WINDOW_OR_PREFIX, range(2**16 - 2**12, 2**16)),
            10_000,
        ),
        make_row("a Hugging Face layer of a new length, planned", measure_layer(), 300),
        *sized_rows(),
        *cudnn_rows(),
        make_row("tile lists of a mask, 64k x 64k (ms)", list_milliseconds(), 50),
    ]


def make_forms(
    place: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> dict[str, Callable[..., Any]]:
    """What calls attention: PyTorch's function, plans, and ours of tensors."""
    spec, target = ag.TensorSpec((1, 1, 1, 64), dtype), ag.Target.here(place)
    lengths = torch.ones(1, dtype=torch.int32, device=place)
    return {
        SDPA: F.scaled_dot_product_attention,
        "plan(q, k, v)": ag.compile(ag.attention(spec, spec, spec), target=target),
        "plan(q, k, v) with lse": ag.compile(
            ag.attention(spec, spec, spec, stats=True), target=target
        ),
        "attention(q, k, v)": attention,
        "attention(q, k, v, mask=, kv_lengths=)": partial(
            attention, mask=ag.Causal(), kv_lengths=lengths
        ),
        "our scaled_dot_product_attention": scaled_dot_product_attention,
    }


def call_rows(
    place: torch.device = CPU, dtype: torch.dtype = torch.float32, rounds: int = 200
) -> list[dict[str, Any]]:
    """Eager calls beside PyTorch's own: without gradient, recorded by autograd, and both passes."""
    tensors = [torch.randn(1, 1, 1, 64, device=place).to(dtype) for _ in "qkv"]
    leaves: list[Any] = [t.clone().requires_grad_() for t in tensors]
    do = torch.ones(1, 1, 1, 64, dtype=dtype, device=place)

    def train(attend: Callable[..., Any]) -> object:
        o = attend(*leaves)
        return torch.autograd.grad(o[0] if isinstance(o, tuple) else o, leaves, do)

    forms = make_forms(place, dtype)
    return [
        *rows_beside("", {n: partial(f, *tensors) for n, f in forms.items()}, 4, rounds),
        *rows_beside(
            ", requires_grad", {n: partial(f, *leaves) for n, f in forms.items()}, 15, rounds
        ),
        *rows_beside(
            ", forward and backward", {n: partial(train, f) for n, f in forms.items()}, 10, rounds
        ),
    ]


def rows_beside(
    ending: str, jobs: dict[str, Job], more: float, rounds: int = 200
) -> list[dict[str, Any]]:
    """A row for each job, measured in turn; the goal is so much more than PyTorch's own takes."""
    times = microseconds_in_turn(jobs, rounds=rounds)
    return [
        make_row(n + ending, time, None if n == SDPA else times[SDPA] + more)
        for n, time in times.items()
    ]


def compiled_rows() -> list[dict[str, Any]]:
    """Calls of code that torch.compile made, without gradient."""
    tensors = [torch.randn(1, 1, 1, 64) for _ in "qkv"]
    names = (SDPA, "plan(q, k, v)", "attention(q, k, v)", "our scaled_dot_product_attention")
    forms = make_forms()
    jobs: dict[str, Job] = {n: partial(compile_call(forms[n]), *tensors) for n in names}
    return rows_beside(", compiled", jobs, 10)


def compile_call(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls one, compiled by Inductor."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        return attend(q, k, v)

    return torch.compile(call, fullgraph=True)


def measure_new_length(backend: str, store: ag.extend.Store, count: int) -> float:
    """Microseconds to plan a causal graph of another length for an H200; the median."""
    plan = partial(ag.compile, target="h200", backends=(backend,), store=store)
    jobs = (partial(plan, causal(8 * n + 1)) for n in range(1, count))
    return statistics.median(map(seconds, jobs)) * 1e6


def measure_new(backend: str, target: str, count: int = 300) -> float:
    """Microseconds to plan a causal graph of lengths that were not there before; the median."""
    ag.clear_cache()
    plan = partial(ag.compile, target=target, backends=(backend,), store=False)
    dtype = torch.float32 if target == "cpu" else torch.bfloat16
    length = partial(random.Random(0).randrange, 1, 4096)
    return median_microseconds(
        partial(plan, causal(length(), length(), dtype)) for _ in range(count)
    )


def measure_masked(mask: ag.Mask, lengths: range, count: int = 100) -> float:
    """Microseconds to plan a graph under a mask for a length that was not there before; the
    median."""
    ag.clear_cache()
    plan = partial(ag.compile, target="cpu", backends=("math",), store=False)

    def graph(length: int) -> ag.Graph:
        x = ag.TensorSpec((1, 8, length, 64), torch.float32)
        return ag.attention(x, x, x, mask=mask.aligned("top_left"))

    sample = random.Random(0).sample(lengths, count)
    return median_microseconds(partial(plan, graph(length)) for length in sample)


def measure_layer(count: int = 300) -> float:
    """Microseconds to plan a layer of a Hugging Face model for a length that was not there before,
    without what the plan computes; the median."""
    from attn_graph.integrations.layer_masks import decode_mask
    from attn_graph.integrations.transformers import attend_layer

    layer, lengths = torch.nn.Module(), random.Random(0).sample(range(1, 4096), count)

    def call(M: int) -> Job:
        q, k = (torch.empty(1, M, heads, 64).transpose(1, 2) for heads in (8, 2))
        return partial(attend_layer, layer, q, k, k, decode_mask(1, M, M), scaling=0.125)

    ag.clear_cache()
    with patch.object(ag.Plan, "__call__", lambda plan, **tensors: tensors["q"]):
        return median_microseconds(map(call, lengths))


def sized_rows() -> list[dict[str, Any]]:
    """What a new size costs a plan whose sizes have names, beyond a call of the plan of that size;
    and what growing lengths without names cost to plan."""
    B, M, N, T = (ag.Dim(n, most=m) for n, m in (("B", 8), ("M", 512), ("N", 4096), ("T", 512)))
    x, rows = (spec(*s) for s in ((B, 1, M, 16), (T, 2, 16)))
    graphs = {
        "decode": decode(B, N),
        "causal": ag.attention(x, x, x, mask=ag.Causal()),
        "causal, forward and backward": ag.attention(x, x, x, mask=ag.Causal()),
        "packed": ag.attention(
            rows, rows, rows, q_starts=spec(B + 1, dtype=I32), max_lengths=(8, 8)
        ),
    }
    growing = (causal(1, n, torch.float32) for n in range(1, 2001))
    return [
        *(size_row(n, g, 15 * (1 + (" and " in n))) for n, g in graphs.items()),
        *math_rows(B, M, N),
        make_row(
            "compile(graph), N growing to 2000, without Dims",
            median_microseconds(partial(ag.compile, graph, store=False) for graph in growing),
            250,
        ),
    ]


def math_rows(B: int, M: int, N: int) -> list[dict[str, Any]]:
    """The same of `math`, which plans a size when a call first has it. What decodes has a goal."""
    x, lengths, half = spec(B, 1, M, 16), spec(B, dtype=I32), torch.bfloat16
    pool, table = spec(600, 16, 2, 64), spec(B, ag.Dim("C", most=600), dtype=I32)
    window = ag.Window(5, align="bottom_right")
    decoding = {
        "decode": decode(B, N),
        "decode in bf16": decode(B, N, half),
        "decode, a window": decode(B, N, mask=window),
        "decode, a cap": decode(B, N, soft_cap=20.0),
        "decode, lengths": decode(B, N, kv_lengths=lengths),
        "decode in bf16, lengths": decode(B, N, half, kv_lengths=lengths),
        "decode from pages": ag.attention(
            spec(B, 8, 1, 64), pool, pool, pages=table, kv_lengths=lengths
        ),
    }
    others = {
        "a window": ag.attention(x, x, x, mask=ag.Window(7)),
        "a window, forward and backward": ag.attention(x, x, x, mask=ag.Window(7)),
        "a window and a cap": ag.attention(x, x, x, mask=ag.Window(7), soft_cap=20.0),
    }
    return [
        *(size_row(f"math: {n}", g, 15, ("math",)) for n, g in decoding.items()),
        *(size_row(f"math: {n}", g, None, ("math",)) for n, g in others.items()),
    ]


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ag.TensorSpec:
    """A tensor without gaps."""
    return ag.TensorSpec(shape, dtype)


def decode(B: int, N: int, dtype: torch.dtype = torch.float32, **options: Any) -> ag.Graph:
    """A query of eight heads on two key/value heads of a cache."""
    kv = spec(B, 2, N, 64, dtype=dtype)
    options = options or {"mask": ag.Causal("bottom_right")}
    return ag.attention(spec(B, 8, 1, 64, dtype=dtype), kv, kv, **options)


def size_row(
    name: str, graph: ag.Graph, goal: float | None, backends: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """The row of one graph."""
    figure = measure_size(graph, "backward" in name, backends)
    return make_row(f"{name}: a new size with Dims", figure, goal)


def measure_size(
    graph: ag.Graph, trains: bool, backends: tuple[str, ...] | None, count: int = 100
) -> float:
    """Microseconds that calls take whose sizes were never there, beyond those of the plans of these
    sizes; the median. trains: both passes."""
    plan = ag.compile(graph, store=False, backends=backends)
    (varied,) = (s.name for s in graph.symbols if s.name != "B")
    room = {dtype: torch.zeros(2**22, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}

    def make_job(call: Callable[..., Any], size: int) -> Job:
        sizes = {"B": 8, varied: size}
        tensors = [fill_input(i, i.spec.bind(sizes), size, room, trains) for i in graph.inputs]
        if not trains:
            return partial(call, *tensors)
        do = torch.zeros_like(tensors[0])
        return lambda: torch.autograd.grad(call(*tensors), tensors, do)

    sizes = range(9, 9 + count)
    exact = [make_job(plan.at(B=8, **{varied: size}), size) for size in sizes]
    for job in exact:
        job()
    times = [cpu_seconds(job) for job in exact]
    new = [cpu_seconds(job) for job in [make_job(plan, size) for size in sizes]]
    return statistics.median(n - t for n, t in zip(new, times, strict=True)) * 1e6


def fill_input(
    given: Input, x: ag.TensorSpec, size: int, room: dict[torch.dtype, torch.Tensor], trains: bool
) -> torch.Tensor:
    """An input: a view of the room, or starts of sequences of one row, lengths or pages."""
    if given.name == "q_starts":
        return torch.arange(x.shape[0], dtype=x.dtype)
    if x.dtype == I32:
        return torch.full(x.shape, size if given.name == "kv_lengths" else 0, dtype=x.dtype)
    return room[x.dtype].as_strided(x.shape, x.strides).detach().requires_grad_(trains)


def median_microseconds(jobs: Iterable[Job]) -> float:
    """The median time of the CPU, whatever else it does, on jobs that are each done once."""
    return statistics.median(cpu_seconds(job) for job in jobs) * 1e6


def cpu_seconds(job: Job) -> float:
    """How long this thread computes in one call."""
    start = time.thread_time()
    job()
    return time.thread_time() - start


def causal(M: int, N: int | None = None, dtype: torch.dtype = torch.bfloat16) -> ag.Graph:
    """A causal attention, by default of as many keys as queries."""
    q, k = (ag.TensorSpec((2, 8, n, 64), dtype) for n in (M, M if N is None else N))
    return ag.attention(q, k, k, mask=ag.Causal("top_left"))


def cudnn_rows() -> list[dict[str, Any]]:
    """cuDNN's plans for an H200, and a call without its execution."""
    with TemporaryDirectory() as folder:
        store = ag.extend.Store(folder)
        built = measure_new_length("cudnn", store, 10) / 1e3
        ag.clear_cache()
        stored = measure_new_length("cudnn", store, 10) / 1e3
        loads = measure_loads(store)
    return [
        make_row("compile(graph), a new length, cudnn on an H200, built (ms)", built),
        make_row("compile(graph), the same from the store (ms)", stored, built / 30),
        make_row("cuDNN loads that plan, the first of a process (ms)", loads[0], built / 30),
        make_row("cuDNN loads that plan, each more (ms)", statistics.median(loads[1:]), built / 30),
        make_row("a call of cuDNN's, up to where cuDNN takes over", microseconds(short_call()), 15),
    ]


def short_call() -> Callable[[], object]:
    """What a plan of cuDNN's does in a call, without the execution."""
    graph = simplify(causal(1))
    case, call = describe_problem(Request(graph, ag.Target.of("h200"), ag.extend.Options()))
    run = Run.of(case, call, graph, ag.Workspace(), 256, lambda *arguments: None)
    tensors = [torch.empty(i.spec.shape, dtype=i.spec.dtype) for i in graph.inputs]
    return lambda: run(*tensors)


LOAD = """
import sys, time
from pathlib import Path
lowering, driver, folder = sys.argv[1:]
sys.path[:0] = [lowering]
import builder
if driver != "-":
    builder.load_stand_in(driver)
import cudnn
device = cudnn.create_device_properties(Path(folder, "device").read_text())
for path in sorted(Path(folder).glob("*.data")):
    data, start = [*path.read_bytes()], time.perf_counter()
    cudnn.pygraph(device_property=device).deserialize(data)
    print(1e3 * (time.perf_counter() - start))
"""


def measure_loads(store: ag.extend.Store) -> list[float]:
    """Milliseconds that cuDNN takes to load each stored plan, in a process of its own."""
    with TemporaryDirectory() as folder:
        for n, entry in enumerate(store.entries()):
            data = store.get(entry.key or "")
            assert data is not None
            Path(folder, f"{n}.data").write_bytes(CudnnPlan.load(data).data)
        Path(folder, "device").write_text(describe_target(ag.Target.of("h200")))
        lowering = str(Path(cudnn_builder.__file__).parent)
        program = (sys.executable, "-P", "-c", LOAD, lowering, driver_library(folder), folder)
        output = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    return [*map(float, output.split())]


def list_milliseconds() -> float:
    """Milliseconds to list the tiles of a mask that is not a strip: by queries or keys, the
    longer."""
    spec = ag.TensorSpec((1, 1, 65536, 128), torch.bfloat16)
    mask = ag.Causal() & (ag.Window(256) | ag.Prefix(64))
    problem = sole(simplify(ag.attention(spec, spec, spec, mask=mask)))
    assert problem is not None
    tile = Tiling(128, 64, 8, 3)
    list_ahead(problem, tile, by_keys=False)
    return 1e3 * max(
        seconds(lambda by=by: list_ahead(problem, tile, by))  # type: ignore[misc]  # bound now
        for by in (False, True)
    )


def make_row(name: str, figure: float, goal: float | None = None) -> dict[str, Any]:
    """A figure, in microseconds if the name says no other unit, and its goal."""
    return {"job": name, "us": round(figure, 2), "goal": goal and round(goal, 2)}


def import_milliseconds(runs: int = 5) -> float:
    """The least time that `import attn_graph` takes where torch is imported already."""
    code = "import torch, time; a = time.perf_counter(); import attn_graph"
    code += "; print(time.perf_counter() - a)"
    runs_of_python = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(runs)
    ]
    return min(float(x.stdout) for x in runs_of_python) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/host-<date>.json"
    )
    options, rows = parser.parse_args(), measure_rows()
    for row in rows:
        print(f"{row['us']:9.2f}  {row['job']}" + (f"  goal {row['goal']}" if row["goal"] else ""))
    if options.save:
        print(save("host", rows))


if __name__ == "__main__":
    main()
