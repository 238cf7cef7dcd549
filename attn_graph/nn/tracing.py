"""Masks and plans as constants of code traced by torch.compile."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from attrs import define
from torch._library import opaque_object

from attn_graph.ir.modifiers import Modifier
from attn_graph.masks import Mask

# From torch 2.12 on it treats masks, of any class, and plans as constants.
KEEPS_CONSTANTS = hasattr(opaque_object, "_resolve_opaque_type_info")
# Methods of masks for compiled code:
METHODS: tuple[str, ...] = ("__and__", "__or__", "__invert__", "aligned")
UNTRACED = ("attn_graph", "attn_graph.lowering", "attn_graph.kernels")  # each a folder of its own
MAKER = "torch._dynamo.variables.script_object"  # the module that makes masks while it traces


def register_masks() -> None:
    """Let compiled code contain masks: they are made while it is traced.

    If torch.compile can't do so, it leaves out the library, and compiles the code around calls.
    """
    if not KEEPS_CONSTANTS:
        from torch._dynamo import trace_rules

        for package in UNTRACED:
            trace_rules.add(package)
        return
    # Both have new names in torch 2.15; the old ones are deprecated.
    register, kind = getattr(opaque_object, "register_custom_class", None), "constant"
    if register is None:
        register, kind = opaque_object.register_opaque_type, "value"
    register(Mask, typ=kind, members=dict.fromkeys(METHODS, opaque_object.MemberType.USE_REAL))
    register(Modifier, typ=kind)
    call_after_import(MAKER, take_symbols)


# Symbols of torch.compile in sizes and arguments


def fix(option: Any) -> Any:  # Any: an option of a call
    """An option with numbers in place of symbols, which become constants of the code.

    Eager code gets the option itself.
    """
    if isinstance(option, tuple | list):
        return tuple([fix(part) for part in option])
    if isinstance(option, bool | torch.SymBool):
        return bool(operator.index(option))  # type: ignore[arg-type]  # a SymBool has it
    return operator.index(option) if isinstance(option, int | torch.SymInt) else option


def take_symbols(maker: ModuleType) -> None:
    """Let masks such as `Window(k.shape[2] // 2)` be made of symbols, by their numbers.

    PyTorch makes an instance of a class kept as a constant from constants alone.
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
        if issubclass(self.value, Mask):
            args, kwargs = (
                [*map(fix_variable, args)],
                {n: fix_variable(x) for n, x in kwargs.items()},
            )
        return make(self, tx, args, kwargs)

    variable.call_function = call_function


def fix_variable(variable: Any) -> Any:  # Any: of torch.compile's tracer
    """The tracer's variable of an argument, with numbers for symbols, also within a tuple."""
    from torch._dynamo.utils import specialize_symnode
    from torch._dynamo.variables.lists import ListVariable, TupleVariable

    known = specialize_symnode(variable.realize())
    if type(known) not in (ListVariable, TupleVariable):
        return known
    return type(known)([*map(fix_variable, known.items)])


def call_after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now, or once it is imported.

    PyTorch's compiler takes seconds to import, and is not needed without compilation.
    """
    if module := sys.modules.get(name):
        then(module)
    else:
        sys.meta_path.insert(0, ImportWatch(name, then))


@define(eq=False)
class ImportWatch(MetaPathFinder):
    """A finder that only notices the import of one module, and then calls a function with it."""

    name: str
    then: Callable[[ModuleType], None]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, except for the module: its spec, whose loader calls the function at the end."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute, then = spec.loader.exec_module, self.then

            def exec_module(module: ModuleType) -> None:
                execute(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec
