"""Messages between ranks: flat bytes, posted ahead and waited for; all that travels goes here."""

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
    """Messages under way. incoming: what each rank sends here, by its number, flat.

    outgoing: kept until they have left.
    """

    works: Sequence[Any]  # Any: of torch.distributed
    incoming: Mapping[int, torch.Tensor]
    outgoing: Mapping[int, torch.Tensor]

    def wait(self) -> Mapping[int, torch.Tensor]:
        """What came in, once all messages have arrived."""
        with named_in_profiles("mesh wait"):
            for work in self.works:
                work.wait()
        return self.incoming


def post(
    group: ProcessGroup,
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
    batch = [
        *(dist.P2POp(dist.isend, as_bytes(x), group=group, group_peer=r) for r, x in sends.items()),
        *(dist.P2POp(dist.irecv, as_bytes(x), group=group, group_peer=r) for r, x in comes.items()),
    ]
    works = dist.batch_isend_irecv(batch) if batch else []
    return Transfer(works, {r: like.new_empty(0) for r in sizes} | comes, sends)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a flat tensor: groups then need no rule for its dtype."""
    return x.view(torch.uint8)


def pack(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Tensors of one dtype as one flat tensor."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(flat: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """The tensors that `pack` made flat."""
    ends = [*accumulate(map(prod, shapes), initial=0)]
    return [flat[a:b].view(*x) for (a, b), x in zip(pairwise(ends), shapes, strict=True)]


def compare_texts(group: ProcessGroup, text: str, device: torch.device) -> None:
    """Raise GraphError, in every rank, unless all ranks have the same text.

    Each sends 32 bytes; where they differ, each sends its text, and the error says two of them.
    """
    from torch import distributed as dist

    own = sha256(text.encode()).digest()
    mine = torch.tensor([*own], dtype=torch.uint8, device=device)
    all_ = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(all_, mine, group=group)
    if all(torch.equal(x, mine) for x in all_):
        return
    texts: list[Any] = [None] * group.size()  # Any: as torch declares it
    dist.all_gather_object(texts, text, group=group)
    other = next(n for n, x in enumerate(texts) if x != texts[0])
    raise GraphError(
        f"ranks disagree about what they compute together\nrank 0: {texts[0]}\n"
        f"rank {other}: {texts[other]}"
    )
