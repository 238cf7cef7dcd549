"""FlashAttention 4's kernels, compiled ahead in a process of their own for a GPU, present or not.

The package keeps its compiled files in a folder of ours, writable by the user alone, as loading a
file runs it. The store keeps the kernels' resources with them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from attrs import asdict, frozen

from attn_graph.errors import Reason
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.processes import run_apart
from attn_graph.lowering.reasons import dead_planner
from attn_graph.machine.store import Store, Unfit
from attn_graph.machine.target import FLASH, Target, version_of

FORM = 2  # of the stored bytes
JOINED = "{limit}, {actual}"
PATIENCE = 300  # seconds; a kernel takes two to eight
PROGRAM = "from attn_graph.lowering.fa4.builder import main; main()"
FAMILIES = {9: "sm_{}a", 10: "sm_{}a", 11: "sm_{}a"}  # their kernels run on one kind of GPU


@final
@frozen
class CompiledKernel:
    """Resources of one compiled kernel: registers and bytes spilled of each thread."""

    kernel: str
    registers: int
    spilled: int
    ptx: str

    def __str__(self) -> str:
        worse = f"{self.spilled:,} bytes spilled" if self.spilled else "nothing spilled"
        return f"{self.kernel}: {self.registers} registers, {worse}"


def compile_call(
    call: Mapping[str, Any],  # Any: JSON, as `Fa4Call.plain` gives it
    name: str,
    target: Target,
    store: Store | None,
) -> list[CompiledKernel]:
    """The kernels of a call, compiled unless the store has them by this name.

    Raises RefusedError if the package refuses or is not installed, and if its process fails or
    takes too long.
    """
    libraries = {name: number for name, number in target.libraries if name in FLASH}
    libraries["python"] = ".".join(map(str, sys.version_info[:2]))
    about = {"form": FORM, "sm": target.sm, "lse": "lse" in call["tensors"]}
    key = f"fa4 {name} {json.dumps(about | {'libraries': libraries})}"
    known = store.load(key, read_kernels) if store else None
    if known is not None:
        return known
    if version_of(FLASH[0]) is None:
        actual = "which is not installed here; pip install 'attn-graph[fa4]'"
        raise RefusedError(Reason("compiler", f"is compiled by {FLASH[0]}", actual, JOINED))
    answer = run_builder(call, target, store)
    if refusal := answer.get("refusal"):
        raise RefusedError(Reason("package", "is refused by the package itself", refusal))
    kernels = [CompiledKernel(**x) for x in answer["kernels"]]
    if store is not None:
        store.put(key, json.dumps([asdict(x) for x in kernels]).encode())
    return kernels


def read_kernels(data: bytes) -> list[CompiledKernel]:
    """Kernels from bytes stored by `compile_call`. Raises Unfit for anything else."""
    try:
        return [CompiledKernel(**x) for x in json.loads(data)]
    except (ValueError, TypeError) as error:
        raise Unfit(f"it holds no kernels: {error}") from error


def architecture(sm: int) -> str:
    """A compute capability as the package and the DSL name it."""
    return FAMILIES.get(sm // 10, "sm_{}").format(sm)


def run_builder(
    call: Mapping[str, Any],  # Any: JSON
    target: Target,
    store: Store | None,
) -> dict[str, Any]:  # Any: JSON
    """The answer of builder.py to a call. Compiled files go to the store's folder."""
    with TemporaryDirectory() as away:
        kernels, answer = Path(away, "kernels"), Path(away, "answer.json")
        request = {
            "call": call,
            "multiprocessors": target.multiprocessors or 1,
            "answer": str(answer),
        }
        env = os.environ | environment(target, kernels, Path(away))
        program = (sys.executable, "-P", "-c", PROGRAM)
        failure, _ = run_apart(program, json.dumps(request), seconds=PATIENCE, env=env)
        if failure or not answer.exists():
            raise RefusedError(dead_planner(failure or "ended without an answer"))
        if store is not None:
            keep_objects(kernels, kernel_folder(store))
        return json.loads(answer.read_text())  # type: ignore[no-any-return]  # JSON


def environment(target: Target, kernels: Path, dump: Path) -> dict[str, str]:
    """The environment variables read by the package and the DSL on import."""
    name = architecture(target.sm)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",  # nothing runs
        "FLASH_ATTENTION_ARCH": name,
        "FLASH_ATTENTION_NUM_SMS": str(target.multiprocessors or 1),
        "CUTE_DSL_ARCH": name,
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_DUMP_DIR": str(dump),
        **cache_variables(kernels),
    }


def cache_variables(folder: Path) -> dict[str, str]:
    """The package's own variables for its cache of compiled files."""
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder),
    }


def kernel_folder(store: Store) -> Path:
    """A store's folder for compiled kernels. Raises PermissionError if others than the user may
    write to it or to the store's: its files are loaded and run."""
    folder = store.folder / "fa4"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (store.folder, folder):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(
                f"{path} can be written to by others, and kernels are loaded from there; "
                f"chmod go-w {path}, or give another store="
            )
    return folder


def keep_objects(made: Path, folder: Path) -> None:
    """Copy compiled objects to the folder of later processes, each complete or not at all."""
    for path in made.rglob("*.o"):
        place = folder / path.relative_to(made)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = place.with_suffix(f".{os.getpid()}.part")
        shutil.copyfile(path, part)
        os.replace(part, place)


def keep_kernels_in(store: Store | None) -> AbstractContextManager[object]:
    """Within this block the package, if it is first imported there, keeps kernels in the store."""
    if store is None or "flash_attn.cute" in sys.modules:
        return nullcontext()
    return environment_with(cache_variables(kernel_folder(store)))


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
