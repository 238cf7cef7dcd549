"""The virtual GPU: Triton's own launcher, on a stand-in for the driver."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import version
from io import BytesIO
from itertools import chain, starmap
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, final
from unittest.mock import patch

import torch
from attrs import define, field
from torch._C import _are_functorch_transforms_active

from attn_graph.errors import GraphError
from attn_graph.lowering.cudnn.offline import compile_stand_in
from attn_graph.machine.target import VIRTUAL, Target
from attn_graph.machine.tensors import is_watched
from attn_graph.plan.cache import cache as plans
from attn_graph.testing.gpu.apart import run_launch
from attn_graph.testing.gpu.dsl import named_tensors, serve_package
from attn_graph.testing.gpu.faults import Omission, UnknownInstructionError
from attn_graph.testing.gpu.instructions import translate
from attn_graph.testing.gpu.memory import Memory
from attn_graph.testing.gpu.program import Launch
from attn_graph.testing.gpu.regions import Unset

SOURCE = Path(__file__).with_name("driver.c")
HIDDEN = 9  # arguments of a launcher before those of the kernel


class LaunchRecord(ctypes.Structure):
    """A launch, in the form of driver.c."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("taken", ctypes.c_uint),
        ("parameters", ctypes.c_ubyte * 32764),
    )


@cache
def load_driver() -> ctypes.CDLL:
    """Build the stand-in, and load it in place of the driver. Raises RuntimeError."""
    import triton

    if torch.cuda.is_available():
        raise RuntimeError("a virtual GPU needs a machine without one; here PyTorch can use a GPU")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    path = compile_stand_in(Path(mkdtemp(prefix="attn_graph_")), SOURCE, f"-I{include}", "-w")
    return ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


def load_launcher() -> Any:  # Any: a class of Triton's
    """Triton's launcher, which is compiled once and stays in its cache."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaUtils

    before = knobs.nvidia.libcuda_path
    knobs.nvidia.libcuda_path = str(Path(load_driver()._name).parent)
    try:
        return CudaUtils()
    finally:
        knobs.nvidia.libcuda_path = before


LOADED: dict[int, str] = {}  # the PTX of each loaded function


@final
class Launcher:
    """Launches one kernel: by Triton's launcher, then by the virtual GPU.

    Triton keeps it as long as the kernel, perhaps longer than the GPU.
    """

    def __init__(self, src: Any, metadata: Any) -> None:  # Any: Triton's
        from triton.backends.nvidia.driver import CudaLauncher

        self.launch = CudaLauncher(src, metadata)
        self.names: tuple[str, ...] = tuple(src.fn.arg_names)

    def __call__(self, *arguments: Any) -> None:  # Any: as Triton passes them
        from triton.runtime import driver

        self.launch(*arguments)
        active: Any = driver.active  # Any: a Driver, unknown to Triton's annotation
        gpu = active.gpu
        each = starmap(named_tensors, zip(self.names, arguments[HIDDEN:], strict=True))
        tensors = dict(chain.from_iterable(each))
        if active.scratch:
            tensors["the kernel's own memory"] = active.scratch.pop()
        gpu.execute(tensors)


def omissions_of(triton: str) -> frozenset[Omission]:
    """The steps that a version of Triton omits from its compiled code.

    From 3.9 on LLVM may move readers of the registers of tcgen05.ld before the wait for them.
    """
    late = tuple(map(int, triton.split(".")[:2])) >= (3, 9)
    return frozenset({Omission.TENSOR_LOADS} if late else ())


@final
@define(eq=False)
class VirtualGpu:
    """A GPU whose code the CPU executes.

    target: the GPU. seed: for the order of programs, warps and copies; None: those furthest behind
    first. omits: faults that are only noted. processes: that share the programs of a launch.
    reachable: tensors found by kernels at addresses stored in other tensors.
    notes: steps required by the PTX ISA but omitted by its kernels, harmlessly on known GPUs.
    kernels: the number of executed programs of each, by name.
    """

    target: Target
    seed: int | None = None
    omits: frozenset[Omission] = frozenset()
    processes: int = 1
    reachable: list[torch.Tensor] = field(factory=list[torch.Tensor], repr=False)
    notes: set[str] = field(factory=set[str])
    kernels: Counter[str] = field(factory=Counter[str])
    unset: Unset = field(factory=Unset, repr=False)

    @property
    def programs(self) -> int:
        """The number of executed programs."""
        return self.kernels.total()

    def execute(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Execute the launch last given to the driver. Raises Fault."""
        record = LaunchRecord()
        if not load_driver().take_launch(ctypes.byref(record)):
            return  # of no program
        text, contents = LOADED[record.function], BytesIO(bytes(record.parameters))
        sizes = (tuple(record.grid), tuple(record.block), record.shared)
        parameters = [contents.read(size) for size in translate(text).kernel.parameters.values()]
        self.execute_kernel(text, sizes, parameters, tensors, omissions_of(version("triton")))

    def execute_kernel(
        self,
        text: str,
        sizes: tuple[Sequence[int], Sequence[int], int],
        parameters: Sequence[bytes],
        tensors: Mapping[str, torch.Tensor],
        omits: frozenset[Omission],
    ) -> None:
        """Execute a launch of PTX `text`. Raises Fault.

        sizes: grid, block and bytes of shared memory. parameters: the bytes of each.
        tensors: those it may touch. omits: its known omissions.
        """
        code = translate(text)
        (x, y, z), (threads, *others), shared = sizes
        if others != [1, 1]:
            raise UnknownInstructionError(f"{code} has a block of {[threads, *others]} threads")
        given = dict(zip(code.kernel.parameters, parameters, strict=True))
        reached = {f"reachable[{n}]": x for n, x in enumerate(self.reachable)}
        memory = Memory.around({**tensors, **reached}, self.unset)
        drawn = self.seed, self.notes
        cores = self.target.multiprocessors or 1
        known = omits | self.omits
        launch = Launch(code, (x, y, z), threads, shared, given, memory, *drawn, known, cores)
        run_launch(launch, memory, self.processes)
        self.kernels[code.kernel.name] += x * y * z


