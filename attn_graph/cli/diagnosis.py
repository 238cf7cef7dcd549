"""Diagnoses a machine: its devices and libraries, its backends, its faults. `doctor` prints it."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import final

import torch
from attrs import asdict, evolve, field, frozen

import attn_graph as ag
from attn_graph.instruments.remedies import Question
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.cudnn.backend import BACKEND as CUDNN
from attn_graph.lowering.cudnn.offline import compiler, has_driver
from attn_graph.lowering.cudnn.plan import READ_BY_CUDNN
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.gpus import devices
from attn_graph.machine.target import FRONTEND, LIBRARIES, local_devices
from attn_graph.machine.torch_switches import Switches, read_switches
from attn_graph.measuring.self_check import describe_check, stored_proofs
from attn_graph.spec import DTYPES

MODULES = {"triton": "triton", FRONTEND: "cudnn"}  # of which library, imported so
VARIABLES = ("TRITON_INTERPRET", READ_BY_CUDNN)  # of the environment, that change what we do
NEED = re.compile(r"([\w.-]+)\s*(==|>=)\s*([\d.]+)")


@final
@frozen
class Surroundings:
    """The inputs of a diagnosis.

    target: the default device. others: GPUs of other kinds in this machine. cuda: the CUDA version
    of PyTorch's build, if any. driver: True if NVIDIA's driver is there. needs: a library and one
    of its requirements, such as ("torch", "triton==3.7.1"). lost: installed libraries without their
    modules. compiler: of C. variables: set variables of the environment. gpus: as text. threads:
    PyTorch's threads on the CPU, and the processors available to the process.
    """

    target: ag.Target
    cpu: ag.Target
    python: str
    system: str
    processor: str
    threads: tuple[int, int]
    gpus: tuple[str, ...] = ()
    cuda: str | None = None
    driver: bool = False
    needs: tuple[tuple[str, str], ...] = ()
    lost: tuple[str, ...] = ()
    compiler: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    switches: Switches = field(factory=Switches)
    others: tuple[ag.Target, ...] = ()

    @classmethod
    def here(cls) -> Surroundings:
        target, cpu = ag.Target.here(), ag.Target.of("cpu")
        linux = sys.platform == "linux"
        processors = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
        wanted = {name: MODULES[name] for name, _ in target.libraries if name in MODULES}
        kinds = dict.fromkeys(map(ag.Target.here, local_devices()))
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return cls(
            target,
            cpu,
            platform.python_version(),
            f"{platform.system()} {platform.machine()}",
            f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}",
            (torch.get_num_threads(), processors),
            tuple(
                f"{gpu.name} (sm_{gpu.major}{gpu.minor}), {gpu.total_memory / 2**30:.4g} GiB"
                for gpu in gpus
            ),
            torch.version.cuda,
            has_driver(),
            tuple(list_needs()),
            tuple(name for name, module in wanted.items() if find_spec(module) is None),
            compiler(),
            tuple((name, os.environ[name]) for name in VARIABLES if name in os.environ),
            read_switches(),
            tuple(kind for kind in kinds if kind.kind == "cuda" and kind != target),
        )

    @property
    def targets(self) -> list[ag.Target]:
        """This machine's targets, then all of gpus.toml, each with the libraries working here."""
        own = [self.target, *self.others] if self.target.kind == "cuda" else []
        targets = [*own, self.cpu, *map(ag.Target.of, devices())]
        works = tuple(x for x in self.cpu.libraries if x[0] not in self.lost)
        return [evolve(target, libraries=works) for target in targets]


def processor_name() -> str:
    """The CPU's name, by Linux or by Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def list_needs() -> Iterator[tuple[str, str]]:
    """The requirements of PyTorch and of this library on libraries of backends."""
    for who in ("torch", "attn-graph"):
        try:
            texts = requires(who) or []
        except PackageNotFoundError:  # run from a checkout
            continue
        for text in texts:
            need = NEED.match(text)
            if need and need[1] in LIBRARIES:
                yield who, need[0]


@final
@frozen
class Verdict:
    """A backend's reasons against a plain attention on a target, both passes, with their keys."""

    backend: str
    target: str
    reasons: tuple[str, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, backend: Backend, target: ag.Target, switches: Switches) -> Verdict:
        """A backend's verdict on the plainest graph there is."""
        reasons = reasons_on_target(backend, target, switches)
        texts, keys = tuple(map(str, reasons)), tuple(reason.key for reason in reasons)
        return cls(backend.name, target.name, texts, keys)


@final
@frozen
class StoreState:
    """The store: its folder, its files, their bytes in all, and how many files are damaged."""

    folder: str
    files: int
    bytes: int
    damaged: int


