"""DTensors in and out of a rank's plan: divided as the sharded graph says, and never moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.layouts import result_spec
from attn_graph.machine.tensors import is_distributed
from attn_graph.mesh.layout import chunk, join_touching
from attn_graph.mesh.sharded import AXES, Sharded, show_chunks
from attn_graph.mesh.site import Site

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Tensors = Mapping[str, torch.Tensor]


@final
@frozen(eq=False)
class Wrapping:
    """How a rank's results become DTensors: on the mesh of its inputs."""

    site: Site
    mesh: DeviceMesh

    def wrap(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rank's parts of the outputs as DTensors of the whole."""
        from torch.distributed.tensor import DTensor

        sharded, wrapped = self.site.sharded, list[torch.Tensor]()
        for n, name, x in zip(sharded.graph.outputs, sharded.output_names, outputs, strict=True):
            whole, axes = result_spec(sharded.graph, n), sharded.result_axes[name != "o"]
            wrapped.append(
                DTensor.from_local(
                    x,
                    self.mesh,
                    (expected_placement(sharded, whole.shape, axes),),
                    run_check=False,
                    shape=torch.Size(whole.shape),
                    stride=whole.strides,
                )
            )
        return wrapped


def unwrap(site: Site, given: Tensors) -> tuple[Tensors, Wrapping | None]:
    """The rank's parts of DTensors, and a function to wrap results; plain tensors as they are.

    Raises PlanMismatchError, with both placements, for DTensors with other placements, and for a
    mixture of DTensors and plain tensors.
    """
    if not any(map(is_distributed, given.values())):
        return given, None
    if differences := [x for name, t in given.items() for x in placement_problems(site, name, t)]:
        raise PlanMismatchError(*differences)
    tensors: dict[str, Any] = dict(given)  # Any: DTensors
    mesh = next(iter(tensors.values())).device_mesh
    return {name: t.to_local() for name, t in tensors.items()}, Wrapping(site, mesh)


def placement_problems(site: Site, name: str, t: torch.Tensor | DTensor) -> Iterator[str]:
    """The differences between a DTensor and the plan's placement."""
    from torch.distributed import get_process_group_ranks
    from torch.distributed.tensor import DTensor

    sharded = site.sharded
    numbers = {i.name: n for n, i in enumerate(sharded.graph.inputs)}
    shape, axes = sharded.graph.types[numbers[name]].shape, sharded.axes[numbers[name]]
    if not isinstance(t, DTensor):
        yield f"{name}: expected a DTensor, as others are, got a plain tensor; distribute_tensor it"
        return
    ranks = get_process_group_ranks(site.group)
    if t.device_mesh.mesh.tolist() != ranks:
        yield f"{name}: expected a mesh of the ranks {ranks}, got {t.device_mesh}"
        return
    if t.shape != shape:
        yield f"{name}: expected {[*shape]} in all, got {[*t.shape]}"
        return
    place = expected_placement(sharded, shape, axes)
    if t.placements != (place,):
        yield f"{name}: expected placements {(place,)}, got {t.placements}; redistribute it"
    elif (axis := sharded.divided_axis(shape, axes)) is not None:
        yield from cut_problems(sharded, name, shape, axes, axis)


def cut_problems(
    sharded: Sharded, name: str, shape: Sequence[int], axes: str, axis: int
) -> Iterator[str]:
    """The divided axes with other cuts in DTensors than in the plan, the same on all ranks."""
    size, ranks = shape[axis], sharded.mesh.ranks
    for rank, due in enumerate(chunk(size, ranks)):
        own = sharded.parts(rank, shape, axes)[axis]
        if join_touching(own) != join_touching([due]):
            yield (
                f"{name}: of {size} {AXES[axes[axis]]} rank {rank} has {show_chunks(own)} by "
                f"{sharded.placement!r}, and {show_chunks([due])} of a DTensor of Shard({axis}); "
                f"pass what split gives each rank, as plain tensors"
            )
            return


def expected_placement(sharded: Sharded, shape: Sequence[int], axes: str) -> Placement:
    """The DTensor placement of a tensor: its divided axis."""
    from torch.distributed.tensor import Replicate, Shard

    axis = sharded.divided_axis(shape, axes)
    return Replicate() if axis is None else Shard(axis)