@final
class Driver:
    """Triton's driver of a device, while a virtual GPU is in use."""

    def __init__(self, gpu: VirtualGpu) -> None:
        from triton.backends.compiler import GPUTarget

        self.gpu, self.texts, self.scratch = gpu, dict[str, str](), list[torch.Tensor]()
        self.target = GPUTarget("cuda", gpu.target.sm, 32)
        own = {"load_binary": self.load_binary, "get_device_properties": self.get_properties}
        self.own_utils = load_launcher()
        self.utils = SimpleNamespace(**{**vars(self.own_utils), **own})
        self.launcher_cls = Launcher

    def get_current_target(self) -> Any:  # Any: Triton's
        return self.target

    def get_current_device(self) -> int:
        """A number that no GPU has, by which Triton keeps kernels apart."""
        return 1000 + self.gpu.target.sm

    def get_properties(self, device: int | None) -> Any:  # Any: numbers by name
        """Of the one GPU; its number is that of tensors of the CPU, None."""
        return self.own_utils.get_device_properties(0)

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def allocate(self, size: int, alignment: int, stream: object) -> torch.Tensor:
        """Memory for the next kernel's own use, in place of the user's."""
        made = torch.empty(size + alignment, dtype=torch.int8)
        start = -made.data_ptr() % alignment
        self.scratch.append(made[start : start + size])
        return self.scratch[-1]

    def get_benchmarker(self) -> Any:  # Any: a function that Triton calls
        return self.rate_equal

    def rate_equal(
        self, call: object, quantiles: Sequence[float] | None = None, **options: object
    ) -> float | list[float]:
        """Times for Triton's autotuner, all equal: it takes its first configuration."""
        self.gpu.notes.add("nothing is timed: triton.autotune takes the first configuration")
        return [1.0] * len(quantiles) if quantiles else 1.0

    def note_text(self, *given: Any) -> None:  # Any: as Triton's hook is called
        """Keep the PTX of a kernel that Triton is about to load."""
        _, _, name, group, _ = given
        (path,) = (Path(path) for file, path in group.items() if file.endswith(".ptx"))
        self.texts[name] = path.read_text()

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        loaded: tuple[int, ...] = self.own_utils.load_binary(name, kernel, shared, device)
        text = LOADED[loaded[1]] = self.texts.pop(name)
        found = translate(text).kernel
        sizes = [*found.parameters.values()]
        array = (ctypes.c_uint * len(sizes))(*sizes)
        if not load_driver().describe_function(ctypes.c_void_p(loaded[1]), len(sizes), array):
            raise RuntimeError(f"{name} has {len(sizes)} parameters, too many for a virtual GPU")
        return *loaded[:2], found.registers_of_thread(found.threads), *loaded[3:]


