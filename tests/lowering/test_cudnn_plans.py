"""Real plans of cuDNN's for GPUs that are not there: what they tell, and that they are kept."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.extend import Options, default_store
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.cudnn import offline as cudnn_offline
from attn_graph.lowering.cudnn import plan as cudnn_plan
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.graph import CudnnCall
from attn_graph.lowering.cudnn.memory import workspace
from attn_graph.lowering.libraries import cudnn_limits
from attn_graph.lowering.request import Request
from attn_graph.machine.store import Store
from attn_graph.machine.target import Target
from tests.support.cudnn_builder import ask_builder
from tests.support.equipped import LIBRARIES

pytestmark = pytest.mark.skipif(
    find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend: make venv installs it"
)
X = ag.TensorSpec((2, 8, 1024, 128), torch.bfloat16, layout="bshd")
CAUSAL = ag.attention(X, X, X, mask=ag.Causal())
H200 = Target.of("h200")
FRONTEND = ("nvidia-cudnn-frontend", "1.28.0")
CUDNN_9_24 = ("nvidia-cudnn-cu13", "9.24.0.43")
ENGINE = r"\beng\d+(?:, [A-Z_]+ = \d+)+"
KNOWN = (9, 20, 0)  # whose engines are written here


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


built: dict[Any, cudnn_plan.CudnnPlan] = {}  # in this file, by all that cuDNN is given


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN builds each plan for the first test alone that needs it."""
    build = cudnn_plan.build_away

    def build_once(call: CudnnCall, *where: Any) -> cudnn_plan.CudnnPlan:
        key = str(call.plain), *where
        built[key] = built.get(key) or build(call, *where)
        return built[key]

    monkeypatch.setattr(cudnn_plan, "build_away", build_once)


def planned(graph: ag.Graph = CAUSAL, **options: object) -> ag.Plan:
    return ag.compile(graph, **{"target": "h200", **options})  # type: ignore[call-overload, no-any-return]


def refusal(error: pytest.ExceptionInfo[ag.NoBackendError]) -> str:
    ((name, reasons),) = error.value.refusals
    assert name == "cudnn"
    return "\n".join(map(str, reasons))


def test_a_plan_tells_who_runs_it_and_what_cudnn_was_asked(
    golden: Callable[[object], None],
) -> None:
    """The GPU's real plan: cuDNN's engine, its knobs, and its number of bytes.

    Each version of cuDNN has engines of its own: those of constraints.txt are known.
    """
    plan = planned()
    told = f"{plan.explain()}\n\n{plan.text()}\n\n{plan.vjp.text()}"
    engines = re.findall(ENGINE, told)
    if H200.cudnn_versions[0] == KNOWN:
        assert engines == ["eng2, KERNEL_CFG = 7", "eng6, KERNEL_CFG = 26"] * 2
    assert len(engines) == 4
    told = re.sub(ENGINE, "an engine and its knobs", told)
    golden(re.sub(r"built in [0-9.]+ s", "built in 0.5 s", told))


def test_forward_and_backward_by_hand_are_cudnns_like_those_of_training() -> None:
    """With lse handed out, and whoever runs the backward in another notebook."""
    graph = ag.attention(X, X, X, mask=ag.Causal(), stats=True)
    forward, backward = ag.vjp(graph, cotangents=("o",))
    assert [i.name for i in backward.inputs] == ["q", "k", "v", "o", "lse", "do"]
    plan, there, back = planned(graph), planned(forward), planned(backward)
    assert there is plan
    assert back is plan.training_vjp
    assert (there.backend, back.backend, plan.vjp.backend) == ("cudnn", "cudnn", "triton")


def test_memory_and_explain_tell_of_the_backward_by_o_first(store: Store) -> None:
    graph = ag.attention(X, X, X, mask=ag.Causal(), stats=True)
    plan = planned(graph, store=store)
    found = plan.explain()
    assert found.backward is not None
    assert found.through_lse is not None
    assert (found.backward.backend, found.through_lse.backend) == ("cudnn", "triton")
    assert plan.memory().workspace_backward == plan.training_vjp.executable.workspace
    assert found.memory == plan.memory() != found.through_lse.memory


PADDED = ag.TensorSpec(X.shape, X.dtype, (144 * 8 * 1024, 144, 144 * 8, 1))
LAYOUTS = [("h100", PADDED), ("b200", "sbhd"), ("a100", "bhsd")]


@pytest.mark.parametrize(("target", "layout"), LAYOUTS)
def test_other_strides_of_outputs_have_plans_without_a_copy(
    target: str, layout: ag.TensorSpec | str, store: Store
) -> None:
    """Built by cuDNN itself: o of the forward, and all three gradients, in strides unlike q's."""
    graph = ag.attention(X, X, X, mask=ag.Causal(), stats=True, outputs={"o": layout})
    _, back = ag.vjp(graph, cotangents=("o",), outputs=dict.fromkeys(("dq", "dk", "dv"), layout))
    for each, slots in (graph, ("o",)), (back, ("dQ", "dK", "dV")):
        plan = planned(each, target=target, backends=("cudnn",), store=store)
        strides = each.declared_outputs[0].strides  # type: ignore[union-attr]  # a spec
        assert all(
            re.search(rf"{x}=\w+ \S+\[.*?\]\(strides={re.escape(str(strides))}\)", plan.text())
            for x in slots
        )
        assert not any("declared layout" in note for note in plan.executable.notes)


@pytest.mark.parametrize("target", ["h100", "b200", "a100", "rtx4090"])
def test_decoding_with_absorbed_latent_heads_has_a_plan(target: str, store: Store) -> None:
    """Of 576 and 512: beyond cuDNN's own matrix, so a self-check comes before its first use."""
    q, k, v = (
        ag.TensorSpec(shape, torch.bfloat16)
        for shape in ((1, 128, 1, 576), (1, 1, 8192, 576), (1, 1, 8192, 512))
    )
    graph = ag.attention(q, k, v)
    found = ag.explain(graph, target=target, backends=("cudnn",), gradients=())
    assert "a self-check on the device itself comes before its first use" in str(found)
    plan = ag.compile(graph, target=target, backends=("cudnn",), store=store)
    assert found.memory is not None
    told = "forward" not in found.memory.untold  # by a formula, on Hopper
    assert told == (target == "h100")
    assert not told or found.memory.workspace_forward == plan.executable.workspace
    wide = (ag.TensorSpec((*x.shape[:3], 584), x.dtype) for x in (q, k, v))
    wider = ag.attention(*wide)
    assert ag.explain(wider, target=target, gradients=()).backend == "math"


def test_wide_heads_have_plans_in_packed_rows_and_in_pages_too(store: Store) -> None:
    def bf16(*shape: int) -> ag.TensorSpec:
        return ag.TensorSpec(shape, torch.bfloat16)

    starts, table, lengths = (ag.TensorSpec(x, torch.int32) for x in ((9,), (4, 64), (4,)))
    rows, pool = bf16(2048, 8, 512), bf16(500, 64, 1, 512)
    packed = ag.attention(rows, rows, rows, q_starts=starts, max_lengths=(512, 512))
    paged = ag.attention(
        bf16(4, 16, 1, 512), pool, pool, pages=table, kv_lengths=lengths, finite_pages=True
    )
    for graph in (packed, paged):
        plan = ag.compile(graph, target=H200, backends=("cudnn",), store=store)
        told = ag.explain(graph, target=H200, gradients=()).memory
        assert told is not None
        assert "forward" in told.untold or told.workspace_forward == plan.executable.workspace


def test_cudnn_comes_first_where_it_is_the_faster() -> None:
    assert planned().backend == "cudnn"
    assert planned(target="a100").backend == "torch_flash"


def test_the_workspace_is_cudnns_own_number(store: Store) -> None:
    """Known before a plan is built, on Hopper and below 9.25; both are what `memory()` tells."""
    plan = planned(store=store).vjp
    case, _ = describe_problem(Request(plan.graph, H200, Options()))
    case = evolve(case, backend=(9, 20, 0))
    assert plan.executable.workspace == workspace(case) == 2 * 8 * 1024 * (128 * 4 + 4) + 256
    assert planned(store=store).memory().workspace_backward == plan.executable.workspace


