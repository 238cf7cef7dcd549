"""Modes of the forward in the recomputation of `torch.utils.checkpoint`, which drops them."""

from __future__ import annotations

import sys
from typing import Any, Protocol, final

import torch
from attrs import frozen
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook

from attn_graph.errors import TensorError

# A checkpoint's hook that packs tensors; its variable `frame` has the recomputation.
PACK = f"{_checkpoint_hook.__init__.__qualname__}.<locals>.pack_hook"
REENTRANT = CheckpointFunction.forward.__code__


class Recomputable(Protocol):
    """The attribute of a checkpoint that is used here."""

    recompute_fn: Any  # Any: with the arguments of the checkpointed function


@final
@frozen(eq=False)
class Recomputation:
    """The recomputation of a checkpoint, within a mode."""

    function: Any  # Any: as above
    mode: TorchFunctionMode

    def __call__(self, *args: Any) -> None:  # Any: as above
        with self.mode:
            self.function(*args)


def follow_checkpoint(mode: TorchFunctionMode, dropout: float) -> None:
    """Let the checkpoint that surrounds this call, if any, recompute it within `mode`.

    Raises TensorError for dropout in a reentrant one: it recomputes without the mode, and PyTorch
    would drop other places than the forward did.
    """
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__qualname__", "") == PACK:  # a checkpoint's
        pack = hooks[0]
        cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
        frame: Recomputable = cells["frame"].cell_contents
        if not isinstance(frame.recompute_fn, Recomputation):
            frame.recompute_fn = Recomputation(frame.recompute_fn, mode)
    if dropout and not torch.is_grad_enabled() and is_reentrant():
        raise TensorError(
            f"attention: dropout_p {dropout} in a checkpoint with use_reentrant=True would drop "
            "other places when it is recomputed; pass use_reentrant=False"
        )


def is_reentrant() -> bool:
    """True inside the forward of a reentrant checkpoint."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code is not REENTRANT:
        frame = frame.f_back
    return frame.f_code is REENTRANT
