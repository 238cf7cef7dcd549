"""PyTorch's counter of flops, and the formulas of our operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

MODULE = "torch.utils.flop_counter"  # imports Triton: read only after others imported it
Formula = Callable[..., int]  # of an operator's arguments

formulas: dict[Any, Formula] = {}  # by operator; Any: PyTorch's packets of overloads


def teach_counters() -> None:
    """Give the formulas to PyTorch's registry, and to counters that are open already."""
    module = sys.modules.get(MODULE)
    if module is None:
        return
    module.flop_registry.update(formulas)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            mode.counter.flop_registry.update(formulas)  # pyright: ignore[reportAttributeAccessIssue]  # of a class looked up at run time
