"""Calls of FlashAttention 4 on the tensors of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.gradient_ops import clear_blind_rows
from attn_graph.ir.graph import Graph
from attn_graph.lowering.fa4.call import Fa4Call, call_package, new_like
from attn_graph.lowering.fa4.offline import keep_kernels_in
from attn_graph.lowering.problem import (
    ALIGNED,
    cotangent_bytes,
    cotangent_note,
    find_misplaced,
    is_broadcast,
    is_misaligned,
    on_boundary,
    returns_lse,
    select_outputs,
    tidy_strides,
)
from attn_graph.machine.device_memo import DeviceMemo, copy_to
from attn_graph.machine.store import Store
from attn_graph.spec import TensorSpec

Results = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


@final
@frozen(eq=False)
class Fa4Run:
    """What runs a graph."""

    call: Fa4Call
    graph: Graph
    store: Store | None
    lists: DeviceMemo[list[torch.Tensor]] = field(factory=DeviceMemo, init=False)

    @cached_property
    def plain(self) -> dict[bool, dict[str, Any]]:  # Any: JSON
        """What the package is told, with lse and without."""
        return {with_lse: self.call.plain(with_lse) for with_lse in (True, False)}

    @property
    def stores_lse(self) -> bool:
        """Whether calls that keep nothing for a gradient store lse all the same."""
        return self.call.problem.grad is not None or returns_lse(self.graph)

    def operands(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The equation's operands among a call's tensors."""
        return [tidy_strides(tensors[i]) for i in self.graph.eqns[0].args]

    def ask(
        self, named: dict[str, torch.Tensor], own: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:  # Any: the package is untyped
        """Call the package. named: tensors by its names, as ours lie. own: the operands."""
        call, given = self.call, self.call.problem.node.split(own)
        data = [x for each in (*given.modifiers, given.mask) for x in each.values()]
        tensors = {n: x.transpose(1, 2) if x.ndim == 4 else x for n, x in named.items()}
        if given.sinks is not None:
            tensors["learnable_sink"] = given.sinks
        plain = self.plain["lse" in named]
        with keep_kernels_in(self.store), torch.cuda.device_of(given.q):
            return call_package(
                plain, tensors, call.view_reads(data), self.lists_on(given.q.device)
            )

    def lists_on(self, device: torch.device) -> list[torch.Tensor]:
        """The lists of tiles on a device, brought there once."""
        lists = self.call.lists
        if lists is None:
            return []
        return self.lists.get(
            device, lambda: [copy_to(device, x, "lists of tiles") for x in lists.tensors]
        )

    def attend(self, tensors: Sequence[torch.Tensor], *, with_lse: bool) -> dict[str, torch.Tensor]:
        """o, and lse if it is asked for."""
        own, p = self.operands(tensors), self.call.problem
        named = dict(zip("qkv", own, strict=False))
        if texts := find_misplaced(named.items()):
            raise PlanMismatchError(*texts)
        results = {"o": p.new_o(own[0].device)}
        if with_lse:
            shape = (p.B, p.H, p.M)
            results["lse"] = torch.empty(shape, dtype=torch.float32, device=own[0].device)
        rest = {"lse": results["lse"]} if with_lse else {}
        self.ask(named | {"out": tidy_strides(results["o"])} | rest, own)
        return results

    def forward(self, *tensors: torch.Tensor) -> Results:
        """The outputs, and o and lse, which the backward needs."""
        results = self.attend(tensors, with_lse=True)
        return [results[name] for name in self.graph.result_names], (results["o"], results["lse"])

    def inference(self, *tensors: torch.Tensor) -> Results:
        """The outputs, without lse unless it is one of them."""
        results = self.attend(tensors, with_lse=returns_lse(self.graph))
        return [results[name] for name in self.graph.result_names], ()

    def backward(self, *tensors: torch.Tensor) -> Results:
        """The gradients, in the order of the outputs."""
        p = self.call.problem
        grad = p.grad
        assert grad is not None
        read = grad.split(self.operands(tensors))
        own = [on_boundary(x) if n < 3 else x for n, x in enumerate(read.own)]
        lse, do, dlse = read.lse.contiguous(), self.cotangent(read.do, read.o, read.lse), read.dlse
        named = dict(zip("qkv", own, strict=False))
        named |= {"out": on_boundary(read.o), "dout": do, "lse": lse}
        if dlse is not None:
            blind = clear_blind_rows(dlse, read.lse) if p.has_blind_rows else dlse
            named["dlse"] = blind.contiguous()
        named |= {
            f"d{n}": empty_gradient(x, lse.device) for n, x in zip("qkv", p.specs, strict=False)
        }
        made = self.ask(named, own)
        results = [named["dq"], named["dk"], named["dv"], *(made[-1:] if p.node.sinks else ())]
        wanted = [n < 3 or role == "sinks" for n, role in enumerate(p.node.roles)]
        flags = [w for w, has in zip(grad.wants, wanted, strict=True) if has]
        picked = [x for x, w in zip(results, flags, strict=True) if w]
        return select_outputs(self.graph, picked), ()

    def cotangent(
        self, do: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor
    ) -> torch.Tensor:
        """do as kernels read it: zeros where there is none, a copy where it lies otherwise or rows
        see nothing."""
        if do is None:
            return torch.zeros(o.shape, dtype=o.dtype, device=o.device)
        if self.call.problem.has_blind_rows:
            do = tidy_strides(clear_blind_rows(do, lse))
        spec = TensorSpec.like(do)
        fits = spec.unit_last and not is_misaligned(spec) and not is_broadcast(spec)
        return on_boundary(do) if fits else tidy_strides(do.contiguous())

    @property
    def temporary(self) -> int:
        """Bytes that the package allocates, at most: for a gradient sums in float32 of queries and,
        of grouped heads, of keys; do and lists."""
        p, lists = self.call.problem, self.call.lists
        own = sum(x.nbytes for x in lists.tensors) if lists else 0
        if p.grad is None:
            return own
        rows, keys = (-(-n // 128) * 128 for n in (p.M, p.N + 128))
        widths = [-(-n // 64) * 64 for n in (p.D, p.E)]
        sums = 4 * p.B * p.H * rows * (widths[0] + 2)
        shared = 4 * p.B * p.G * keys * sum(widths) if p.G < p.H else 0
        unwanted = sum(
            new_like(x).type.bytes for x, w in zip(p.specs, p.grad.wants[:3], strict=False) if not w
        )
        order = 12 * p.B * p.H * (rows // 64 + keys // 32) if self.call.deterministic else 0
        return own + sums + shared + unwanted + order + cotangent_bytes(p)

    def notes(self) -> Iterator[str]:
        """How it runs, for `explain`."""
        lists, native, p = self.call.lists, self.call.native, self.call.problem
        if lists is not None:
            share = 100 * lists.empty / lists.total
            tile = " x ".join(map(str, lists.tile))
            yield f"lists of tiles of {tile}: {share:.0f} % are empty and skipped"
        elif native is None:
            yield "the mask is a function of each place; no tile is skipped"
        if p.grad is not None:
            yield from cotangent_note(p, f"lies otherwise than in rows of {ALIGNED} bytes")


def empty_gradient(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """An uninitialised gradient by an operand."""
    x = new_like(spec)
    made = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=device)
    return tidy_strides(made)
