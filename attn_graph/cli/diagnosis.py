"""What is on a machine, what runs there, and what is wrong with it: values, told by `doctor`."""

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
from attn_graph.backend import Backend, Options
from attn_graph.lowering.cudnn.backend import versions
from attn_graph.lowering.cudnn.case import Case
from attn_graph.lowering.cudnn.limits import reasons
from attn_graph.lowering.cudnn.offline import compiler, has_driver
from attn_graph.lowering.cudnn.plan import READ_BY_CUDNN
from attn_graph.lowering.problem import sole
from attn_graph.machine.gpus import devices
from attn_graph.machine.target import LIBRARIES, local_devices
from attn_graph.machine.torch_switches import Switches, read_switches
from attn_graph.planner.remedies import Request
from attn_graph.spec import DTYPES

MODULES = {"triton": "triton", "nvidia-cudnn-frontend": "cudnn"}  # of which library, imported so
VARIABLES = ("TRITON_INTERPRET", READ_BY_CUDNN)  # of the environment, that change what we do
HOPPER = 90  # no limit of cuDNN's that concerns versions alone differs between GPUs
NEED = re.compile(r"([\w.-]+)\s*(==|>=)\s*([\d.]+)")


@final
@frozen
class Surroundings:
    """What a diagnosis rests on.

    target: what runs by default; others: GPUs of other kinds beside it. cuda: the CUDA that PyTorch
    is built for, if any. driver: whether NVIDIA's driver is there. needs: who, and what it needs,
    such as ("torch", "triton==3.7.1"). lost: libraries that are installed and whose modules are not
    found. compiler: of C. variables: of the environment, that are set. gpus: by name and memory.
    threads: that PyTorch uses on the processor, and that the system gives.
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
        return cls(
            target,
            cpu,
            platform.python_version(),
            f"{platform.system()} {platform.machine()}",
            f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
            (torch.get_num_threads(), processors()),
            tuple(gpus()),
            torch.version.cuda,
            has_driver(),
            tuple(needs()),
            tuple(name for name, _ in target.libraries if lacks_module(name)),
            compiler(),
            tuple((name, os.environ[name]) for name in VARIABLES if name in os.environ),
            read_switches(),
            tuple(other_gpus(target)),
        )

    @property
    def targets(self) -> list[ag.Target]:
        """This machine's own, then all of the table; each with the libraries that work here."""
        own = [self.target, *self.others] if self.target.kind == "cuda" else []
        found = [*own, self.cpu, *map(ag.Target.of, devices())]
        works = tuple(x for x in self.cpu.libraries if x[0] not in self.lost)
        return [evolve(target, libraries=works) for target in found]


def other_gpus(target: ag.Target) -> Iterator[ag.Target]:
    """This machine's GPUs of other kinds than the target, each kind once."""
    for kind in dict.fromkeys(map(ag.Target.here, local_devices())):
        if kind.kind == "cuda" and kind != target:
            yield kind


def processors() -> int:
    """How many logical processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def processor() -> str:
    """The CPU's name, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def gpus() -> Iterator[str]:
    for n in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(n)
        yield f"{found.name} (sm_{found.major}{found.minor}), {found.total_memory / 2**30:.4g} GiB"


def needs() -> Iterator[tuple[str, str]]:
    """What PyTorch and this library ask of the libraries that backends use."""
    for who in ("torch", "attn-graph"):
        try:
            asked = requires(who) or []
        except PackageNotFoundError:  # run from a checkout
            continue
        for text in asked:
            need = NEED.match(text)
            if need and need[1] in LIBRARIES:
                yield who, need[0]


def lacks_module(library: str) -> bool:
    """Whether a library that is installed has no module."""
    return library in MODULES and find_spec(MODULES[library]) is None


@final
@frozen
class Verdict:
    """Whether a backend takes a plain attention on a target, both passes; if not, every reason.

    keys: of the reasons.
    """

    backend: str
    target: str
    reasons: tuple[str, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, backend: Backend, target: ag.Target, switches: Switches) -> Verdict:
        """A backend's verdict on the plainest graph there is."""
        reasons = target_reasons(backend, target, switches)
        texts, keys = tuple(map(str, reasons)), tuple(reason.key for reason in reasons)
        return cls(backend.name, target.name, texts, keys)


@final
@frozen
class StoreState:
    """The store: where, how many files of how many bytes in all, and how many are damaged."""

    folder: str
    files: int
    bytes: int
    damaged: int


