"""Global memory of a launch: the tensors' own, in regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import torch
from attrs import evolve, frozen

from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.regions import Access, Region, Unset
from attn_graph.testing.gpu.rules import DTYPES, Array, Arrays, action, any_of
from attn_graph.testing.gpu.threads import Threads


def holds(words: Array, places: Array, values: Array) -> Array:
    """The columns of places in a memory that hold these values."""
    return np.asarray((words[places] == values).all(axis=0))


@final
@frozen(eq=False)
class Memory:
    """Global memory of a launch."""

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, m: Program) -> Memory:
        """That of a program's launch."""
        memory = m.launch.memory
        assert isinstance(memory, Memory)
        return memory

    @classmethod
    def around(cls, tensors: Mapping[str, torch.Tensor], unset: Unset) -> Memory:
        """Of the tensors of a launch, by name."""
        storages: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if tensor.untyped_storage().nbytes():
                start = tensor.untyped_storage().data_ptr()
                storages.setdefault(start, {})[name] = tensor
        regions = (Region.of(storages[start], unset) for start in sorted(storages))
        return cls(tuple(regions))

    @cached_property
    def starts(self) -> Array:
        """The first address of each region."""
        return np.array([region.start for region in self.regions], np.uint64)

    def split(
        self, m: Program, text: str, addresses: Array, size: int, align: int = 0
    ) -> Iterator[tuple[Region, Any, Array]]:  # Any: an index of arrays
        """The regions of accesses to `size` bytes, the indices of those in each, and offsets."""
        if any_of(addresses % np.uint64(align or size)):
            m.fault(f"{text} {size} bytes of global memory at no multiple of {align or size}")
        homes = np.searchsorted(self.starts, addresses, "right") - 1
        met = {*homes.tolist()}
        for home in sorted(met):
            at = slice(None) if len(met) == 1 else np.flatnonzero(homes == home)
            region = self.regions[max(home, 0)]
            last = int(addresses[at].max()) + size
            if home < 0 or last > region.stop:
                near = f"{region.name} is at {region.start:#x} to {region.stop:#x}"
                place = f"global memory at {last - size:#x}"
                m.fault(f"{text} {place}, which is in no tensor; {near}")
            yield region, at, (addresses[at] - np.uint64(region.start)).astype(np.int64)

    def load(
        self, m: Program, who: Access, addresses: Array, size: int, count: int, align: int = 0
    ) -> Array:
        """`count` numbers of `size` bytes at each address, [count, addresses]."""
        loaded = np.zeros((count, len(addresses)), f"u{size}")
        for region, at, offsets in self.split(m, who.text, addresses, size * count, align):
            region.check(m, who.select(at), offsets, size * count)
            loaded[:, at] = region.words(size)[offsets // size + np.arange(count)[:, None]]
        return loaded

    def store(
        self, m: Program, who: Access, addresses: Array, values: Array, align: int = 0
    ) -> None:
        """Store numbers to each address, [count, addresses]."""
        size, count = values.itemsize, len(values)
        for region, at, offsets in self.split(m, who.text, addresses, size * count, align):
            words, places = region.words(size), offsets // size + np.arange(count)[:, None]
            new = values[:, at]
            same = partial(holds, words, places, new)
            region.check(m, who.select(at), offsets, size * count, same)
            words[places] = new
            if not same().all():
                text = f"a store of other bytes by two threads at once to {region.name}"
                both = twice(m, region, who.select(at), offsets, same())
                m.report(Omission.UNEQUAL_STORES, text, *both)

    def add(self, m: Program, who: Access, addresses: Array, values: Array, align: int = 0) -> None:
        """Add numbers to those at each address, [count, addresses], in any order."""
        who, size, count = evolve(who, atomic=True, reads=True), values.itemsize, len(values)
        for region, at, offsets in self.split(m, who.text, addresses, size * count, align):
            region.check(m, who.select(at), offsets, size * count)
            places = offsets // size + np.arange(count)[:, None]
            np.add.at(region.words(size).view(values.dtype), places, values[:, at])


def twice(m: Program, region: Region, who: Access, offsets: Array, same: Array) -> Iterator[str]:
    """The first place that two threads store to at once, and the warps of these."""
    first = np.flatnonzero(~same)[0]
    for n in np.flatnonzero(offsets == offsets[first])[:2].tolist():
        spot = region.spot(int(offsets[n]) // region.unit)
        yield f"{who.text} {spot} by {m.clocks.name(int(who.agents[n]))}"


PLAIN = (None, ".weak", ".volatile")  # orders of loads and stores that order nothing


@action(r"ld\.param(?P<many>\.v[24])?\.(?P<type>[busf]\d+)", "{type}* <- param")
def load_parameter(
    m: Program, g: Threads, name: str, offset: int, many: str | None, type: str
) -> Array:
    """d = a part of a parameter of the kernel, or several contiguous parts."""
    contents, dtype, count = m.launch.parameters[name], DTYPES[type], int((many or ".v1")[2:])
    size = dtype.itemsize * count
    if offset + size > len(contents):
        m.fault(f"a load of {size} bytes at {offset} of {name}, which has {len(contents)}")
    numbers = np.frombuffer(contents, dtype, count, offset)
    return np.repeat(numbers[:, None], g.count, 1)


SCOPE = r"(?:\.(?:cta|cluster|gpu|sys))?"
CACHE = r"(?:\.(?:nc|c[agsv]|lu|w[bt]|L1::\w+|L2::\w+))*"  # changes no result
MANY = CACHE + r"(?P<many>\.v[248])?\.(?P<type>[busf]\d+)"


@action(rf"ld(?P<order>\.\w+)?{SCOPE}\.global" + MANY, "{type}* <- @ _?")
def load_global(
    m: Program,
    g: Threads,
    address: Array,
    order: str | None,
    many: str | None,
    type: str,
    used: int | None = None,
) -> Array:
    """d = the number at an address, or several contiguous ones."""
    dtype, count, at = DTYPES[type], int((many or ".v1")[2:]), g.take(address)
    who = Access.by(m, "a load of", g.owners, atomic=order not in PLAIN)
    if order == ".acquire":
        m.acquire(at)
    words = m.part(Memory).load(m, who, at, dtype.itemsize, count)
    return g.spread(words.view(dtype))


@action(r"createpolicy\.fractional\.L2::\w+\.b64", "u64 <- _?")
def make_policy(m: Program, g: Threads) -> Array:
    """d = how to keep lines in a cache, which changes no result."""
    return np.zeros(g.count, np.uint64)


@action(r"prefetch\.global\.L[12]|discard\.global\.L2", "<- _ _?")
@action(r"(?:fence|membar)\.(?:(?:acq_rel|sc)\.)?(?:cta|gl|gpu|sys)", "<-")
def do_nothing(m: Program, g: Threads) -> None:
    """Caches change no result; the order of threads comes from barriers and atomic operations."""


@action(rf"st(?P<order>\.\w+)?{SCOPE}\.global" + MANY, "<- @ {type}* _?")
def store_global(
    m: Program,
    g: Threads,
    address: Array,
    values: Arrays,
    order: str | None,
    many: str | None,
    type: str,
) -> None:
    """Store a number at an address, or several contiguous ones."""
    size, at = DTYPES[type].itemsize, g.take(address)
    rows = g.stack(x.view(f"u{size}") for x in values)
    who = Access.by(m, "a store to", g.owners, stores=True, atomic=order not in PLAIN)
    m.part(Memory).store(m, who, at, g.take(rows))
    if order == ".release":
        m.release_to(at)
