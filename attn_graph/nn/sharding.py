"""Attention on DTensors: each process computes its part of the batch or of the heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_graph.errors import TensorError
from attn_graph.ir.arguments import ARGUMENTS
from attn_graph.ir.terms.relative import counting_parts
from attn_graph.machine.tensors import is_distributed
from attn_graph.masks import Mask, needs_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

PARTS = {"b": "the batch", "h": "the heads"}  # axes with independent parts
MAIN = {"q": "bhid", "k": "bhjd", "v": "bhje"}  # axes, by the letters of docs/semantics.md
RESULT = ("b", "h", "i", "e")

Axes = tuple[str, ...]
Letters = tuple[str | None, ...]  # for each axis of the mesh: the axis of the tensors it divides
Local = Callable[[Mapping[str, Tensor]], Tensor | tuple[Tensor, ...]]


def attend_in_parts(
    tensors: Mapping[str, Any],  # Any: DTensors
    mask: Mask | None,
    whole: Mapping[str, str],
    attend: Local,
) -> Tensor | tuple[Tensor, ...]:
    """The results of `attend` on each process's parts, as DTensors, without communication.

    mask: that of the call. whole: axes that can't be divided, and why. Raises TensorError for
    these, and for placements with which a process would need numbers of others.
    """
    from torch.distributed.tensor import DTensor

    require_one_mesh(tensors)
    axes = {name: axes_of(name, t, mask) for name, t in tensors.items()}
    mesh = tensors["q"].device_mesh
    letters = tuple(divided_axis(n, tensors, axes) for n in range(mesh.ndim))
    for letter in dict.fromkeys(x for x in letters if x):
        own = [f"{type(x).__name__} may keep others in each part" for x in counting_parts(mask)]
        if why := whole.get(letter) or next(iter(own), ""):
            raise TensorError(f"attention: {PARTS[letter]} can't be divided: {why}")
        require_equal_parts(letter, letters, tensors, axes)
    outputs = attend({name: local_part(t, axes[name], letters) for name, t in tensors.items()})
    places = placements(RESULT, letters)
    if isinstance(outputs, Tensor):
        return DTensor.from_local(outputs, mesh, places, run_check=False)
    return tuple(DTensor.from_local(x, mesh, places, run_check=False) for x in outputs)


def require_one_mesh(tensors: Mapping[str, Any]) -> None:  # Any: DTensors, or not
    mesh = next(t.device_mesh for t in tensors.values() if is_distributed(t))
    for name, t in tensors.items():
        if not is_distributed(t):
            raise TensorError(
                f"attention: {name} is a plain tensor among DTensors; write "
                f"distribute_tensor({name}, device_mesh, placements)"
            )
        if t.device_mesh != mesh:
            raise TensorError(f"attention: {name} is on {t.device_mesh}, but others on {mesh}")


def axes_of(name: str, t: Tensor, mask: Mask | None) -> Axes:
    """The letters of a tensor's axes, - for one of size 1 along which it broadcasts."""
    argument = ARGUMENTS.get(name)
    data = needs_of(mask).get(name) or (argument and argument.form(t.ndim))
    letters = data.axes if data else MAIN.get(name, "?" * t.ndim)
    return tuple("-" if n == 1 else x for n, x in zip(t.shape, letters, strict=False))


def divided_axis(n: int, tensors: Mapping[str, DTensor], axes: Mapping[str, Axes]) -> str | None:
    """The letter of the axis divided by axis n of the mesh. Raises TensorError for several."""
    places: dict[str, Any]  # Any: PyTorch's placements
    places = {name: t.placements[n] for name, t in tensors.items()}
    divided = {name: p for name, p in places.items() if not p.is_replicate()}
    letters = {axes[name][p.dim] if p.is_shard() else str(p) for name, p in divided.items()}
    if not letters:
        return None
    if len(letters) > 1 or not letters <= PARTS.keys():
        raise TensorError(
            f"attention: {', '.join(f'{name} is {p}' for name, p in places.items())} along axis "
            f"{n} of {tensors['q'].device_mesh}; each process computes a part of {PARTS['b']} "
            f"(axis 0 of q, k, v) or of {PARTS['h']} (axis 1): redistribute the others"
        )
    return letters.pop()


def require_equal_parts(
    letter: str, letters: Letters, tensors: Mapping[str, DTensor], axes: Mapping[str, Axes]
) -> None:
    """Raise TensorError unless all processes get equal, non-empty parts of an axis."""
    mesh = tensors["q"].device_mesh
    parts = math.prod([mesh.size(n) for n, x in enumerate(letters) if x == letter])
    for name, t in tensors.items():
        if letter in axes[name] and t.shape[axes[name].index(letter)] % parts:
            raise TensorError(
                f"attention: {PARTS[letter]} of {name} {[*t.shape]} can't be divided into {parts} "
                "equal parts"
            )


def placements(axes: Axes, letters: Letters) -> tuple[Placement, ...]:
    """Shards for the divided axes of a tensor, replicas for the others."""
    from torch.distributed.tensor import Replicate, Shard

    return tuple(Shard(axes.index(x)) if x and x in axes else Replicate() for x in letters)


def local_part(t: DTensor, axes: Axes, letters: Letters) -> Tensor:
    """This process's part of a tensor; a replicated one is cut.

    The gradient of a tensor read by all processes is the sum of theirs.
    """
    from torch.distributed.tensor import Partial

    places = placements(axes, letters)
    gradients = [
        Partial() if letter and place.is_replicate() else place
        for letter, place in zip(letters, places, strict=True)
    ]
    return t.redistribute(placements=places).to_local(grad_placements=gradients)
