"""FlashAttention 4 on a virtual GPU: its own host code, on a stand-in for its DSL's runtime.

The package's functions take tensors of the CPU while a virtual GPU is in use. They compile kernels
as on a machine with that GPU. The compiled host code launches them, through
`VirtualGpu.execute_kernel`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any, final
from unittest.mock import patch

import torch
from attrs import define, field

from attn_graph.lowering.cudnn.offline import compile_stand_in
from attn_graph.machine.target import Target
from attn_graph.testing.gpu.faults import Omission, UnknownInstructionError
from attn_graph.testing.gpu.instructions import translate
from attn_graph.testing.gpu.maps import MAP, MAP_BYTES, MAP_RANK

SOURCE = Path(__file__).with_name("dsl.c")
NAME = "libcute_dsl_runtime.so"  # of the runtime: the DSL looks for it
INTERFACE = "flash_attn.cute.interface"
OMITTED = {  # what the package's kernels for a major compute capability leave out; virtual GPUs
    # have the instructions of those for these alone
    9: frozenset(
        {Omission.ARRIVALS, Omission.COPIES, Omission.EQUAL_STORES, Omission.UNWRITTEN_LOADS}
    ),
    10: frozenset(Omission) - {Omission.UNEQUAL_STORES},
}
PLAIN = {2: [0], 4: [1, 1, 1], 6: []}  # attributes of a launch that change nothing: cooperation,
# clusters of one program, and programs that may begin before those of the launch before end
GPU = 2  # a kind of device, as DLPack numbers them
DEVICE = 8  # bytes before the kind of device in a DLTensor
MAP_USED = 64  # bytes of a tensor map that hold something
MAP_KIND = 0x40002  # its kind, but for bits
MAP_VARIES = 0x2067F0  # that hold the rank, the type, the swizzling, and if it is 128 KiB or more
MAP_ITEMS = {6: 2, 7: 4, 10: 2}  # bytes of an element, by the number of its type: f16, f32, bf16


class Config(ctypes.Structure):
    """A launch, in the form of dsl.c."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


class Attribute(ctypes.Structure):
    """An attribute of a launch: cudaLaunchAttribute of CUDA's runtime."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    )


Execute = Callable[..., None]
SERVE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(Config), ctypes.POINTER(ctypes.c_void_p)
)


@cache
def build_runtime() -> Path:
    """Build the stand-in. Raises RefusedError without a C compiler."""
    folder = Path(mkdtemp(prefix="attn_graph_"))
    return Path(compile_stand_in(folder, SOURCE, "-w")).rename(folder / NAME)


@final
@define
class Call:
    """A call of a compiled function: its kernel's PTX, bytes of its parameters, and its launches.

    A launch has a name, sizes, attributes and parameters.
    """

    text: str
    sizes: list[int]
    launches: list[tuple[str, Any, Any, list[bytes]]] = field(factory=list[Any])


RUNNING: list[Call] = []  # the current call, if any
GPUS: list[tuple[int, Execute]] = []  # major compute capabilities of virtual GPUs that serve the
# package, and `VirtualGpu.execute_kernel` of each; the last one is in use
COMPILED: dict[tuple[str, int], dict[Any, Any]] = {}  # by function and GPU: the package's caches


def as_virtual(compile_function: Callable[..., Any]) -> Callable[..., Any]:  # Any: the DSL's
    """The DSL's `compile`; its functions take tensors of the CPU."""

    def compiled(*arguments: Any, **options: Any) -> Any:
        function = compile_function(*arguments, **options)
        return partial(call_compiled, function, function.artifacts.PTX)

    return compiled


def call_compiled(function: Any, text: str, *arguments: Any) -> None:  # Any: the DSL's
    """Call a compiled function and execute its launches. Raises Fault."""
    each = (named_tensors(f"argument {n}", x) for n, x in enumerate(arguments))
    tensors = dict(chain.from_iterable(each))
    call = Call(text, [*translate(text).kernel.parameters.values()])
    RUNNING.append(call)
    try:
        function(*map(to_gpu, arguments))
    finally:
        RUNNING.pop()
    for name, sizes, attributes, contents in call.launches:
        check_launch(text, name, attributes)
        major, execute = GPUS[-1]
        execute(text, sizes, [*map(translate_map, contents)], tensors, OMITTED[major])
    if not call.launches:
        raise RuntimeError("a compiled function of the CuTe DSL launched nothing")


