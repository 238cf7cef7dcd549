"""The public names of torch.backends and torch.nn.attention, as the installed PyTorch has them."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.backends
import torch.nn.attention

ROOTS = (torch.backends, torch.nn.attention)
NATIVE = "torch.backends.python_native"  # which torch 2.11 has not


def listed() -> dict[str, set[str]]:
    """Names by the module, or the object, that has them."""
    found: dict[str, set[str]] = {}
    for root in ROOTS:
        for module in (root, *children(root)):
            name = module.__name__
            found[name] = set(names(module))
    matmul = inspect.getsource(type(torch.backends.cuda.matmul).__getattr__)
    found["torch.backends.cuda.matmul"] = set(re.findall(r'name == "(\w+)"', matmul))
    if NATIVE in found:
        native: Any = import_module(NATIVE)  # Any: made when imported
        found[NATIVE] |= set(native.all_dsls)
    backends = torch.nn.attention.SDPBackend
    found["torch.nn.attention.SDPBackend"] = set(backends.__members__)
    return found


def children(root: ModuleType) -> Iterator[ModuleType]:
    """The public modules of a package; none of a module."""
    for info in pkgutil.iter_modules(getattr(root, "__path__", ())):
        if not info.name.startswith("_"):
            yield import_module(f"{root.__name__}.{info.name}")


def names(module: ModuleType) -> Iterator[str]:
    """What the module itself has to offer: not what it imports, nor how it is built.

    Some of torch.backends stand in for a module that they keep as `m`, with switches as properties
    of their class.
    """
    name, kind = module.__name__, type(module)
    own = set(vars(module)) | set(vars(vars(module).get("m", module)))
    own |= set(vars(kind)) if kind is not ModuleType else set()
    if module not in ROOTS:
        yield from (child.__name__.removeprefix(f"{name}.") for child in children(module))
    if name.startswith("torch.nn.") and "__all__" in vars(module):
        own &= set(vars(module)["__all__"])
    for n in sorted(own - {"m", "TYPE_CHECKING"}):
        x = vars(kind).get(n, vars(module).get(n, vars(vars(module).get("m", module)).get(n)))
        if not n.startswith("_") and (n in getattr(module, "__all__", ()) or belongs(x, name)):
            yield n


def belongs(x: object, module: str) -> bool:
    """Whether a value was made in the module, and is not a part of how the module is made."""
    machinery = isinstance(x, type) and (
        issubclass(x, ModuleType) or x.__name__ in ("ContextProp", "PropModule", "GenericModule")
    )
    if machinery or (isinstance(x, ModuleType) and type(x).__module__ != module):
        return False
    if type(x).__name__ in ("ContextProp", "property", "_FP32Precision"):
        return True
    return getattr(x, "__module__", module) == module
