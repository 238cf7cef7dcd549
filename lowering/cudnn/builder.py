"""Makes cuDNN's plans of calls. It knows cuDNN and no other part of the library, so it also runs
as a program of its own, for GPUs that are not there:

    python -P cudnn_builder.py STAND_IN FOLDER

reads FOLDER/requests.json, a list, writes an answer to each as a line of FOLDER/answers.jsonl and
each plan that was built to FOLDER/<number>.plan. STAND_IN is the library that takes the place of
a driver, or "-" where there is a real one.
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

DTYPES = {"f16": "HALF", "bf16": "BFLOAT16", "f32": "FLOAT", "f64": "DOUBLE", "i32": "INT32"}
ALIGNMENTS = {"top_left": "TOP_LEFT", "bottom_right": "BOTTOM_RIGHT"}
RESULTS = {"sdpa": ("o", "stats"), "sdpa_backward": ("dQ", "dK", "dV")}  # others are arguments


class Declined(Exception):
    """cuDNN takes a call no further: at which stage, and in its own words."""

    def __init__(self, stage: str, said: str) -> None:
        self.stage, self.said = stage, said
        super().__init__(f"{stage}: {said}")


def build_graph(
    call: Json,
    *,
    build: bool = True,
    plan: str | None = None,
    **machine: Any,  # Any: cuDNN's, in and out
) -> Any:  # Any: cuDNN's graph
    """The frontend's graph of a call (see `Call.plain`), with a plan built if wanted.

    plan: one of `plan_names`, in place of the first, which cuDNN takes to be the best. machine:
    what `cudnn.pygraph` gets of where it will run: `handle`, or `sm_version` and `device_property`
    where there is no device. Raises Declined where cuDNN says no: by one of the three classes that
    it says so with, at one of the stages here.
    """
    import cudnn

    reached = "declare"
    try:
        graph = declare(call, machine)
        for stage, step in stages(graph, build, plan):
            reached = stage
            step()
    except (cudnn.cudnnGraphNotSupportedError, ValueError, RuntimeError) as error:
        raise Declined(reached, str(error)) from error
    return graph


def load_plan(plan: bytes, device: int | str) -> Any:  # Any: cuDNN's graph
    """A built plan as a graph to execute, for a GPU by its number or by its description.

    By the device's properties and without a handle: with one the frontend runs the plan once, in a
    capture of the handle's stream, on memory of its own. If that fails the stream stays captured.
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
    import cudnn

    float32 = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=dtype(call["dtype"]),
        intermediate_data_type=float32,
        compute_data_type=float32,
        **machine,
    )
    name, results = call["name"], RESULTS[call["name"]]
    outputs = {x["argument"]: x for x in call["outputs"]}
    given = [*call["inputs"], *(x for key, x in outputs.items() if key not in results)]
    tensors = {x["argument"]: tensor(graph, x) for x in given}
    found = getattr(graph, name)(**tensors, **arguments(graph, call))
    for key, result in zip(results, found, strict=True):
        if key in outputs:
            set_layout(result, outputs[key])
    for key in outputs.keys() & tensors.keys():
        set_layout(tensors[key], outputs[key])
    return graph


def dtype(name: str) -> Any:  # Any: cuDNN's
    import cudnn

    return getattr(cudnn.data_type, DTYPES[name])


def tensor(graph: Any, x: Json) -> Any:  # Any: cuDNN's
    form = {"dim": x["shape"], "stride": x["strides"], "data_type": dtype(x["dtype"])}
    return graph.tensor(**form, uid=x["uid"])


def set_layout(result: Any, x: Json) -> None:  # Any: cuDNN's
    """Say how a result is to lie."""
    result.set_output(True).set_dim(x["shape"]).set_stride(x["strides"])
    result.set_data_type(dtype(x["dtype"])).set_uid(x["uid"])


def arguments(graph: Any, call: Json) -> dict[str, Any]:  # Any: cuDNN's
    """The options as the frontend takes them."""
    import cudnn

    found = dict(call["options"])
    if call["name"] == "sdpa":
        found.setdefault("generate_stats", False)  # the frontend wants to be told
    if align := found.get("diagonal_alignment"):
        found["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, ALIGNMENTS[align])
    if cap := found.pop("soft_cap", None):
        cap_scores, cap_gradients = soft_cap(graph, cap)
        found["score_mod"] = cap_scores
        if call["name"] == "sdpa_backward":
            found["score_mod_bprop"] = cap_gradients
    return found


def soft_cap(graph: Any, cap: float) -> tuple[Callable[..., Any], Callable[..., Any]]:  # Any: same
    """s -> cap tanh(s / cap), and its gradient: ds -> ds (1 - tanh(s / cap)^2)."""
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
    """The plans that cuDNN proposes, the best first as it takes them."""
    return [graph.get_plan_name_at_index(n) for n in range(graph.get_execution_plan_count())]


def describe_plan(
    graph: Any,  # Any: cuDNN's
    plan: str | None = None,
) -> dict[str, Any]:  # Any: JSON
    """What cuDNN says of the plan that it built."""
    proposed = plan_names(graph)
    name = plan or proposed[0]
    _, knobs = graph.get_engine_and_knobs_at_index(proposed.index(name))
    return {
        "plans": proposed,
        "engine": name.partition("_")[0],
        "knobs": sorted([knob.name, value] for knob, value in knobs.items()),
        "notes": sorted(note.name for note in graph.get_behavior_notes()),
        "workspace": graph.get_workspace_size(),
    }


def answer_calls(request: Json, path: Path) -> dict[str, Any]:  # Any: JSON
    """The answer to one request; the plan itself goes to `path`."""
    import cudnn

    device = cudnn.create_device_properties(request["device"])
    machine = {"sm_version": request["sm"], "device_property": device}
    start = time.perf_counter()
    try:
        graph = build_graph(
            request["call"], build=request["build"], plan=request["plan"], **machine
        )
    except Declined as error:
        return {"stage": error.stage, "said": error.said}
    seconds = time.perf_counter() - start
    if not request["build"]:
        return {"seconds": seconds}
    path.write_bytes(bytes(graph.serialize()))
    return describe_plan(graph, request["plan"]) | {"seconds": seconds}


def stand_in(path: str) -> None:
    """Put a library in the driver's place, and load what cuDNN's compiler then looks for."""
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    spec = find_spec("cudnn")
    site = Path(spec.origin or "").parents[1] if spec else Path()
    for library in sorted(site.glob("nvidia/*/lib/libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def library_versions() -> dict[str, Any]:  # Any: JSON
    """Of the frontend, and of cuDNN itself: 0 where there is none."""
    import cudnn

    try:
        backend = cudnn.backend_version()
    except RuntimeError:  # the frontend finds no library
        backend = 0
    return {"frontend": cudnn.__version__, "backend": backend}


def main(library: str, folder: str) -> None:
    if library != "-":
        stand_in(library)
    requests = json.loads(Path(folder, "requests.json").read_text())
    with Path(folder, "answers.jsonl").open("w") as answers:
        print(json.dumps(library_versions()), file=answers, flush=True)
        for n, request in enumerate(requests):
            found = answer_calls(request, Path(folder, f"{n}.plan"))
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
