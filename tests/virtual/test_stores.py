"""Stores of several threads to one place: of equal bytes, or one after another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import final

import pytest
import torch
from attrs import frozen
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from attn_graph.testing.gpu import Fault
from attn_graph.testing.strategies import seeds
from tests.support.ptx_programs import run_ptx

THREADS, WARP = 64, 32
many = settings(phases=(Phase.explicit, Phase.generate))
ADDRESSES = "mul.wide.u32 %d7, %r0, 4;" + "".join(
    f"add.s64 %d8, %d{n + 1}, %d7; ld.global.b32 %r{n + 1}, [%d8];" for n in range(4)
)
STORES = {  # of number %r{2 + 2 n} to place %r{1 + 2 n}
    "global": "mul.wide.u32 %d9, %r{at}, 4; add.s64 %d9, %d0, %d9;\nst.global.b32 [%d9], %r{what};",
    "shared": "shl.b32 %r9, %r{at}, 2; mov.b32 %r10, global_smem; add.s32 %r9, %r9, %r10;\n"
    "st.shared.b32 [%r9], %r{what};",
}
Odd = list[tuple[int, int, int]]  # a thread, where it stores, and what
odd_ones: st.SearchStrategy[Odd] = st.lists(
    st.tuples(st.integers(0, THREADS - 1), st.integers(0, THREADS - 1), st.integers(0, 2)),
    max_size=3,
)


@final
@frozen
class Step:
    """A store by all threads: each to a place of its own, less the odd ones."""

    places: tuple[int, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, odd: Odd) -> Step:
        """What a place holds is its number, unless an odd thread stores 1 or 2 more."""
        places = {n: n for n in range(THREADS)} | {n: place for n, place, _ in odd}
        more = {n: what for n, _, what in odd}
        return cls((*places.values(),), tuple(p + more.get(n, 0) for n, p in places.items()))

    def meets(self, other: Step) -> Iterator[tuple[int, int, bool]]:
        """Two threads that store to one place, and whether they store the same number."""
        for a, b in product(range(THREADS), repeat=2):
            if self.places[a] == other.places[b]:
                yield a, b, self.numbers[a] == other.numbers[b]


def are_apart(a: int, b: int) -> bool:
    """Whether threads are of two warps."""
    return a // WARP != b // WARP


@pytest.mark.parametrize("memory", STORES)
@given(first=odd_ones, then=odd_ones, barrier=st.booleans(), seed=st.none() | seeds)
@example(first=[(40, 3, 1)], then=[], barrier=True, seed=None)  # two warps at once
@example(first=[(4, 3, 1)], then=[], barrier=True, seed=None)  # two lanes at once
@example(first=[], then=[(40, 3, 1), (3, 40, 0)], barrier=False, seed=None)  # one after another
@example(first=[], then=[(40, 3, 1), (3, 40, 0)], barrier=True, seed=None)
@many
def test_stores_of_two_threads_to_a_place_are_equal_or_one_after_another(
    memory: str, first: Odd, then: Odd, barrier: bool, seed: int | None
) -> None:
    one, two = Step.of(first), Step.of(then)
    assume(barrier or not any(are_apart(a, b) for a, b, _ in one.meets(one)))  # the last is kept
    at_once = any(not same for step in (one, two) for *_, same in step.meets(step))
    later = any(not same and are_apart(a, b) for a, b, same in one.meets(two))
    tensors = {"x": torch.full((THREADS,), -1, dtype=torch.int32)} | {
        name: torch.tensor(numbers, dtype=torch.int32)
        for name, numbers in zip(
            "abcd", (one.places, one.numbers, two.places, two.numbers), strict=True
        )
    }
    stores = (STORES[memory].format(at=1 + 2 * n, what=2 + 2 * n) for n in range(2))
    body = ADDRESSES + ("\nbar.sync 0;\n" if barrier else "\n").join(stores)
    wrong = at_once or (later and not barrier)
    with pytest.raises(Fault) if wrong else nullcontext() as caught:
        run_ptx(body, tensors, threads=THREADS, seed=seed)
    if caught:
        lines = re.findall(r"PTX line \d+", str(caught.value).splitlines()[0])
        assert len(lines) == 1 if "two threads at once" in str(caught.value) else len(lines) == 2
