"""Messages between ranks: flat bytes, posted ahead and waited for. All traffic goes here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import frozen

from attn_graph.errors import GraphError
from attn_graph.machine.ambient import named_in_profiles

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Shape = Sequence[int]


@final
@frozen(eq=False)
class Transfer:
    """Messages under way. incoming: the message of each rank, by its number, flat.

    outgoing: kept until sent.
    """

    works: Sequence[Any]  # Any: of torch.distributed
    incoming: Mapping[int, torch.Tensor]
    outgoing: Mapping[int, torch.Tensor]

    def wait(self) -> Mapping[int, torch.Tensor]:
        """The incoming messages, once all have arrived."""
        with named_in_profiles("mesh wait"):
            for work in self.works:
                work.wait()
        return self.incoming


@final
@frozen(eq=False)
class Line:
    """A plan's connection to the other ranks of its group. tag: of all its messages.

    Groups with tags, such as gloo, keep messages of different plans apart.
    """

    group: ProcessGroup
    tag: int


def post(
    line: Line,
    outgoing: Mapping[int, torch.Tensor],
    sizes: Mapping[int, int],
    like: torch.Tensor,
) -> Transfer:
    """Send flat tensors to ranks of a group, and be sent others, in one batch.

    sizes: how many elements come from each rank. like: of their dtype and device. Messages without
    elements are not sent.
    """
    from torch import distributed as dist

    sends = {rank: x.contiguous() for rank, x in outgoing.items() if x.numel()}
    comes = {rank: like.new_empty(n) for rank, n in sizes.items() if n}
    ways = [(dist.isend, sends), (dist.irecv, comes)]
    batch = [
        dist.P2POp(way, as_bytes(x), group=line.group, group_peer=rank, tag=line.tag)
        for way, messages in ways
        for rank, x in messages.items()
    ]
    works = dist.batch_isend_irecv(batch) if batch else []
    return Transfer(works, {r: like.new_empty(0) for r in sizes} | comes, sends)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a flat tensor: groups then need no rule for its dtype."""
    return x.view(torch.uint8)


def pack(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Tensors as one flat tensor, of a dtype, by default theirs; nothing else is allocated."""
    given = [*tensors]
    flat = given[0].new_empty(sum(x.numel() for x in given), dtype=dtype)
    for place, x in zip(unpack(flat, [x.shape for x in given]), given, strict=True):
        place.copy_(x)
    return flat


def unpack(flat: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """The tensors flattened by `pack`."""
    ends = [*accumulate(map(prod, shapes), initial=0)]
    return [flat[a:b].view(*x) for (a, b), x in zip(pairwise(ends), shapes, strict=True)]


def compare_texts(
    group: ProcessGroup, text: str, device: torch.device, fault: Exception | None = None
) -> None:
    """Raise GraphError, in every rank, unless all ranks have one text and no fault.

    fault: this rank's reason not to compute; the function then returns for its caller to raise it.
    Each rank sends 32 bytes; if they differ, each sends its text and its fault, and the error
    quotes them.
    """
    from torch import distributed as dist

    said = text, fault and str(fault)
    mine = torch.tensor([*sha256(repr(said).encode()).digest()], dtype=torch.uint8, device=device)
    all_ = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(all_, mine, group=group)
    if all(torch.equal(x, mine) for x in all_):
        return
    each: list[Any] = [None] * group.size()  # Any: as torch declares it
    dist.all_gather_object(each, said, group=group)
    if fault is not None:
        return
    for rank, (_, problem) in enumerate(each):
        if problem:
            raise GraphError(f"rank {rank} refused its call, so no rank computes: {problem}")
    first, *texts = (given for given, _ in each)
    other = next(n for n, given in enumerate(texts, 1) if given != first)
    raise GraphError(
        f"ranks disagree about what they compute together\nrank 0: {first}\n"
        f"rank {other}: {texts[other - 1]}"
    )