@contextmanager
def virtual_gpu(
    name: str | Target,
    *,
    seed: int | None = None,
    omits: Collection[Omission] = (),
    processes: int = 1,
) -> Iterator[VirtualGpu]:
    """Within this block Triton's kernels run on the CPU as on a GPU.

    It is the default target of `compile`, and of attention on tensors of the CPU; only backends
    that the CPU can emulate are candidates. Plans take tensors of the CPU, and raise
    PlanTargetError once the block is over. Kernels are compiled
    for the GPU `name`, launched by Triton's own launcher, and the compiled code is executed:
    instruction by instruction, asynchronous ones as late as possible, with every access to memory
    checked. Undefined behaviour raises Fault; that of `omits` is noted. It is slow: a tile of
    64 x 64 scores takes some hundredths of a second. Other threads may not use Triton. Raises
    RuntimeError if PyTorch can use a GPU, or if Triton interprets.
    """
    from triton import knobs
    from triton.runtime import driver

    target = Target.of(name) if isinstance(name, str) else name
    if target.kind != "cuda":
        raise GraphError(f'virtual_gpu: {target} is not a GPU; write its name, "h200"')
    gpu = VirtualGpu(target, seed, frozenset(omits), processes)
    if knobs.runtime.interpret or gpu.target in VIRTUAL:
        raise RuntimeError("Triton interprets kernels here, or another virtual GPU is in use")
    before = driver._active
    load_driver().describe_device(
        target.shared_memory, target.shared_memory_per_sm, target.multiprocessors
    )
    own = Driver(gpu)
    hook: Any = knobs.runtime.kernel_load_start_hook  # Any: a list of functions of Triton's
    with ExitStack() as undo:
        undo.callback(setattr, driver, "_active", before)
        undo.callback(hook.remove, own.note_text)
        undo.callback(plans.clear)  # plans for an emulated GPU are other ones
        undo.callback(VIRTUAL.discard, target)
        stand_in: Any = own  # Any: Triton's annotation names its base class
        driver.set_active(stand_in)
        hook.add(own.note_text)
        allocator = SimpleNamespace(get=lambda: own.allocate, set=lambda given: None)
        undo.enter_context(patch("triton.runtime._allocation._allocator", allocator))
        VIRTUAL.add(target)
        plans.clear()
        for name in ("empty", "empty_like", "empty_strided"):
            undo.enter_context(patch.object(torch, name, watch(getattr(torch, name), gpu.unset)))
        for name, function in questions(target).items():
            undo.enter_context(patch.object(torch.cuda, name, function))
        undo.enter_context(serve_package(target, gpu.execute_kernel))
        yield gpu


def questions(target: Target) -> dict[str, Any]:  # Any: functions
    """Functions of torch.cuda that say what a GPU is; others still find none."""
    capability = divmod(target.sm, 10)
    properties = SimpleNamespace(
        name=f"virtual {target.kind}",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=target.multiprocessors,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=target.shared_memory,
        shared_memory_per_multiprocessor=target.shared_memory_per_sm,
        warp_size=32,
    )
    return {
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: capability,
    }


def watch(make: Any, unset: Unset) -> Any:  # Any: a function of PyTorch's
    """A function that makes tensors without contents, and adds them to `unset`."""

    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = make(*arguments, **options)
        plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        fake = is_watched(tensor) or _are_functorch_transforms_active()  # without memory
        if plain and not fake:
            unset.add(tensor)
        return tensor

    return made
