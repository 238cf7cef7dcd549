"""Calls of FlashAttention 4 on the tensors of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.attention import Operands
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.packed import LENGTHS, STARTS
from attn_graph.ir.storage.paging import readable_table, seen_by_entry
from attn_graph.ir.transforms.gradient_ops import clear_blind_rows
from attn_graph.lowering.backend import NO_ROOMS, Rooms, room_or_new, zero_each
from attn_graph.lowering.fa4.call import CU_SEQLENS, NARROW, SEQUSED, Fa4Call, call_package
from attn_graph.lowering.fa4.dialect import as_read
from attn_graph.lowering.fa4.lists import MadeLists, TileLists
from attn_graph.lowering.fa4.offline import keep_kernels_in
from attn_graph.lowering.libraries.fa4_masks import STATISTICS, zeroed_names
from attn_graph.lowering.lying import DECLARED, SIDES, copy_cleared
from attn_graph.lowering.problem import (
    ALIGNED,
    cotangent_note,
    find_misplaced,
    fits_loads,
    on_boundary,
    read_operands,
    require_aligned,
    returns_lse,
    select_outputs,
    tidy_strides,
)
from attn_graph.machine.device_memo import DeviceMemo, copy_to
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.store import Store
from attn_graph.machine.workspace import Workspace
from attn_graph.spec import INF, TensorSpec

Results = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


@final
@frozen(eq=False)
class Fa4Run:
    """Runs a graph."""

    call: Fa4Call
    graph: Graph
    store: Store | None
    workspace: Workspace
    lists: DeviceMemo[list[torch.Tensor]] = field(factory=DeviceMemo, init=False)

    @cached_property
    def plain(self) -> dict[bool, dict[str, Any]]:  # Any: JSON
        """The package's arguments, with lse and without."""
        return {with_lse: self.call.plain(with_lse) for with_lse in (True, False)}

    def operands(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The last equation's operands among a call's tensors, or of them: starts come last, and
        then the table of pages."""
        own = read_operands(self.graph, tensors, lengths=self.reads_lengths)
        return [tidy_strides(x) for x in own] if self.is_untidy else own

    @cached_property
    def reads_lengths(self) -> bool:
        """True if lengths are read, not starts alone: by kernels, by modifiers, by the mask as a
        function, or to find the seen pages."""
        call = self.call
        named = {name for names in self.places.modifiers for name in names}
        own = call.lengths or call.lying.pools or not named.isdisjoint(LENGTHS.values())
        return call.native is None or bool(own)

    @cached_property
    def is_untidy(self) -> bool:
        """True if a tensor of the graph has an axis of size 1."""
        return any(1 in x.shape for x in self.graph.types)

    @cached_property
    def results(self) -> dict[str, TensorSpec]:
        """How o and lse lie."""
        p = self.call.problem
        given = {"o": p.o}
        given["lse"] = TensorSpec((p.B, p.H, p.M), torch.float32)
        return {name: self.call.own_spec("rows", x) for name, x in given.items()}

    @cached_property
    def gradients(self) -> dict[str, TensorSpec]:
        """How the gradients of q, k and v lie."""
        return self.call.gradients

    @cached_property
    def is_blind(self) -> bool:
        """True if rows may see no key."""
        return self.call.lying.has_blind_rows

    @cached_property
    def leaves_unwritten(self) -> bool:
        """True if kernels may leave rows unwritten: they write none past a length."""
        return bool(self.call.ends) and not self.call.lying.leaves_none

    def starts(self, own: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The starts of sequences, by packed side."""
        totals, last = self.call.lying.totals, len(own) - bool(self.call.lying.pools)
        return dict(zip(totals, own[last - len(totals) : last], strict=True))

    def ask(
        self, named: dict[str, torch.Tensor], own: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:  # Any: the package is untyped
        """Call the package. named: tensors by its names, as ours lie. own: the operands."""
        call, places = self.call, self.places
        tensors = {n: x.transpose(1, 2) if n in self.padded else x for n, x in named.items()}
        if places.sinks is not None:
            tensors["learnable_sink"] = own[places.sinks]
        if self.is_ended:
            ends = {SEQUSED[n]: own[places.mask[n]] for n in call.lengths}
            ends |= {CU_SEQLENS[side]: x for side, x in self.starts(own).items()}
            ends |= {"page_table": self.page_table(own)} if call.lying.pools else {}
            whole = {name: x.to(torch.int32).contiguous() for name, x in ends.items()}
            tensors |= {name: on_boundary(tidy_strides(x)) for name, x in whole.items()}
        plain, device = self.plain["lse" in named], own[0].device
        each = zip(self.reads, call.reads, strict=True)
        reads = [as_read(own[n], spec) for n, spec in each] if self.reads else []
        with keep_kernels_in(self.store), torch.cuda.device_of(own[0]):
            if not isinstance(call.lists, MadeLists):
                return call_package(plain, tensors, reads, self.lists_on(device))
            mask = {name: own[n] for name, n in places.mask.items()}
            with self.make_lists(call.lists, mask, device) as lists:
                return call_package(plain, tensors, reads, lists)

    def page_table(self, own: Sequence[torch.Tensor]) -> torch.Tensor:
        """The table. Of pools declared finite kernels may read pages that no query sees: those are
        others in a copy."""
        p, lying, table = self.call.problem, self.call.lying, own[-1]
        if not lying.finite:
            return table
        data = {name: own[n] for name, n in self.places.mask.items()}
        seen = seen_by_entry(p.node.mask, table, p.M, p.N, data)
        return readable_table(lying.page, table, seen)

    @cached_property
    def places(self) -> Operands[int]:
        """Where each operand stands among those of a call."""
        return self.call.problem.node.slots

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Where the tensors stand that modifiers and mask read."""
        groups = *self.places.modifiers, self.places.mask
        return tuple(n for group in groups for n in group.values())

    @cached_property
    def padded(self) -> frozenset[str]:
        """The tensors, by the package's names, that it takes with positions before heads."""
        specs = self.call.tensors().items()
        return frozenset(n for n, x in specs if len(x.shape) == 4) - {*self.call.lying.pools}

    @cached_property
    def is_ended(self) -> bool:
        """True if kernels are given lengths, starts or pages."""
        call = self.call
        return bool(call.lengths or call.lying.totals or call.lying.pools)

    @contextmanager
    def make_lists(
        self, lists: MadeLists, mask: Mapping[str, torch.Tensor], device: torch.device
    ) -> Iterator[list[torch.Tensor]]:
        """Lists of tiles by the mask's tensors, in the workspace."""
        with self.workspace.lease(lists.scratch, device) as scratch:
            named = {**mask, **scratch}
            for launch in lists.made.launches:
                launch(named)
            yield [scratch[name] for name in lists.made.kinds]

    def lists_on(self, device: torch.device) -> list[torch.Tensor]:
        """The lists of tiles made with the plan on a device, brought there once."""
        lists = self.call.lists
        if not isinstance(lists, TileLists):
            return []
        return self.lists.get(
            device, lambda: [copy_to(device, x, "lists of tiles") for x in lists.tensors]
        )

    def attend(
        self, tensors: Sequence[torch.Tensor], rooms: Rooms, *, with_lse: bool
    ) -> dict[str, torch.Tensor]:
        """o, and lse if it is asked for."""
        own, call = self.operands(tensors), self.call
        named = self.clean(dict(zip("qkv", own, strict=False)), self.absent(own))
        if texts := find_misplaced(named.items()):
            raise PlanMismatchError(*texts, way_out="")
        names = ("o", "lse") if with_lse else ("o",)
        results = new_results({n: self.results[n] for n in names}, own[0].device, rooms)
        if self.leaves_unwritten:
            results["o"].zero_()
            if with_lse:
                results["lse"].fill_(-INF)
        named["out"] = results["o"]
        if with_lse:
            named["lse"] = results["lse"]
        self.ask(named, own)
        if with_lse and (sinks := call.problem.node.split(own).sinks) is not None:
            # Kernels add exp(sink - largest score): inf if all weight is the sink's.
            lse = results["lse"]
            torch.where(lse == INF, sinks.to(lse.dtype)[:, None], lse, out=lse)
        return results

    def forward(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """The outputs, and o and lse for the backward."""
        results = self.attend(tensors, rooms, with_lse=True)
        return [results[name] for name in self.graph.result_names], (results["o"], results["lse"])

    def inference(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """The outputs, without lse unless it is one of them."""
        results = self.attend(tensors, rooms, with_lse=returns_lse(self.graph))
        return [results[name] for name in self.graph.result_names], ()

    def backward(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """The gradients, in the order of the outputs."""
        p = self.call.problem
        grad = p.grad
        assert grad is not None
        every, count = self.operands(tensors), len(grad.ranks)
        read = grad.split(every[:count])
        own = [on_boundary(x) if n < 3 else x for n, x in enumerate(read.own)] + every[count:]
        absent = self.absent(own)
        named = {"q": own[0], "k": own[1], "v": own[2], "o": read.o, "lse": read.lse}
        named |= {} if read.dlse is None else {"dlse": read.dlse}
        named = self.clean(named, absent)
        o = on_boundary(named.pop("o"))
        lse = named["lse"] = named["lse"].contiguous()  # autograd may hand back another order
        named |= {"out": o, "dout": self.cotangent(read.do, o, lse, absent.get("rows"))}
        if read.dlse is not None and self.is_blind:
            named["dlse"] = clear_blind_rows(named["dlse"], lse)
        gradients = new_results(self.gradients, lse.device, rooms)
        if self.leaves_unwritten:
            zero_each([*gradients.values()])
        named |= gradients
        made = self.ask(named, own)
        results = [named["dq"], named["dk"], named["dv"], *(made[-1:] if p.node.sinks else ())]
        wanted = [n < 3 or role == "sinks" for n, role in enumerate(p.node.roles)]
        flags = [w for w, has in zip(grad.wants, wanted, strict=True) if has]
        picked = [x for x, w in zip(results, flags, strict=True) if w]
        return select_outputs(self.graph, picked), ()

    def absent(self, own: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """By side, True for rows or keys past their length, [B,1,.,1], or outside all sequences,
        [T,1,1]; of sides cleared in copies."""
        sides = dict.fromkeys(SIDES[name] for name in self.cleaned)
        if not sides:
            return {}
        known = {STARTS[packed]: x for packed, x in self.starts(own).items()}
        mask = self.call.problem.node.split(own).mask
        known |= {LENGTHS[side]: mask[LENGTHS[side]] for side in sides}
        return self.call.lying.absent(sides, known)

    def clean(
        self, named: dict[str, torch.Tensor], absent: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Operands, some copied for the kernels: q, k and v with 0 in absent rows."""
        for name, spec in self.call.copied.items():
            given, copy = named[name], new_tensor(spec, named[name].device)
            named[name] = copy
            if name in self.cleaned:
                copy_cleared(given, absent[SIDES[name]], copy)
            else:
                copy.copy_(given)
        return named

    def cotangent(
        self,
        do: torch.Tensor | None,
        o: torch.Tensor,
        lse: torch.Tensor,
        absent: torch.Tensor | None,
    ) -> torch.Tensor:
        """do as kernels read it: zeros without one, and a copy if its layout does not fit, or rows
        are absent or see no key. lse is -inf in absent rows of packed ones, sinks or not."""
        if do is None:
            return torch.zeros(o.shape, dtype=o.dtype, device=o.device)
        if self.is_blind:
            blind = ((lse.mT if do.ndim == 3 else lse) == -INF)[..., None]
            blind = blind if absent is None or do.ndim == 3 else blind | absent
            do = tidy_strides(copy_cleared(do, blind, torch.empty_like(o)))
        fits = fits_loads(TensorSpec.like(do))
        return on_boundary(do) if fits else tidy_strides(do.contiguous())

    @property
    def temporary(self) -> int:
        """Bytes allocated by the package, at most: for a gradient sums in float32 of queries and,
        with grouped heads, of keys; do and lists."""
        p, lists = self.call.problem, self.call.lists
        own = sum(x.nbytes for x in lists.tensors) if isinstance(lists, TileLists) else 0
        own += sum(spec.type.bytes for spec in self.call.copied.values())
        if p.grad is None:
            parts = self.call.splits * (self.call.splits > 1)
            return own + 4 * parts * p.H * self.call.rounded("rows", 1) * (p.E + 1)
        rows, keys = self.call.rounded("rows", 128), self.call.rounded("keys", 256)
        widths = [-(-n // 64) * 64 for n in (p.D, p.E)]
        sums = 4 * p.H * rows * (widths[0] + 2)
        shared = 4 * p.G * keys * sum(widths) if p.G < p.H else 0
        specs = self.call.tensors()
        pairs = zip("qkv", p.grad.wants[:3], strict=False)
        unwanted = sum(specs[f"d{name}"].type.bytes for name, w in pairs if not w)
        order = 12 * p.H * (rows // 64 + keys // 32) if self.call.deterministic else 0
        return own + sums + shared + unwanted + order + specs["dout"].type.bytes * p.grad.with_do

    @property
    def leased(self) -> int:
        """Bytes of the workspace, for lists made by each call."""
        lists = self.call.lists
        return lists.scratch.bytes if isinstance(lists, MadeLists) else 0

    @cached_property
    def cleaned(self) -> tuple[str, ...]:
        """The operands with 0 in absent rows."""
        return zeroed_names(self.call.lying)

    def notes(self) -> Iterator[str]:
        lists, native, p = self.call.lists, self.call.native, self.call.problem
        packed = bool(self.call.lying.totals)
        tile = " x ".join(map(str, lists.tile)) if lists else ""
        if isinstance(lists, TileLists):
            share = 100 * lists.empty / lists.total
            yield f"lists of tiles of {tile}: {share:.0f} % are empty and skipped"
        elif lists is not None:
            yield f"each call lists tiles of {tile} by the mask's tensors; empty ones are skipped"
        elif native is None:
            yield "the mask is a function of each place; no tile is skipped"
        if (splits := self.call.splits) > 1:
            yield f"{splits} programs share the keys of a head; another kernel joins their parts"
        if self.call.narrow:
            queries, keys = NARROW
            yield f"tiles of {queries} x {keys}: kernels with more keys in a tile spill too much"
        for name, spec in self.call.copied.items():
            absent = f"with 0 in rows {'of no sequence' if packed else 'past their length'}"
            how = "in C order" if name in STATISTICS else f"to rows at multiples of {ALIGNED} bytes"
            how = absent if name in self.cleaned else how
            yield f"{name} is copied, {format_bytes(spec.type.bytes)}, {how}"
        if {*self.call.lying.gapless} - {*self.call.lying.full}:
            yield DECLARED
        otherwise = f"lies otherwise than in rows of {ALIGNED} bytes"
        if p.grad is not None and packed:
            size = format_bytes(self.call.tensors()["dout"].type.bytes)
            where = "with 0 in rows that see nothing" if self.is_blind else f"where it {otherwise}"
            yield f"do is copied, {size}, {where}"
        elif p.grad is not None:
            yield from cotangent_note(p, otherwise)


def new_results(
    specs: Mapping[str, TensorSpec], device: torch.device, rooms: Rooms
) -> dict[str, torch.Tensor]:
    """Uninitialised results, in their rooms."""
    if not rooms:
        return {name: new_tensor(x, device) for name, x in specs.items()}
    require_aligned(rooms)
    lying = {name: (x.shape, x.strides, x.dtype) for name, x in specs.items()}
    made = {name: room_or_new(rooms, name, lies, device) for name, lies in lying.items()}
    return {name: tidy_strides(x) for name, x in made.items()}


def new_tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """An uninitialised result, or copy of an operand."""
    made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=device)
    return tidy_strides(made)
