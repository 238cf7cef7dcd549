"""Puts what the machine lacks into a folder of the checkout, out of a folder of wheels, offline.

Only Python's own library is imported here: this runs before attrs is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ROOT / ".gpu"  # what was installed; the machine's own packages stay as they are
FLASH = (  # FlashAttention 4 and its compiler
    *("flash-attn-4", "apache-tvm-ffi", "einops", "protobuf", "quack-kernels"),
    *("torch-c-dlpack-ext", "cuda-bindings", "cuda-pathfinder", "nvidia-cutlass-dsl"),
    *(f"nvidia-cutlass-dsl-libs-{name}" for name in ("base", "core", "cu13")),
)
OPTIONAL = {  # what is lost without it
    "execnet": "tests run one after another",
    "nvidia-cudnn-frontend": "nothing of cuDNN runs",
    "pytest-xdist": "tests run one after another",
    **dict.fromkeys(FLASH, "nothing of FlashAttention 4 runs"),
}
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")  # of wheels
DOWNLOAD = (  # for a machine with Python 3.12; pip takes a wheel only if its very tag is named
    "pip download -d wheels --no-deps --only-binary :all: --python-version 3.12",
    *(f"--platform {name}_x86_64" for name in PLATFORMS),
    "-c constraints.txt -r benchmarks/gpu/needs.txt",
)


def list_needs() -> list[str]:
    """The names of needs.txt."""
    lines = HERE.joinpath("needs.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def prepare(wheels: Path | None) -> None:
    """Install from the wheels, if there are any, and check that nothing is missing.

    Exits with what is missing and how to get it.
    """
    if wheels is not None:
        install(wheels, PACKAGES)
    if PACKAGES.is_dir():
        prefer(PACKAGES)
    missing = [name for name in list_needs() if not is_installed(name)]
    for name in missing:
        if name in OPTIONAL:
            print(f"{name} is not installed: {OPTIONAL[name]}")
    if required := [name for name in missing if name not in OPTIONAL]:
        raise SystemExit(
            f"not installed: {', '.join(required)}\n"
            f"  where there is a network, `{' '.join(DOWNLOAD)}`\n"
            "  fills a folder for Python 3.12; then give it as --wheels wheels"
        )
    check_torch()


def install(wheels: Path, into: Path) -> None:
    """Install those of needs.txt of which the folder has a wheel. Exits where it has none.

    --no-deps: torch, which several of them could ask for, is the machine's own.
    """
    there = {*wheel_names(wheels)}
    names = [name for name in list_needs() if name in there]
    if not names:
        raise SystemExit(f"{wheels} has no wheel of {', '.join(list_needs())}")
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade")
    command = (*pip, "--find-links", str(wheels), "--target", str(into), *names)
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"pip installed nothing: {' '.join(command)}")


def wheel_names(folder: Path) -> Iterator[str]:
    """The names of the packages of which a folder has wheels, as pip writes them."""
    for path in sorted(folder.glob("*.whl")):
        yield path.name.partition("-")[0].replace("_", "-").lower()


def prefer(folder: Path) -> None:
    """Let this process and those it starts import from the folder first."""
    sys.path.insert(0, str(folder))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), others)))


def is_installed(name: str) -> bool:
    """Whether a package of pip's is there."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def check_torch() -> None:
    """Exit unless the machine has the torch and the triton that the library needs."""
    for name, least in (("torch", (2, 11)), ("triton", (3, 6))):
        number = version(name) if is_installed(name) else None
        if number is None or tuple(map(int, number.split(".")[:2])) < least:
            raise SystemExit(
                f"needs {name} {'.'.join(map(str, least))} or later, and this machine's Python, "
                f"{sys.executable}, has {number or 'none'}"
            )