@final
@frozen
class Diagnosis:
    """The content of `doctor`. checks: each stored self-check and its outcome, as texts. problems:
    faults with their repair. notes: useful facts.
    """

    machine: Surroundings
    verdicts: tuple[Verdict, ...]
    kept: StoreState
    checks: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain numbers, texts, lists and dicts."""
        machine = asdict(self.machine) | {
            "switches": self.machine.switches._asdict(),
            "target": str(self.machine.target),
            "others": [str(target) for target in self.machine.others],
            "cpu": {"native": self.machine.cpu.native, "interprets": self.machine.cpu.interprets},
            "libraries": dict(self.machine.cpu.libraries),
            "variables": dict(self.machine.variables),
        }
        others = asdict(self, filter=lambda attribute, _: attribute.name != "machine")
        return {"attn_graph": ag.__version__, "machine": machine, **others}


def diagnose(machine: Surroundings, store: ag.extend.Store) -> Diagnosis:
    """Collect every backend's reasons on every target, and all problems."""
    entries = [*store.entries()]
    damaged = sum(entry.key is None for entry in entries)
    state = StoreState(str(store.folder), len(entries), sum(e.bytes for e in entries), damaged)
    verdicts = [
        Verdict.of(backend, target, machine.switches)
        for backend in ag.extend.BACKENDS
        for target in machine.targets
    ]
    problems = [*find_problems(machine)]
    if damaged:
        problems.append(
            f"{damaged} of {state.files} stored files are damaged, and are not used; "
            "attn-graph cache verify says which, attn-graph cache clear deletes all"
        )
    checks = tuple(
        (describe_check(key.partition(" ")[2]), str(proof)) for key, proof in stored_proofs(store)
    )
    notes = tuple(useful_notes(machine))
    return Diagnosis(machine, tuple(verdicts), state, checks, tuple(problems), notes)


def reasons_on_target(
    backend: Backend, target: ag.Target, switches: Switches
) -> tuple[ag.extend.Reason, ...]:
    """Every reason against the plainest graph there is: so they are the target's, not a graph's."""
    precision = switches.precision(target.kind)
    options = Options(precision=precision, switches=switches)
    x = ag.TensorSpec((1, 1, 128, 64), DTYPES["f16" if target.kind == "cuda" else "f32"])
    question = Question.of(Request(ag.attention(x, x, x), target, options))
    both = (
        reason
        for read in (Question.forward, Question.backward)
        for reason in backend.reasons(question.core(read))
    )
    return tuple(dict.fromkeys(both))


def find_problems(machine: Surroundings) -> Iterator[str]:
    libraries = dict(machine.cpu.libraries)
    for text in dict.fromkeys(version_reasons(machine.cpu)):
        yield f"cuDNN {text}; pip install -U 'attn-graph[cuda]'"
    for who, need in machine.needs:
        name, sign, wanted = NEED.fullmatch(need).groups()  # type: ignore[union-attr]  # matched
        if name in libraries and not satisfies(libraries[name], sign, wanted):
            yield f"{who} needs {need}, and {libraries[name]} is installed; pip install '{need}'"
    for name in machine.lost:
        yield (
            f"{name} {libraries[name]} is installed, and its module {MODULES[name]} is not found; "
            f"pip install --force-reinstall {name}"
        )


def version_reasons(target: ag.Target) -> tuple[ag.extend.Reason, ...]:
    """Reasons against these versions of cuDNN and its frontend: those on a GPU that has both."""
    if None in target.cudnn_versions:
        return ()
    hopper = evolve(ag.Target.of("h200"), libraries=target.libraries)
    return reasons_on_target(CUDNN, hopper, Switches())


def satisfies(version: str, sign: str, wanted: str) -> bool:
    """True if a version is the wanted one or, for ">=", not older."""
    numbers, needed = (
        tuple(map(int, re.findall(r"\d+", x))) for x in (version.split("+")[0], wanted)
    )
    return numbers[: len(needed)] == needed if sign == "==" else numbers >= needed


def useful_notes(machine: Surroundings) -> Iterator[str]:
    if machine.cuda is None:
        driver = "NVIDIA's driver is here, and " if machine.driver else ""
        yield (
            f"{driver}PyTorch is built without CUDA: answers for GPUs are for planning, and for "
            "machines with a CUDA build"
        )
    if machine.cpu.interprets:
        yield "TRITON_INTERPRET is set: Triton's kernels run on the CPU, slowly, and on no GPU"
    for name, now in machine.switches.changed():
        yield f"PyTorch's switch {name} is {now}: docs/torch-controls.md"