def test_gigabytes_for_determinism_are_told_and_refused() -> None:
    x = ag.TensorSpec((1, 32, 8192, 128), torch.bfloat16)
    graph = ag.attention(x, x, x)
    need = 32 * 8192 * (8192 * 2 + 4) + 256
    plan = planned(graph, deterministic=True, backends=("cudnn",))
    assert plan.memory().workspace_backward == need
    assert "4.001 GiB backward" in str(plan.explain())
    small = planned(graph, deterministic=True, backends=("cudnn",), max_workspace="1GiB")
    with pytest.raises(ag.NoBackendError) as error:
        _ = small.vjp
    assert refusal(error) == (
        f"needs a workspace of {need:,} bytes (4.001 GiB), max_workspace is {2**30:,} bytes (1 GiB)"
    )


def test_a_workspace_found_too_large_only_when_built_is_refused_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_graph.lowering.cudnn.memory.workspace", lambda case: None)
    plan = planned(store=store, max_workspace="1MiB", backends=("cudnn", "triton"))
    reasons = dict(plan.vjp.refusals)["cudnn"]
    assert plan.vjp.backend == "triton"
    assert tuple(map(str, reasons)) == (
        "needs a workspace of 8,454,400 bytes (8.063 MiB), "
        "max_workspace is 1,048,576 bytes (1 MiB)",
    )


def test_what_cudnn_declines_after_all_goes_to_the_next_backend(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With cuDNN's words, and a line in the log: the table has a gap."""
    x = ag.TensorSpec((1, 2, 1, 64), torch.float16)
    graph = ag.attention(x, x, x)
    monkeypatch.setattr(cudnn_limits, "reasons", lambda case: ())
    plan = planned(graph, store=store, backends=("cudnn", "triton")).vjp
    (reason,) = map(str, dict(plan.refusals)["cudnn"])
    assert plan.backend == "triton"
    assert reason.startswith("said itself, where no limit was known, at ")
    assert reason.removeprefix("said itself, where no limit was known, at ") in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_where_cudnns_planner_dies_the_next_backend_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = ag.attention(X, X, X)
    monkeypatch.setattr(cudnn_plan, "describe_target", lambda target: "{}")
    plan = planned(graph, store=store, backends=("cudnn", "triton"))
    (reason,) = map(str, dict(plan.refusals)["cudnn"])
    assert reason.startswith("is planned in a process of its own, and it ended with 1: ")
    assert plan.backend == "triton"


def test_where_cudnns_planner_takes_too_long_the_next_backend_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_offline, "PATIENCE", 0.01)
    plan = planned(ag.attention(X, X, X), store=store, backends=("cudnn", "triton"))
    (reason,) = map(str, dict(plan.refusals)["cudnn"])
    assert reason == "is planned in a process of its own, and it had not ended after 0.02 s"
    assert plan.backend == "triton"


