"""doctor is right about machines of every kind, which here are values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.cli import diagnosis
from attn_graph.cli.diagnosis import (
    Diagnosis,
    Surroundings,
    diagnose,
    find_problems,
    version_reasons,
)
from attn_graph.cli.doctor import doctor_screen
from attn_graph.cli.output import render_text
from attn_graph.machine.gpus import devices
from attn_graph.machine.torch_switches import Switches
from tests.support.command_line import page, run
from tests.support.gpus import box

MACHINES: dict[str, Surroundings] = page().MACHINES
EMPTY = ag.extend.Store("absent")
TORCH_ON_GPUS = {"torch_flash", "torch_efficient", "torch_cudnn", "math"}
TAKERS = {
    "torch": TORCH_ON_GPUS,
    "triton": TORCH_ON_GPUS | {"triton"},
    "cudnn": TORCH_ON_GPUS | {"triton", "cudnn"},
}


def takers(found: Diagnosis, target: str) -> set[str]:
    return {v.backend for v in found.verdicts if v.target == target and not v.reasons}


@pytest.mark.parametrize("name", MACHINES)
def test_who_runs_where_follows_from_the_libraries(name: str) -> None:
    found = diagnose(MACHINES[name], EMPTY)
    assert takers(found, "cpu") == {"torch_sdpa", "math"}
    for gpu in ("a100", "h200", "b200", "rtx4090"):
        assert takers(found, gpu) == TAKERS[name]
    assert not found.problems
    assert len(found.verdicts) == len(ag.extend.BACKENDS) * (1 + len(devices()))
    json.dumps(found.to_dict())


def test_reasons_say_what_to_install() -> None:
    told = render_text(*doctor_screen(diagnose(MACHINES["torch"], EMPTY)))
    assert "needs triton, which is not installed; pip install 'attn-graph[cuda]'" in told
    assert "needs nvidia-cudnn-frontend, which is not installed" in told


def test_outcomes_of_self_checks_are_shown(tmp_path: Path) -> None:
    store = ag.extend.Store(tmp_path)
    key = {"backend": "fa4", "variant": "D 64", "target": "NVIDIA H200 (cuda sm_90)"}
    outcome = {"failure": "had not ended after 300 s", "shares": [], "seconds": 300}
    store.put(f"check {json.dumps(key)}", json.dumps(outcome).encode())
    found = diagnose(MACHINES["torch"], store)
    what, how = "fa4, D 64, on NVIDIA H200 (cuda sm_90)", "failed: it had not ended after 300 s"
    assert found.checks == ((what, how),)
    told = " ".join(render_text(*doctor_screen(found)).split())
    assert f"Self-checks {what} {how}" in told
    assert found.to_dict()["checks"] == ((what, how),)


def test_a_gpu_comes_before_the_cpu() -> None:
    gpu = evolve(
        ag.Target.of("h200"), name="NVIDIA H200", libraries=MACHINES["cudnn"].cpu.libraries
    )
    machine = evolve(
        MACHINES["cudnn"], target=gpu, gpus=("NVIDIA H200 (sm_90), 140 GiB",), cuda="13.0"
    )
    found = diagnose(machine, EMPTY)
    assert found.verdicts[0].target == "NVIDIA H200"
    assert takers(found, "NVIDIA H200") == TAKERS["cudnn"]
    told = render_text(*doctor_screen(found))
    assert "NVIDIA H200 (sm_90), 140 GiB" in told
    assert "without CUDA" not in told


def with_versions(**versions: str) -> Surroundings:
    """The machine that has all, with some libraries in other versions."""
    machine = MACHINES["cudnn"]
    found = dict(machine.cpu.libraries) | {n.replace("_", "-"): v for n, v in versions.items()}
    cpu = evolve(machine.cpu, libraries=tuple(found.items()))
    return evolve(machine, cpu=cpu, target=cpu)


@pytest.mark.parametrize("cudnn", ["9.20.0", "9.10.1"])
def test_a_cudnn_that_pip_knows_nothing_of_is_told(cudnn: str) -> None:
    """As a system or conda brings it: PyTorch names its version."""
    libraries = [x for x in MACHINES["cudnn"].cpu.libraries if "cudnn-jit" not in x[0]]
    cpu = evolve(MACHINES["cudnn"].cpu, libraries=(*libraries, ("cudnn", cudnn)))
    found = diagnose(evolve(MACHINES["cudnn"], cpu=cpu, target=cpu), EMPTY)
    told = render_text(*doctor_screen(found))
    assert f"{cudnn}, which PyTorch loads" in told
    assert "cuDNN, which is not installed" not in told
    assert not [x for x in told.splitlines() if "cuDNN itself" in x and "not installed" in x]
    is_old = cudnn == "9.10.1"
    assert takers(found, "h200") == TAKERS["triton" if is_old else "cudnn"] - (
        {"torch_cudnn"} if is_old else set()
    )
    assert bool(found.problems) == is_old


@pytest.mark.parametrize("frontend", ["1.18.0", "1.19.0", "1.26.1", "1.27.0", "1.28.0"])
@pytest.mark.parametrize("cudnn", ["9.10.1", "9.10.2", "9.14.0", "9.20.0.48", "9.24.0"])
def test_known_bad_versions_are_those_of_the_table(cudnn: str, frontend: str) -> None:
    machine = with_versions(nvidia_cudnn_frontend=frontend, nvidia_cudnn_jit_cu13=cudnn)
    told = " ".join(map(str, version_reasons(machine.cpu)))
    assert ("needs cuDNN 9.10.2" in told) == (cudnn == "9.10.1")
    assert ("needs nvidia-cudnn-frontend 1.28" in told) == (frontend != "1.28.0")
    assert bool(told) == (cudnn == "9.10.1" or frontend != "1.28.0")
    assert bool([*find_problems(machine)]) == bool(told)


NEEDS = {
    ("torch", "triton==3.7.1"): (),
    ("torch", "triton==3.7.2"): ("torch needs triton==3.7.2, and 3.7.1 is installed",),
    ("torch", "nvidia-cudnn-jit-cu13==9.20.0.48"): (),
    ("torch", "nvidia-cudnn-cu13==9.20.0.48"): (),
    ("attn-graph", "triton>=3.6"): (),
    ("attn-graph", "triton>=3.10"): ("attn-graph needs triton>=3.10, and 3.7.1 is installed",),
    ("attn-graph", "torch>=2.13"): (),
}


@pytest.mark.parametrize(("who", "need"), NEEDS)
def test_what_libraries_ask_of_each_other_is_checked(who: str, need: str) -> None:
    told = [*find_problems(evolve(MACHINES["cudnn"], needs=((who, need),)))]
    assert tuple(each.split(";")[0] for each in told) == NEEDS[who, need]


def test_a_library_without_its_module_is_broken() -> None:
    machine = evolve(MACHINES["triton"], lost=("triton",))
    (told,) = find_problems(machine)
    assert told.startswith("triton 3.7.1 is installed, and its module triton is not found")
    assert takers(diagnose(machine, EMPTY), "h200") == TORCH_ON_GPUS


def test_damaged_files_are_told(tmp_path: Path) -> None:
    store = ag.extend.Store(tmp_path)
    store.put("a", b"")
    store.put("b", b"")
    store.path("b").write_bytes(b"damaged")
    found = diagnose(MACHINES["torch"], store)
    assert (found.kept.files, found.kept.damaged) == (2, 1)
    told = render_text(*doctor_screen(found))
    assert "1 of 2 stored files are damaged" in told
    assert told.endswith("something is broken")


def test_what_is_set_is_told() -> None:
    interprets = evolve(MACHINES["triton"].cpu, interprets=True)
    machine = evolve(
        MACHINES["triton"],
        cpu=interprets,
        target=interprets,
        driver=True,
        compiler=None,
        variables=(("TRITON_INTERPRET", "1"),),
        switches=Switches(flash=False, deterministic=True),
    )
    found = diagnose(machine, EMPTY)
    told = render_text(*doctor_screen(found))
    for part in (
        "TRITON_INTERPRET         1",
        "TRITON_INTERPRET is set",
        "NVIDIA's driver is here, and PyTorch is built without CUDA",
        "PyTorch's switch flash is False",
        "PyTorch's switch deterministic is True",
    ):
        assert part in told
    assert takers(found, "cpu") == {"triton", "math"}
    no_compiler = render_text(*doctor_screen(diagnose(evolve(machine, driver=False), EMPTY)))
    assert "need a C compiler: cc, gcc, clang" in no_compiler


ORDERS = {  # of PyTorch's kernels by number; 4 and above are kernels of other devices
    (1, 2, 0, 3): "",
    (1, 2, 0, 3, 4): "",
    (3, 1, 2, 0, 4): "",
    (4, 3, 1, 2, 0): "",
    (2, 1, 0, 3, 4): "efficient, flash, math, cudnn",
}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_order_of_kernels_is_told_if_pytorch_does_not_set_it_itself(
    order: tuple[int, ...],
) -> None:
    machine = evolve(MACHINES["cudnn"], switches=Switches(priority=order))
    told = [note for note in diagnose(machine, EMPTY).notes if "priority" in note]
    expected = f"PyTorch's switch priority is {ORDERS[order]}: docs/torch-controls.md"
    assert told == ([expected] if ORDERS[order] else [])


def takes(name: str, graph: ag.Graph, target: str) -> bool:
    """Whether compiling both passes succeeds."""
    try:
        plan = ag.compile(graph, target=target, backends=(name,), store=False)
        return plan.vjp.backend == name
    except ag.NoBackendError:
        return False


@pytest.mark.parametrize(("target", "dtype"), [("cpu", torch.float32), ("h200", torch.float16)])
def test_what_doctor_says_of_a_backend_is_what_compiling_finds(
    target: str, dtype: torch.dtype
) -> None:
    found = diagnose(Surroundings.here(), EMPTY)
    if target != "cpu" and found.machine.compiler is None and not found.machine.driver:
        pytest.skip("plans of cuDNN need a C compiler, and there is none")
    graph = ag.attention(*(ag.TensorSpec((1, 2, 96, 32), dtype),) * 3)
    names = {backend.name for backend in ag.extend.BACKENDS}
    assert takers(found, target) == {name for name in names if takes(name, graph, target)}


def test_doctor_tells_of_this_very_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("doctor", "--json")
    told = json.loads(result.output)
    assert result.exit_code == (1 if told["problems"] else 0)
    assert told["attn_graph"] == ag.__version__
    assert all(len(each["keys"]) == len(each["reasons"]) for each in told["verdicts"])
    assert any("device" in each["keys"] for each in told["verdicts"])
    assert told["machine"]["libraries"] == dict(ag.Target.of("cpu").libraries)
    here = Surroundings.here()
    assert here.target == ag.Target.here()
    bad = evolve(here, lost=("torch",))
    monkeypatch.setitem(diagnosis.MODULES, "torch", "torch")
    monkeypatch.setattr(Surroundings, "here", lambda: bad)
    assert run("doctor").exit_code == 1


def test_every_kind_of_gpu_in_a_box_is_told_once() -> None:
    with box("h200", "a100", "h200", "a100"):
        machine = Surroundings.here()
    names = [target.name for target in machine.targets]
    assert names[:3] == ["NVIDIA H200", devices()["a100"].product, "cpu"]
    assert len(machine.gpus) == 4
