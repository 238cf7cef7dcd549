"""Triton's interpreter, without what it does again and again to no effect: half of its time.

- In each call of a function it goes through all names of Triton's language to replace the builtins
  among them, which the kernel that calls the function has replaced already.
- Of each sum and product of integers it computes in int64 whether it overflows, and then asserts
  nothing, since its option `debug` is off.
- Of each tensor it looks up the dtype in a table that it makes for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from triton import language
from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def languages_of(function: FunctionType) -> list[ModuleType]:
    """The modules among Triton's two that a function of a kernel names."""
    both = (language, language.core)
    return [x for x in function.__globals__.values() if inspect.ismodule(x) and x in both]


def patch_if_new(patch: Callable[[Any], object]) -> Callable[[Any], object]:
    """`patch`, but for functions that name replaced builtins alone."""

    def patch_language(function: FunctionType) -> object:
        if any(is_builtin(each.load) for each in languages_of(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    return patch_language


def remember_dtypes(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`look_up`, once for each dtype of elements."""
    known: dict[str, Any] = {}

    def dtype_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    return dtype_of


def spare_repetition() -> None:
    """Do so in this process. Raises AssertionError where Triton's interpreter works otherwise."""
    options = interpreter.interpreter_builder.options
    taken = {f: inspect.getfullargspec(getattr(interpreter, f)).args for f in PATCHED}
    assert taken == PATCHED, f"the interpreter's functions take {taken}: adapt this file"
    assert not options.debug, "the interpreter asserts overflow: keep its check"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter._patch_lang = patch_if_new(interpreter._patch_lang)
    interpreter._get_np_dtype = remember_dtypes(interpreter._get_np_dtype)


PATCHED = {"_patch_lang": ["fn"], "_get_np_dtype": ["tt_dtype"]}