def test_a_stored_plan_is_the_one_that_was_built(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(store=store)
    told = first.explain()  # which plans the backward too
    assert len([*store.entries()]) == 2
    ag.clear_cache()
    monkeypatch.setattr(cudnn_plan, "build_away", None)
    again = planned(store=store)
    assert again is not first
    assert (again.explain(), again.text()) == (told, first.text())


def keys_of(store: Store) -> list[str]:
    """The keys of all that is stored undamaged."""
    return [entry.key for entry in store.entries() if entry.key is not None]


@pytest.mark.parametrize("data", [b"", b"3\n", b"{}\nplan", b"\xff\n"])
def test_a_file_that_holds_no_plan_is_built_again(
    store: Store, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = planned(store=store)
    (key,) = keys_of(store)
    store.put(key, data)
    ag.clear_cache()
    assert planned(store=store).text() == first.text()
    assert "it holds no plan of cuDNN's" in caplog.text
    assert store.get(key) != data


def test_nothing_is_kept_where_that_is_not_wanted(store: Store) -> None:
    before = default_store().bytes
    planned(ag.attention(X, X, X, scale=0.3), store=False)
    assert default_store().bytes == before


DESCRIBE = """
print(cudnn.create_device_properties(Path(folder, "device").read_text()).serialize())
"""


def test_cudnn_describes_a_device_as_we_do(tmp_path: Path) -> None:
    """And as text, which is how the machine's own is read."""
    due = cudnn_offline.describe_target(H200)
    (tmp_path / "device").write_text(due)
    assert json.loads(ask_builder(DESCRIBE, tmp_path)) == json.loads(due)


def test_the_machines_own_device_is_read_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def serialize(self) -> str:
            return '{"deviceName": "NVIDIA H200"}'

    monkeypatch.setattr("cudnn.create_device_properties", lambda index: Properties())
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    assert json.loads(cudnn_plan.describe_own_gpu()) == {"deviceName": "NVIDIA H200"}


def test_a_machine_of_ones_own_is_planned_by_its_own_numbers() -> None:
    mine = evolve(H200, multiprocessors=66, l2=2**20)
    found = json.loads(cudnn_offline.describe_target(mine))
    assert (found["multiProcessorCount"], found["l2CacheSize"]) == (66, 2**20)


NO_COMPILER = """
#include <stdlib.h>
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
#define NEVER(name) int name(void) { abort(); }
NEVER(nvrtcCreateProgram) NEVER(nvrtcCompileProgram) NEVER(nvrtcDestroyProgram)
NEVER(nvrtcGetProgramLogSize) NEVER(nvrtcGetProgramLog) NEVER(nvrtcGetErrorString)
NEVER(nvrtcGetPTXSize) NEVER(nvrtcGetPTX) NEVER(nvrtcGetCUBINSize) NEVER(nvrtcGetCUBIN)
NEVER(__nvrtcCPEx)
"""
LOAD = """
ctypes.CDLL(f"{folder}/libnvrtc.so.13", ctypes.RTLD_GLOBAL)
device = Path(folder, "device").read_text()
graph = builder.load_plan(Path(folder, "plan").read_bytes(), device)
print(graph.get_workspace_size(), sorted(n.name for n in graph.get_behavior_notes()))
"""


def test_a_stored_plan_loads_without_compiling(store: Store, tmp_path: Path) -> None:
    """In the compiler's place is a library that aborts when it is asked to compile."""
    planned(store=store)
    data = store.get(*keys_of(store))
    assert data is not None
    built = cudnn_plan.CudnnPlan.load(data)
    (tmp_path / "plan").write_bytes(built.data)
    (tmp_path / "device").write_text(cudnn_offline.describe_target(H200))
    (tmp_path / "nvrtc.c").write_text(NO_COMPILER)
    library = ("-shared", "-fPIC", "-Wl,-soname,libnvrtc.so.13", "-o", "libnvrtc.so.13", "nvrtc.c")
    subprocess.run(("cc", *library), check=True, cwd=tmp_path)
    assert ask_builder(LOAD, tmp_path) == f"{built.workspace} {[*built.notes]}\n"


def test_a_plan_depends_on_all_that_its_key_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Called:
        plain: ClassVar[dict[str, str]] = {"name": "sdpa"}

    versions = ((9, 20, 0), (1, 28, 0))
    device = cudnn_offline.describe_target(H200)
    key = cudnn_plan.plan_key(Called, device, versions)  # type: ignore[arg-type]

    class Other:
        plain: ClassVar[dict[str, str]] = {"name": "sdpa_backward"}

    monkeypatch.setenv(cudnn_plan.READ_BY_CUDNN, "0")
    changed = cudnn_plan.plan_key(Called, device, versions)  # type: ignore[arg-type]
    monkeypatch.delenv(cudnn_plan.READ_BY_CUDNN)
    named = cudnn_plan.plan_key(Called, device, versions, "eng8_k24=6")  # type: ignore[arg-type]
    other = cudnn_plan.plan_key(Other, device, versions)  # type: ignore[arg-type]
    others = [
        (cudnn_offline.describe_target(Target.of("b200")), versions),
        (device, ((9, 19, 0), (1, 28, 0))),
        (device, ((9, 20, 0), (1, 29, 0))),
    ]
    keys = {cudnn_plan.plan_key(Called, *each) for each in others}  # type: ignore[arg-type]
    assert len(keys | {key, changed, named, other}) == 7


def changed(value: object) -> object:
    """Another value of a device's property."""
    if isinstance(value, str):
        return f"{value} NVL"
    return [changed(x) for x in value] if isinstance(value, list) else value + 1  # type: ignore[operator]  # a number


DIFFER = """
plan = Path(folder, "plan").read_bytes()
for name, device in json.loads(Path(folder, "devices").read_text()).items():
    try:
        builder.load_plan(plan, json.dumps(device))
    except cudnn.cudnnGraphNotSupportedError:
        print(name)
"""


def test_later_versions_of_cudnn_compare_more_of_a_device() -> None:
    device = json.dumps({"memoryBusWidth": 6144, "smCountOrigin": 132, "deviceVer": 900})
    before, after = (
        cudnn_plan.compared_properties(device, version) for version in ((9, 24, 9), (9, 25, 0))
    )
    assert before["deviceVer"] == after["deviceVer"] == 900
    assert after.items() - before.items() == {("memoryBusWidth", 6144), ("smCountOrigin", 132)}


def test_keys_hold_what_cudnn_compares_of_a_device_and_no_more(
    store: Store, tmp_path: Path
) -> None:
    """Each property is changed by itself: where cuDNN takes the plan, the key is the same.

    But 9.26, which torch 2.15 asks for, compares fewer properties than later versions do.
    """
    planned(store=store)
    (key,) = keys_of(store)
    data = store.get(key)
    assert data is not None
    (tmp_path / "plan").write_bytes(cudnn_plan.CudnnPlan.load(data).data)
    own = json.loads(cudnn_offline.describe_target(H200))
    others = {name: own | {name: changed(value)} for name, value in own.items()}
    (tmp_path / "devices").write_text(json.dumps(others))
    refused = set(ask_builder(DIFFER, tmp_path).split())
    facts = json.loads(key.partition(" ")[2])
    told, version = facts["device"], tuple(facts["versions"][0])
    fewer = (9, 25) <= version < (9, 28) and refused < set(told)
    assert fewer or refused == set(told)
    assert told == {name: own[name] for name in told}


# What is missing


MISSING: dict[str, tuple[str, Callable[[str], object] | None, Target, str]] = {
    "no compiler": (
        *("shutil.which", lambda name: None, H200),
        "needs a C compiler, and none of cc, gcc, clang is on the path",
    ),
    "a compiler that fails": (
        *("shutil.which", lambda name: "/bin/false", H200),
        "which /bin/false can't build",
    ),
    "no frontend": (
        *("attn_graph.lowering.cudnn.offline.find_spec", lambda name: None, H200),
        "nvidia-cudnn-frontend, which is not installed here; pip install",
    ),
    "other versions": (
        *("", None, Target("h200", "cuda", 90, (), (FRONTEND, CUDNN_9_24))),
        r"and the target has 9\.24\.0 and 1\.28\.0\Z",
    ),
    "a GPU that nobody described": (
        *("", None, Target("h19", "cuda", 90, (), H200.libraries)),
        r"\Aplans for GPUs that are not there from a100, h100, h200",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_a_reason(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.clear()
    place, stand_in, target, words = MISSING[name]
    if stand_in is not None:
        monkeypatch.setattr(place, stand_in)
    with pytest.raises(ag.NoBackendError) as error:
        planned(store=store, target=target, backends=("cudnn",))
    assert re.search(words, refusal(error))


def test_such_a_gpu_is_explained_all_the_same() -> None:
    """By a version of cuDNN whose backward's workspace is known without a plan."""
    target = Target("h19", "cuda", 90, (), LIBRARIES)
    found = ag.explain(CAUSAL, target=target, backends=("cudnn",))
    assert found.backend == "cudnn"
    assert found.memory is not None
    assert found.memory.untold == ("forward",)


def test_a_stored_plan_that_cudnn_does_not_take_back_is_a_miss(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where it would be loaded: with a version that is nowhere installed."""
    planned(store=store)
    ag.clear_cache()
    built.clear()
    monkeypatch.setattr(
        cudnn_plan, "describe_device", lambda target: cudnn_offline.describe_target(H200)
    )
    monkeypatch.setattr(cudnn_plan, "is_here", lambda target: True)
    monkeypatch.setattr(cudnn_plan, "loads", lambda built: False)
    monkeypatch.setattr(
        cudnn_builder, "library_versions", lambda: {"backend": 99900, "frontend": "1.28.0"}
    )
    with pytest.raises(ag.NoBackendError) as error:
        planned(store=store, backends=("cudnn",))
    assert refusal(error).startswith("plans with cuDNN 9.99.0 and frontend 1.28.0 here, and the")


def test_without_cudnn_all_else_works_and_it_is_told_what_to_install() -> None:
    target = Target("h200", "cuda", 90, (), (("triton", "3.7.1"),))
    plan = planned(target=target)
    assert plan.backend == plan.vjp.backend == "triton"
    told = "\n".join(map(str, dict(plan.refusals)["cudnn"]))
    assert "pip install 'attn-graph[cuda]'" in told
    assert "pip install 'attn-graph[offline]'" in told
