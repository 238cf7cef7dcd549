"""Triton's interpreter, without what it does again in each call of a function.

For each it goes through all names of Triton's language to replace the builtins among them: a third
of the time of our kernels. Which names are builtins never changes, and in a function that another
one calls they are replaced already.
"""

import inspect
from functools import cache
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def builtins_of(package: object) -> list[str]:
    """The names of a package's builtins; to be called first while none is replaced."""
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
    """Replace the builtins of a package, until the scope is restored."""
    names = builtins_of(package)
    if names and is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


def look_names_up_once() -> None:
    """Do so in this process. Raises AssertionError where Triton's interpreter works otherwise."""
    takes = inspect.getfullargspec(interpreter._patch_builtin).args
    assert takes == ["pkg", "builder", "scope"], f"_patch_builtin takes {takes}: adapt this file"
    interpreter._patch_builtin = replace_builtins