def named_tensors(name: str, x: Any) -> Iterator[tuple[str, torch.Tensor]]:  # Any: an argument
    """Tensors in an argument, also in sequences and in Triton's descriptors of tensors."""
    if isinstance(x, torch.Tensor):
        yield name, x
    elif isinstance(x, tuple | list):
        for n, each in enumerate(x):
            yield from named_tensors(f"{name}[{n}]", each)
    elif isinstance(base := getattr(x, "base", None), torch.Tensor):
        yield name, base


def to_gpu(x: Any) -> Any:  # Any: an argument
    """An argument whose tensors claim to be on a GPU."""
    import tvm_ffi

    if isinstance(x, torch.Tensor):
        return tvm_ffi.from_dlpack(OnGpu(x))
    if isinstance(x, tuple | list):
        each = map(to_gpu, x)
        return type(x)(*each) if hasattr(x, "_fields") else type(x)(each)
    return x


@final
class OnGpu:
    """A tensor of the CPU that claims to be on a GPU, in DLPack's terms."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()

    def __dlpack__(self, **options: object) -> object:
        """The tensor, with another kind of device."""
        capsule: object = torch._C._to_dlpack(self.tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + DEVICE).value = GPU
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return GPU, 0


def note_launch(name: bytes, config: Any, parameters: Any) -> int:  # Any: pointers of ctypes
    """The runtime launches a kernel. It is executed after the DSL's host code has returned.

    That code has no way to hand an error on.
    """
    call, given = RUNNING[-1], config.contents
    pointer = ctypes.cast(given.attributes, ctypes.POINTER(Attribute))
    attributes = [(x.kind, [*x.value]) for x in pointer[: given.count]]
    sizes = (tuple(given.grid), tuple(given.block), int(given.shared))
    contents = [ctypes.string_at(parameters[n], size) for n, size in enumerate(call.sizes)]
    call.launches.append((name.decode(), sizes, attributes, contents))
    return 0


SERVER = SERVE(note_launch)


def check_launch(text: str, name: str, attributes: list[tuple[int, list[int]]]) -> None:
    """Raise UnknownInstructionError for a launch that virtual GPUs do not support."""
    if f".entry {name}(" not in text:
        raise UnknownInstructionError(f"{name} is not the kernel that was compiled for this call")
    for kind, value in attributes:
        plain = PLAIN.get(kind)
        if plain is None or value[: len(plain)] != plain:
            raise UnknownInstructionError(
                f"{name} is launched with attribute {kind}: {value[:3]}, which the virtual GPU "
                "does not have"
            )


def translate_map(contents: bytes) -> bytes:
    """A parameter; a tensor map is converted from the hardware's form to that of driver.c.

    Raises UnknownInstructionError for other contents. The form was read off maps of known tensors:
    the rank, type and swizzling are in the third word of 32 bits; strides are in units of 16 bytes;
    sizes and boxes are stored less one. All else is 0.
    """
    if len(contents) != MAP_BYTES:
        return contents
    words = struct.unpack("<32I", contents)
    kind = words[2]
    rank, item = (kind >> 4 & 7) + 1, MAP_ITEMS.get(kind >> 7 & 15)
    if item is None or rank > MAP_RANK or kind & ~MAP_VARIES != MAP_KIND:
        raise UnknownInstructionError(f"a tensor map of kind {kind:#x}")
    known = {*range(8 + 4 * rank), *range(32, 32 + 4 * rank), *range(55, 55 + rank)}
    other = [n for n in range(MAP_USED) if n not in known and contents[n]]
    if other:
        raise UnknownInstructionError(f"a tensor map of rank {rank} with more in bytes {other}")
    shape = [x + 1 for x in words[8 : 8 + rank]]
    strides = [16 * x for x in words[3 : 2 + rank]]
    box = [x + 1 for x in contents[55 : 55 + rank]]
    zeros = [0] * (MAP_RANK - rank)
    address = words[0] | words[1] << 32
    fields = (*shape, *zeros, *strides, *zeros, *box, *zeros, rank, item, kind >> 13 & 3, 0)
    return MAP.pack(address, *fields)


# The package


def find_package() -> object:
    """The package's module spec, without importing it; None if it is missing."""
    home = find_spec("flash_attn")
    places = (home and home.submodule_search_locations) or ()
    return next((p for p in places if (Path(p) / "cute" / "interface.py").is_file()), None)


