"""Builds cuDNN's plans of calls.

It imports no other part of the library, so it also runs as a program, for GPUs absent from the
machine:

    python -P builder.py STAND_IN FOLDER

reads the list in FOLDER/requests.json, writes the answer to each as a line of FOLDER/answers.jsonl
and each plan to FOLDER/<number>.plan. STAND_IN is a library in place of the driver, or "-" on a
machine with a real one.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

DTYPES = {
    "f16": "HALF",
    "bf16": "BFLOAT16",
    "f32": "FLOAT",
    "f64": "DOUBLE",
    "i32": "INT32",
    "i64": "INT64",
    "f8e4m3": "FP8_E4M3",
    "f8e5m2": "FP8_E5M2",
}
ALIGNMENTS = {"top_left": "TOP_LEFT", "bottom_right": "BOTTOM_RIGHT"}
RESULTS = {  # others are arguments
    "sdpa": ("o", "stats"),
    "sdpa_fp8": ("o", "stats", "amax_s", "amax_o"),
    "sdpa_backward": ("dQ", "dK", "dV"),
}
BOUNDS = {"diagonal_band_left_bound": "left_bound", "diagonal_band_right_bound": "right_bound"}


class DeclinedError(Exception):
    """cuDNN refuses a call. stage: the step of its refusal. message: in its own words."""

    def __init__(self, stage: str, message: str) -> None:
        self.stage, self.message = stage, message
        super().__init__(f"{stage}: {message}")


def build_graph(
    call: Json,
    *,
    build: bool = True,
    plan: str | None = None,
    **machine: Any,  # Any: cuDNN's, in and out
) -> Any:  # Any: cuDNN's graph
    """The frontend's graph of a call, given as `CudnnCall.plain`.

    build: build a plan too. plan: one of `plan_names`; by default the first, cuDNN's favourite.
    machine: arguments of `cudnn.pygraph` for the device: `handle`, or without a device `sm_version`
    and `device_property`. Raises DeclinedError if cuDNN refuses.
    """
    import cudnn

    current = "declare"
    try:
        graph = declare(call, machine)
        for stage, step in stages(graph, build, plan):
            current = stage
            step()
    except (cudnn.cudnnGraphNotSupportedError, ValueError, RuntimeError) as error:
        raise DeclinedError(current, str(error)) from error
    return graph


def load_plan(plan: bytes, device: int | str) -> Any:  # Any: cuDNN's graph
    """Deserialize a plan as a graph to execute, for a GPU by its number or by its description.

    It passes the device's properties and no handle. With a handle the frontend would run the plan
    once, in a capture of the handle's stream, and a failure would leave the stream captured.
    """
    import cudnn

    graph = cudnn.pygraph(device_property=cudnn.create_device_properties(device))
    graph.deserialize(list(plan))
    return graph


def stages(
    graph: Any,  # Any: cuDNN's
    build: bool,
    plan: str | None,
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The steps from a declared graph to a plan, by name; each can raise."""
    import cudnn

    modes = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
    yield "validate", graph.validate
    yield "build_operation_graph", graph.build_operation_graph
    yield "create_execution_plans", lambda: graph.create_execution_plans(modes)
    yield "check_support", graph.check_support
    if plan is not None:
        yield "select_plan", lambda: graph.select_plan(plan_names(graph).index(plan))
    if build:
        policy = cudnn.build_plan_policy.HEURISTICS_CHOICE
        yield "build_plans", lambda: graph.build_plans(policy)


def declare(call: Json, machine: Json) -> Any:  # Any: cuDNN's graph
    """The frontend's graph with tensors, operation and layouts declared."""
    import cudnn

    float32 = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=cudnn_dtype(call["dtype"]),
        intermediate_data_type=float32,
        compute_data_type=float32,
        **machine,
    )
    name, results = call["name"], RESULTS[call["name"]]
    outputs = {x["argument"]: x for x in call["outputs"]}
    operands = [*call["inputs"], *(x for key, x in outputs.items() if key not in results)]
    begins = {x["offsets"] for x in (*operands, *outputs.values()) if "offsets" in x}
    starts = {x["argument"]: declare_tensor(graph, x) for x in operands if x["argument"] in begins}
    tensors = {
        x["argument"]: declare_tensor(graph, x, starts)
        for x in operands
        if x["argument"] not in begins
    }
    tensors_out = getattr(graph, name)(**tensors, **frontend_options(graph, call))
    for key, result in zip(results, tensors_out, strict=True):
        if key in outputs:
            set_layout(result, outputs[key], starts)
    for key in outputs.keys() & tensors.keys():
        set_layout(tensors[key], outputs[key], starts)
    return graph


def cudnn_dtype(name: str) -> Any:  # Any: cuDNN's
    """cuDNN's dtype by our short name."""
    import cudnn

    return getattr(cudnn.data_type, DTYPES[name])


