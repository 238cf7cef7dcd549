"""Lists the instructions in other libraries' kernels that virtual GPUs lack: `make peers-survey`.

Each kernel is compiled for the GPU of one compute capability with guessed arguments, and not
executed. Those for other makers' chips are left out. Some seconds a kernel; PART=1/8 takes one
in eight of them; packages may be named.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, final
from unittest.mock import patch

from attrs import frozen

from attn_graph.testing.gpu import UnknownInstructionError, virtual_gpu
from attn_graph.testing.gpu.instructions import translate
from attn_graph.testing.gpu.ptx import JUMPS, parse
from attn_graph.testing.gpu.rules import find_rule
from attn_graph.testing.gpu.translate import steps_of

PACKAGES = ("liger_kernel.ops", "fla.ops", "fla.modules")
OTHERS = "ascend"  # in the names of modules for other makers' chips
MACHINES = {80: "a100", 90: "h100", 100: "b200"}
PATIENCE = 40  # seconds for a kernel: LLVM unrolls some without end
SIZES = (  # of constants, by name: the first pattern counts
    (r"G|HK", 1),
    (r"H\w?|B|N[TVK]|NUM_\w+", 2),
    (r"W|n_\w+", 4),
    (r"BC|[KVDMNSLTCR]C", 16),
    (r"[KVDMNSLTCR]\w?|B\w|\w*BLOCK\w*", 32),
)
FLAGS = re.compile(
    r"(USE|IS|HAS|STORE|OUTPUT|HEAD|REVERSE|REDUCE|SAVE|DO|RETURN|COMPUTE|RE|IN|ALLOW|TRANS|NORM"
    r"|SAFE|FUSE|ADD|APPLY|ENABLE|CAST|WITH|GATE|has|use|is|casting)(_|\w*$).*"
)
TABLES = re.compile(  # of whole numbers
    r"cu_seqlens|(chunk|split|block)_(indices|offsets)|.*(_idx|indices|label|target).*"
    r"|.*(offset|count|freq|ids|start).*ptr|Y_ptr|\w+_IDS"
)
NUMBERS = re.compile(
    r"[A-Z]|p|.*(scale|eps|alpha|beta|gamma|smooth|softcap|theta|temperature|TEMP|lambda|factor"
    r"|offset).*"
)
COUNTS = re.compile(
    r"[TMNHKVBSDL]|B[TSNMLC]|n_\w+|\w*(stride|STRIDE)\w*|seq_len|\w+_size|N[A-Z]|num_\w+|M_\w|\w+_start"
)


@final
@frozen
class Found:
    """A kernel, its first configuration, and names of constants computed from its arguments."""

    kernel: Any  # Any: Triton's
    config: Mapping[str, Any]
    computed: frozenset[str]


def modules_of(package: str) -> Iterator[tuple[ModuleType, str]]:
    """Modules of a package with Triton's kernels, and their texts."""
    home = Path(*importlib.import_module(package).__path__)
    for path in sorted(home.rglob("*.py")):
        text, inner = path.read_text("utf-8"), path.relative_to(home).with_suffix("").parts
        if "triton.jit" in text and not any(OTHERS in part for part in inner):
            try:
                yield importlib.import_module(".".join((package, *inner))), text
            except ImportError as error:
                print(f"not imported: {error}", flush=True)