@final
@frozen
class Diagnosis:
    """What `doctor` tells. problems: what is broken, with what helps; notes: what to know."""

    machine: Surroundings
    verdicts: tuple[Verdict, ...]
    kept: StoreState
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
        told = asdict(self, filter=lambda attribute, _: attribute.name != "machine")
        return {"attn_graph": ag.__version__, "machine": machine, **told}


def diagnose(machine: Surroundings, store: ag.Store) -> Diagnosis:
    entries = [*store.entries()]
    damaged = sum(entry.key is None for entry in entries)
    kept = StoreState(str(store.folder), len(entries), sum(e.bytes for e in entries), damaged)
    found = [
        Verdict.of(backend, target, machine.switches)
        for backend in ag.BACKENDS
        for target in machine.targets
    ]
    wrong = (*find_problems(machine), *store_problems(kept))
    return Diagnosis(machine, tuple(found), kept, wrong, tuple(useful_notes(machine)))


def plain_request(target: ag.Target, options: Options) -> Request:
    """A plain attention of the dtype that a target is used for."""
    x = ag.TensorSpec((1, 1, 128, 64), DTYPES["f16" if target.kind == "cuda" else "f32"])
    return Request.of(ag.attention(x, x, x), options)


def target_reasons(
    backend: Backend, target: ag.Target, switches: Switches
) -> tuple[ag.Reason, ...]:
    """Every reason against the plainest graph there is: so they are the target's, not a graph's."""
    precision = switches.precision(target.kind)
    asked = plain_request(target, Options(precision=precision, switches=switches))
    both = (
        reason
        for graph in (asked.forward(), asked.backward())
        for reason in backend.reasons(graph, target, asked.options)
    )
    return tuple(dict.fromkeys(both))


def find_problems(machine: Surroundings) -> Iterator[str]:
    """What is broken."""
    libraries = dict(machine.cpu.libraries)
    for told in dict.fromkeys(version_reasons(machine.cpu)):
        yield f"cuDNN {told}; pip install -U 'attn-graph[cuda]'"
    for who, need in machine.needs:
        name, sign, wanted = NEED.fullmatch(need).groups()  # type: ignore[union-attr]  # matched
        if name in libraries and not satisfies(libraries[name], sign, wanted):
            yield f"{who} needs {need}, and {libraries[name]} is installed; pip install '{need}'"
    for name in machine.lost:
        yield (
            f"{name} {libraries[name]} is installed, and its module {MODULES[name]} is not found; "
            f"pip install --force-reinstall {name}"
        )


def store_problems(kept: StoreState) -> Iterator[str]:
    if kept.damaged:
        yield (
            f"{kept.damaged} of {kept.files} stored files are damaged, and are not used; "
            "attn-graph cache verify says which, attn-graph cache clear deletes all"
        )


def version_reasons(target: ag.Target) -> Iterator[ag.Reason]:
    """What is known against these versions of cuDNN and its frontend, whatever the graph is."""
    backend, frontend = versions(target)
    if backend is None or frontend is None:
        return
    asked = plain_request(ag.Target.of("h200"), Options())
    for graph in (asked.forward(), asked.backward()):
        problem = sole(graph)
        assert problem is not None  # it is one attention
        yield from reasons(Case(problem, HOPPER, backend, frontend))


def satisfies(version: str, sign: str, wanted: str) -> bool:
    """Whether a version is the wanted one, or no older."""
    found, due = (tuple(map(int, re.findall(r"\d+", x))) for x in (version.split("+")[0], wanted))
    return found[: len(due)] == due if sign == "==" else found >= due


def useful_notes(machine: Surroundings) -> Iterator[str]:
    """What is not broken, and good to know."""
    if machine.cuda is None:
        driver = "NVIDIA's driver is here, and " if machine.driver else ""
        yield (
            f"{driver}PyTorch is built without CUDA: what is said of GPUs holds for planning, and "
            "for machines whose PyTorch has it"
        )
    if machine.cpu.interprets:
        yield "TRITON_INTERPRET is set: Triton's kernels run on the CPU, slowly, and on no GPU"
    usual = Switches()._asdict()
    for name, now in machine.switches._asdict().items():
        if now != usual[name]:
            yield f"PyTorch's switch {name} is {now}: docs/torch-controls.md"