@contextmanager
def serve_package(target: Target, execute: Execute) -> Iterator[None]:
    """Within this block the package's functions run on a virtual GPU, if it has kernels for it."""
    if target.sm // 10 not in OMITTED or find_package() is None:
        yield
        return
    with ExitStack() as undo:
        undo.enter_context(patch.dict(os.environ, environment(target)))
        undo.callback(GPUS.pop)
        GPUS.append((target.sm // 10, execute))
        if INTERFACE in sys.modules:
            undo.enter_context(patch_package(sys.modules[INTERFACE], target))
        execute_module = SourceFileLoader.exec_module

        def execute_and_change(loader: SourceFileLoader, module: ModuleType) -> None:
            execute_module(loader, module)
            if module.__name__ == INTERFACE:
                undo.enter_context(patch_package(module, target))

        undo.enter_context(patch.object(SourceFileLoader, "exec_module", execute_and_change))
        yield


def environment(target: Target) -> dict[str, str]:
    arch = f"sm_{target.sm}a"
    runtime = build_runtime()
    return {
        "FLASH_ATTENTION_ARCH": arch,
        "FLASH_ATTENTION_NUM_SMS": str(target.multiprocessors),
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_LIBS": str(runtime),
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(runtime.parent),
    }


@contextmanager
def patch_package(interface: Any, target: Target) -> Iterator[None]:  # Any: the package is untyped
    """Within this block the package compiles for a GPU, and takes tensors of the CPU."""
    from cutlass import cute
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.utils import HardwareInfo
    from flash_attn.cute import cute_dsl_utils, utils

    load_runtime().serve(SERVER, target.shared_memory)
    with ExitStack() as undo:

        def change(home: Any, name: str, value: Any) -> None:
            undo.enter_context(patch.object(home, name, value))

        for dsl in DSLSingletonMeta._instances.values():
            if dsl.envar.shared_libs != str(build_runtime()):  # which would look for a GPU
                raise RuntimeError(
                    f"the CuTe DSL was imported with {dsl.envar.shared_libs}; import "
                    "flash_attn.cute within virtual_gpu(...) first, where its runtime is a stand-in"
                )
            change(dsl.envar, "arch", f"sm_{target.sm}a")
        change(HardwareInfo, "__init__", lambda self, device_id=0: None)
        change(HardwareInfo, "get_device_multiprocessor_count", lambda self: target.multiprocessors)
        for home in (cute_dsl_utils, utils):
            change(home, "from_dlpack", as_fake(home.from_dlpack))
        change(cute, "compile", as_virtual(cute.compile))
        interface._get_device_arch.cache_clear()
        undo.callback(interface._get_device_arch.cache_clear)
        for name, function in [*vars(interface).items()]:
            if hasattr(function, "compile_cache"):  # all calls go through these
                served = on_gpu(function)
                served.compile_cache = COMPILED.setdefault((name, target.sm), {})
                change(interface, name, served)
        yield


def load_runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(build_runtime()))


def as_fake(convert: Callable[..., Any]) -> Callable[..., Any]:  # Any: the DSL's
    """A function that describes tensors to the compiler, each as on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def described(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            with FakeTensorMode():
                tensor = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
                )
        return convert(tensor, *arguments, **options)

    return described


def on_gpu(function: Callable[..., Any]) -> Any:  # Any: a function of the package's
    """A function of the package; during its calls all tensors claim to be on a GPU."""

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with patch.object(torch.Tensor, "is_cuda", True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its arguments to its own compiler
            return function(*arguments, **options)

    return called