def kernels_of(package: str) -> dict[str, Found]:
    """Kernels of a package that it launches, by module and name."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    found = dict[str, Found]()
    for module, text in modules_of(package):
        for name, given in vars(module).items():
            kernel, config, computed = given, dict[str, Any](), set[str]()
            while isinstance(kernel, (Autotuner, Heuristics)):
                if isinstance(kernel, Heuristics):
                    computed |= {*kernel.values}
                elif kernel.configs:
                    config = {**config, **kernel.configs[0].all_kwargs()}
                kernel = kernel.fn
            if not isinstance(kernel, JITFunction) or kernel.fn.__module__ != module.__name__:
                continue
            if kernel is not given or re.search(rf"\b{name}\[", text):
                found[f"{module.__name__}:{name}"] = Found(kernel, config, frozenset(computed))
    return found


def guess(found: Found, flags: bool, numbers: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """A type for each argument of a kernel, and values of its constants.

    flags: the value of those. numbers: arguments named like numbers are so, pointers otherwise.
    """
    types, constants = dict[str, str](), dict[str, Any]()
    for parameter in found.kernel.params:
        name = parameter.name
        if parameter.is_constexpr or "constexpr" in str(parameter.annotation):
            types[name], constants[name] = "constexpr", guess_constant(found, parameter, flags)
        elif TABLES.fullmatch(name) and not name.endswith("_index") and not flags:
            types[name], constants[name] = "constexpr", None
        else:
            types[name] = guess_type(name, found.kernel.src, numbers)
    return types, constants


def guess_constant(found: Found, parameter: Any, flags: bool) -> Any:  # Any: Triton's
    import triton

    name = parameter.name
    if "dtype" in name.lower():
        return triton.language.float32
    if name in found.config:
        return found.config[name]
    if name in found.computed or FLAGS.fullmatch(name) or "bool" in str(parameter.annotation):
        return flags
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size
    return parameter.default if parameter.has_default else 4


def guess_type(name: str, text: str, numbers: bool) -> str:
    """The type of an argument, by its name and its use in the kernel."""
    used = rf"(load|store|atomic_\w+|_ptr|descriptor)\(\s*\(?\s*{name}\b|\b{name} \+|\b{name}_ptr\b"
    if TABLES.fullmatch(name):
        return "*i32"
    if name.startswith("desc_"):
        return f"tensordesc<fp32[{'128, 64' if name.startswith('desc_W') else '1, 64, 64'}]>"
    is_count, is_number = COUNTS.fullmatch(name), NUMBERS.fullmatch(name)
    if name.endswith("_ptr") or (
        re.search(used, text) and not (is_count or (is_number and numbers))
    ):
        return "*fp32"
    return "fp32" if is_number and not is_count else "i32"


def unknown_in(found: Found, sm: int, *guesses: bool) -> list[str]:
    """Compile a kernel: the opcodes in it that are unknown, or what else its translation lacks."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants = guess(found, *guesses)
    options = {name: found.config.get(name, n) for name, n in (("num_warps", 4), ("num_stages", 2))}
    source: Any = ASTSource  # Any: Triton's own annotations differ from its use
    made = triton.compile(
        source(found.kernel, types, constants), target=GPUTarget("cuda", sm, 32), options=options
    )
    opcodes = {step.opcode for step in steps_of(parse(made.asm["ptx"]))} - {*JUMPS}
    unknown = sorted(x for x in opcodes if not x.startswith("mov.") and find_rule(x) is None)
    if not unknown:
        try:
            translate(made.asm["ptx"])
        except UnknownInstructionError as error:
            return [str(error)]
    return unknown


def survey(pipe: Connection, found: Found, sm: int, *guesses: bool) -> None:
    """In a process of its own: LLVM may abort, or never end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipe.send(unknown_in(found, sm, *guesses))


def ask(found: Found, sm: int) -> list[str] | None:
    """The unknown of a kernel; None if it compiles with no guess, or not in time."""
    context = get_context("fork")
    for guesses in product((True, False), (False, True)):
        end, pipe = context.Pipe(duplex=False)
        child = context.Process(target=survey, args=(pipe, found, sm, *guesses))
        child.start()
        pipe.close()
        try:
            unknown: list[str] | None = end.recv() if end.poll(PATIENCE) else None
            return unknown
        except EOFError:  # it does not compile
            continue
        finally:
            child.kill()
            child.join()
    return None


def main(sm: int, part: int, parts: int) -> None:
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    with (
        TemporaryDirectory() as folder,
        patch.object(knobs.cache, "dir", folder),
        patch.object(CUDABackend, "make_cubin", lambda *given: b""),  # only the text counts
        virtual_gpu(MACHINES[sm]),
    ):
        for package in sys.argv[1:] or PACKAGES:
            counts = Counter[str]()
            found = kernels_of(package)
            for name in sorted(found)[part - 1 :: parts]:
                unknown = ask(found[name], sm)
                kind = "not compiled" if unknown is None else "unknown" if unknown else "known"
                counts[kind] += 1
                print(f"{kind}: {name}", *(unknown or ()), flush=True)
            print(
                f"{package}: of {len(found)} kernels {counts.total()}: {dict(counts)}", flush=True
            )


if __name__ == "__main__":
    main(int(os.environ.get("SM", "90")), *map(int, os.environ.get("PART", "1/1").split("/")))
