"""What torch.compile makes of masks and plans: constants of the code that it traces."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from attrs import define
from torch._library import opaque_object

from attn_graph.masks import Mask

# Whether it takes masks, of any class, and plans for constants: from torch 2.12 on.
KEEPS_CONSTANTS = hasattr(opaque_object, "_resolve_opaque_type_info")
# Of masks, that compiled code may call:
METHODS: tuple[str, ...] = ("__and__", "__or__", "__invert__", "aligned")
UNTRACED = ("attn_graph", "attn_graph.lowering", "attn_graph.kernels")  # each a folder of its own
MAKER = "torch._dynamo.variables.script_object"  # the module that makes masks while it traces


def register_masks() -> None:
    """Let masks be written inside of compiled code: they are made while it is traced.

    Where torch.compile can't, it leaves out the library, and compiles the code around calls.
    """
    if KEEPS_CONSTANTS:
        register, kind = registration()
        register(Mask, typ=kind, members=dict.fromkeys(METHODS, opaque_object.MemberType.USE_REAL))
        call_after_import(MAKER, take_symbols)
    else:
        leave_untraced()


def registration() -> tuple[Callable[..., None], str]:
    """PyTorch's function that registers a class, and its word for constants. In 2.15 both have
    other names than before, and those of before are deprecated."""
    if register := getattr(opaque_object, "register_custom_class", None):
        return register, "constant"
    return opaque_object.register_opaque_type, "value"


def leave_untraced() -> None:
    """Let torch.compile run the library's functions as they are, between what it compiles."""
    from torch._dynamo import trace_rules

    for package in UNTRACED:
        trace_rules.add(package)


# Sizes and arguments that torch.compile has made symbols


def fix(option: Any) -> Any:  # Any: an option of a call
    """An option with numbers in place of symbols, which are constants of the code from then on.

    Eager code gets the option itself.
    """
    if isinstance(option, tuple | list):
        return tuple([fix(part) for part in option])
    if isinstance(option, bool | torch.SymBool):
        return bool(operator.index(option))  # type: ignore[arg-type]  # which a SymBool has
    return operator.index(option) if isinstance(option, int | torch.SymInt) else option


def take_symbols(maker: ModuleType) -> None:
    """Let masks be made of symbols, as `Window(k.shape[2] // 2)` is: of the numbers they stand for.

    PyTorch makes an instance of a class that it keeps as a constant of constants alone.
    """
    variable = getattr(maker, "OpaqueObjectClassVariable", None)
    if variable is None:  # a version with another name for it
        return
    make = variable.call_function

    def call_function(
        self: Any,  # Any: of PyTorch, as are the others
        tx: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """The variable of the instance."""
        if issubclass(self.value, Mask):
            args, kwargs = (
                [*map(fix_variable, args)],
                {n: fix_variable(x) for n, x in kwargs.items()},
            )
        return make(self, tx, args, kwargs)

    variable.call_function = call_function


def fix_variable(variable: Any) -> Any:  # Any: of torch.compile's tracer
    """What the tracer has for an argument: for a symbol, also within a tuple, its number."""
    from torch._dynamo.utils import specialize_symnode
    from torch._dynamo.variables.lists import ListVariable, TupleVariable

    known = specialize_symnode(variable.realize())
    if type(known) not in (ListVariable, TupleVariable):
        return known
    return type(known)([*map(fix_variable, known.items)])


def call_after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now, or when something imports it.

    PyTorch's compiler takes seconds to import, and who does not compile does without it.
    """
    if module := sys.modules.get(name):
        then(module)
    else:
        sys.meta_path.insert(0, ImportWatch(name, then))


@define(eq=False)
class ImportWatch(MetaPathFinder):
    """A finder of no module. It sees one being imported, and calls a function with it then."""

    name: str
    then: Callable[[ModuleType], None]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, but for the one module: what the finders after this one know of it."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = LoaderThen(spec.loader, self.then)
        return spec


@define(eq=False)
class LoaderThen(Loader):
    """A module's loader, and a function to call with the module after that."""

    loader: Loader
    then: Callable[[ModuleType], None]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module, without its content."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module, and call the function; afterwards the module's loader is its own."""
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.then(module)