def declare_tensor(graph: Any, x: Json, starts: Json | None = None) -> Any:  # Any: cuDNN's
    """A tensor of a call in cuDNN's graph. starts: the offsets of packed ones, by argument."""
    form = {"dim": x["shape"], "stride": x["strides"], "data_type": cudnn_dtype(x["dtype"])}
    packed = {"ragged_offset": starts[x["offsets"]]} if starts and "offsets" in x else {}
    return graph.tensor(**form, **packed, uid=x["uid"])


def set_layout(result: Any, x: Json, starts: Json) -> None:  # Any: cuDNN's
    """Set shape, strides, dtype and number of a result, and its offsets if it is packed."""
    result.set_output(True).set_dim(x["shape"]).set_stride(x["strides"])
    result.set_data_type(cudnn_dtype(x["dtype"])).set_uid(x["uid"])
    if "offsets" in x:
        result.set_ragged_offset(starts[x["offsets"]])


def frontend_options(graph: Any, call: Json) -> dict[str, Any]:  # Any: cuDNN's
    """The options of a call as the frontend takes them."""
    import cudnn

    options: dict[str, Any] = dict(call["options"])
    if call["name"] == "sdpa_fp8":
        options = {BOUNDS.get(name, name): x for name, x in options.items()}
    if align := options.get("diagonal_alignment"):
        options["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, ALIGNMENTS[align])
    if cap := options.pop("soft_cap", None):
        cap_scores, cap_gradients = soft_cap_functions(graph, cap)
        options["score_mod"] = cap_scores
        if call["name"] == "sdpa_backward":
            options["score_mod_bprop"] = cap_gradients
    return options


def soft_cap_functions(
    graph: Any,  # Any: cuDNN's, here and below
    cap: float,
) -> tuple[Callable[..., Any], Callable[..., Any]]:  # Any: same
    """s -> cap tanh(s / cap), and its gradient ds -> ds (1 - tanh(s / cap)^2), in cuDNN's ops."""
    import cudnn

    number = cudnn.scalar_type.RUNTIME_PARAM
    most, inverse = graph.tensor_scalar(cap, number), graph.tensor_scalar(1 / cap, number)
    shares: list[Any] = []

    def forward(inner: Any, s: Any) -> Any:
        shares.append(inner.mul(a=s, b=inverse))
        return inner.mul(a=inner.tanh(input=shares[-1]), b=most)

    def backward(inner: Any, ds: Any) -> Any:
        return inner.tanh_backward(loss=ds, input=shares[-1])

    return forward, backward


def plan_names(graph: Any) -> list[str]:  # Any: cuDNN's
    """The plans proposed by cuDNN, its favourite first."""
    return [graph.get_plan_name_at_index(n) for n in range(graph.get_execution_plan_count())]


def describe_plan(
    graph: Any,  # Any: cuDNN's
    plan: str | None = None,
) -> dict[str, Any]:  # Any: JSON
    """cuDNN's report on a built plan. workspace: bytes."""
    names = plan_names(graph)
    name = plan or names[0]
    _, knobs = graph.get_engine_and_knobs_at_index(names.index(name))
    return {
        "plans": names,
        "engine": name.partition("_")[0],
        "knobs": sorted([knob.name, value] for knob, value in knobs.items()),
        "notes": sorted(note.name for note in graph.get_behavior_notes()),
        "workspace": graph.get_workspace_size(),
    }


def answer_request(request: Json, path: Path) -> dict[str, Any]:  # Any: JSON
    """The answer to one request; the plan itself is written to `path`."""
    import cudnn

    device = cudnn.create_device_properties(request["device"])
    machine = {"sm_version": request["sm"], "device_property": device}
    start = time.perf_counter()
    try:
        graph = build_graph(
            request["call"], build=request["build"], plan=request["plan"], **machine
        )
    except DeclinedError as error:
        return {"stage": error.stage, "message": error.message}
    seconds = time.perf_counter() - start
    if not request["build"]:
        return {"seconds": seconds}
    path.write_bytes(bytes(graph.serialize()))
    return describe_plan(graph, request["plan"]) | {"seconds": seconds}


def load_stand_in(path: str) -> None:
    """Load a library in place of the driver, and then the libraries of cuDNN's compiler."""
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    spec = find_spec("cudnn")
    site = Path(spec.origin or "").parents[1] if spec else Path()
    for library in sorted(site.glob("nvidia/*/lib/libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def library_versions() -> dict[str, Any]:  # Any: JSON
    """The versions of the frontend, "1.28.0", and of cuDNN, 92000 for 9.20.0, 0 without one."""
    import cudnn

    try:
        backend = cudnn.backend_version()
    except RuntimeError:  # the frontend finds no library
        backend = 0
    return {"frontend": cudnn.__version__, "backend": backend}


def main(library: str, folder: str) -> None:
    if library != "-":
        load_stand_in(library)
    requests = json.loads(Path(folder, "requests.json").read_text())
    with Path(folder, "answers.jsonl").open("w") as answers:
        print(json.dumps(library_versions()), file=answers, flush=True)
        for n, request in enumerate(requests):
            answer = answer_request(request, Path(folder, f"{n}.plan"))
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
