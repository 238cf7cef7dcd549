"""Tables of device time: ours beside every other kernel for the same job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

import attn_graph as ag
from attn_graph.kernels.tilings import VARIANTS
from attn_graph.lowering.backend import RefusedError
from benchmarks.gpu import cases
from benchmarks.gpu.cases import Case, Pass
from benchmarks.gpu.child import Emit
from benchmarks.gpu.device import REFUSALS, Attend, Call, Device, Tensors
from benchmarks.gpu.prediction import count_work, predict_milliseconds
from benchmarks.gpu.results import Row

RUNS = 20
OURS = ("triton", "fa4", "cudnn")
Way = Callable[[], Attend]  # makes what computes a case


def list_ways(
    device: Device, case: Case, graph: ag.Graph, *, flex: bool
) -> Iterator[tuple[str, Way]]:
    """Each way to compute a case, ours first."""
    for backend in OURS:
        yield f"attn_graph {backend}", partial(device.compile, graph, backend)
    if case.window is None and case.soft_cap is None:
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            yield f"SDPA {kernel.name.lower()}", partial(make_sdpa, device, case, kernel)
    if flex:
        yield "FlexAttention", partial(make_flex, device, case)


def make_sdpa(device: Device, case: Case, kernel: SDPBackend) -> Attend:
    """PyTorch's function, by one of its kernels."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with device.sdpa(kernel):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.is_grouped
            )

    return attend


def make_flex(device: Device, case: Case) -> Attend:
    """FlexAttention, compiled for the case."""
    (M, N), keep = (case.shapes[0][2], case.shapes[1][2]), case.keep()
    blocks = create_block_mask(keep, None, None, M, N, device=str(device.place)) if keep else None
    return partial(
        device.flex(), score_mod=case.change(), block_mask=blocks, enable_gqa=case.is_grouped
    )


def make_tensors(device: Device, case: Case) -> list[torch.Tensor]:
    """Random q, k and v that require gradients."""
    torch.manual_seed(0)
    return [
        torch.randn(shape, device=device.place).to(case.dtype).requires_grad_()
        for shape in case.shapes
    ]


def measure_case(device: Device, whole: Case, emit: Emit, *, flex: bool = False) -> None:
    """Rows of a case: every way forward, then every way backward."""
    case = device.fit(whole)
    graph, tensors = case.graph(), make_tensors(device, case)
    plain = [t.detach() for t in tensors]
    forward, backward, apart = dict[str, Call](), dict[str, Call](), dict[str, float]()
    first = do = None
    for name, way in list_ways(device, case, graph, flex=flex):
        try:
            attend = way()
            o = attend(*tensors) if case.backward else attend(*plain)
            first = o.detach() if first is None else first
            do = torch.randn_like(first) if do is None else do
            if case.backward:
                backward[name] = partial(torch.autograd.grad, o, tensors, do, retain_graph=True)
                backward[name]()
        except REFUSALS as error:
            emit(refuse(whole, name, error))
            continue
        apart[name] = difference(o.detach(), first)
        forward[name] = partial(attend, *plain)
    passes: tuple[tuple[Pass, Mapping[str, Call]], ...]
    passes = ("forward", forward), ("backward", backward)
    for pass_, calls in passes:
        for name, ms in device.milliseconds(calls, RUNS).items():
            emit(rate(device, whole, pass_, name, ms) | {"apart": apart[name]})


def refuse(case: Case, name: str, error: Exception) -> Row:
    """The row of a way that cannot do a case. Raises the error where it is the device's fault."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return {"job": case.title, "by": name, "refused": str(error).strip()[:300]}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference between two outputs, as a fraction of the largest number."""
    x, y = (t.detach().float() for t in (a, b))
    return round(float((x - y).abs().max() / y.abs().max()), 5)


def rate(device: Device, case: Case, pass_: Pass, name: str, ms: float) -> Row:
    """A row: the time, what it makes of the work, and what was predicted."""
    graph = case.graph()
    work = count_work(graph, device.target, pass_)
    predicted = predict_milliseconds(graph, device.target, pass_, name)
    row: Row = {
        "job": case.title,
        "pass": pass_,
        "by": name,
        "ms": round(ms, 5),
        "TFLOP/s": round(work.flops / ms / 1e9, 2),
        "GB/s": round(work.bytes / ms / 1e6, 1),
    }
    row |= {} if predicted is None else {"predicted ms": round(predicted, 5)}
    return row | case.expectations(pass_)


def measure_cases(
    device: Device, emit: Emit, *, each: Callable[[], Iterable[Case]], flex: bool = False
) -> None:
    """Rows of all cases. flex: beside FlexAttention too."""
    for case in each():
        measure_case(device, case, emit, flex=flex)


measure_wide = partial(measure_cases, each=cases.wide_cases)
measure_narrow = partial(measure_cases, each=cases.narrow_cases)
measure_tutorial = partial(measure_cases, each=cases.tutorial_cases)
measure_groups = partial(measure_cases, each=cases.grouped_cases)
measure_decode = partial(measure_cases, each=cases.decode_cases)
measure_windows = partial(measure_cases, each=cases.window_cases)
measure_soft_cap = partial(measure_cases, each=cases.soft_cap_cases)
measure_flex = partial(measure_cases, each=cases.flex_cases, flex=True)


def measure_raw(device: Device, emit: Emit) -> None:
    """Plans of cuDNN beside cuDNN itself, in one run: device time, and host time of a call."""
    for whole in cases.raw_cases():
        case = device.fit(whole)
        tensors = [t.detach() for t in make_tensors(device, case)]
        try:
            plan = device.compile(case.graph(), "cudnn")
            o, lse = plan.run(*tensors)[1]
            operands: Tensors = (*tensors, o, lse.contiguous(), torch.randn_like(o))
            emit(compare_raw(device, whole, "forward", plan, tensors))
            emit(compare_raw(device, whole, "backward", plan.vjp, operands))
        except REFUSALS as error:
            emit(refuse(whole, "attn_graph cudnn", error))


def compare_raw(device: Device, case: Case, pass_: Pass, plan: ag.Plan, tensors: Tensors) -> Row:
    """A row of one pass: ours, and how fast cuDNN itself is."""
    calls: dict[str, Call] = {"ours": partial(plan, *tensors)}
    calls["raw"] = device.frontend(plan.graph, tensors)
    times = device.milliseconds(calls, RUNS)
    return rate(device, case, pass_, "attn_graph cudnn", times["ours"]) | {
        "raw ms": round(times["raw"], 5),
        "of its speed": round(times["raw"] / times["ours"], 3),
        "goal": 0.97,
        "host us": round(device.host_microseconds(calls["ours"]), 1),
        "host us, raw": round(device.host_microseconds(calls["raw"]), 1),
        "host goal": 15,
    }


def measure_tiles(device: Device, emit: Emit) -> None:
    """The kernels with other tiles than the table's, which `tune=True` would try."""
    for whole in cases.tile_cases():
        plan = device.compile(device.fit(whole).graph(), "triton")
        passes: tuple[tuple[Pass, ag.Graph], ...]
        passes = ("forward", plan.graph), ("backward", plan.vjp.graph)
        for pass_, graph in passes:
            for name, ms in device.milliseconds(variant_calls(device, graph, emit), RUNS).items():
                emit(rate(device, whole, pass_, name, ms))


def variant_calls(device: Device, graph: ag.Graph, emit: Emit) -> dict[str, Call]:
    """A call by each variant that runs here, after its first run."""
    calls: dict[str, Call] = {}
    for variant in (None, *VARIANTS):
        name = f"triton, {variant or 'the table'}"
        try:
            calls[name] = device.lower(graph, "triton", variant)
            calls[name]()
        except RefusedError as error:
            calls.pop(name, None)
            emit({"by": name, "refused": str(error)[:300]})
    return calls
