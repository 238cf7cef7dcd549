"""FlashAttention 4's lists of tiles where data decide them, by Triton's kernels, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.lowering.fa4 import lists as fa4_lists
from attn_graph.lowering.fa4 import run as fa4_run
from attn_graph.lowering.fa4.backend import PACKAGE
from attn_graph.lowering.fa4.lists import FULL, MIXED, MadeLists, plan_lists
from attn_graph.lowering.problem import Problem, tidy_strides
from attn_graph.machine.target import VIRTUAL
from attn_graph.masks.places import Place
from attn_graph.testing import strategies as drawn
from attn_graph.testing.tensors import tensors_for
from tests.lowering.test_fa4 import Skip, check_backend, fixed, near, skips, spec
from tests.support.fa4_model import call_model, tile_kinds
from tests.support.kernels import interpreted, problem_of

CPU = ag.Target.here("cpu")
LIBRARIES = ((PACKAGE, "4.0.0b36"), ("triton", "3.7.1"))
H200 = evolve(ag.Target.of("h200"), libraries=LIBRARIES)
B200 = evolve(ag.Target.of("b200"), libraries=LIBRARIES)
I32, I64 = torch.int32, torch.int64
Tensors = Mapping[str, torch.Tensor]


def masked(M: int, N: int, B: int = 2, H: int = 2, **options: Any) -> ag.Graph:
    """An attention of small heads."""
    q, k = spec(B, H, M, 8), spec(B, 1, N, 8)
    return ag.attention(q, k, k, **options)


def make_lists(lists: MadeLists, mask: Tensors) -> list[torch.Tensor]:
    """The lists that a call makes. They begin as garbage."""
    room = {n: torch.full(x.shape, -7, dtype=x.dtype) for n, x in lists.made.buffers.items()}
    for launch in lists.made.launches:
        launch({**mask, **room})
    return [room[name] for name in lists.made.kinds]


def listed_kinds(problem: Problem, tile: tuple[int, int], mask: Tensors) -> torch.Tensor | None:
    """The kind of each tile by such lists, [B or 1,H or 1,..]; None without lists."""
    lists = plan_lists(problem, tile)
    if lists is None:
        return None
    rows, columns = -(-problem.M // tile[0]), -(-problem.N // tile[1])
    return tile_kinds(make_lists(lists, mask), rows, columns, problem.grad is not None)


def dense_kinds(problem: Problem, tile: tuple[int, int], mask: Tensors) -> torch.Tensor:
    """The same by looking at the mask's every place."""
    p = problem
    b, h, i, j = (
        torch.arange(n).view([-1] + [1] * (3 - a)) for a, n in enumerate((p.B, p.H, p.M, p.N))
    )
    assert p.node.mask is not None
    kept = torch.as_tensor(p.node.mask.keep(Place(b, h, i, j, p.H, p.M, p.N, dict(mask))))
    kept = kept.expand(p.B, p.H, p.M, p.N)
    lines = []
    for line in kept.split(tile[0], 2):
        each = line.split(tile[1], 3)
        full = [x.shape[2:] == tile and FULL for x in each]
        pairs = [(x.flatten(2).any(2), x.flatten(2).all(2)) for x in each]
        lines.append(
            torch.stack(
                [
                    torch.where(a & bool(f), f, some * MIXED)
                    for (some, a), f in zip(pairs, full, strict=True)
                ],
                -1,
            )
        )
    return torch.stack(lines, 2)


def of_pass(graph: ag.Graph, backward: bool) -> Problem:
    return problem_of(ag.vjp(graph)[1] if backward else graph)


def mask_tensors(graph: ag.Graph, problem: Problem, seed: int) -> Tensors:
    """Tensors for the mask, by name."""
    every = zip(graph.inputs, tensors_for(graph, seed), strict=True)
    given = {i.name: tidy_strides(x) for i, x in every}
    return {name: given[name] for name in problem.by_role.mask}


tiles = st.sampled_from(((128, 128), (256, 128), (128, 256), (128, 80)))


@interpreted
@given(st.data(), drawn.seeds, tiles, st.booleans())
def test_lists_made_on_the_device_hold_of_every_place(
    data: st.DataObject, seed: int, tile: tuple[int, int], backward: bool
) -> None:
    """No kept place lies in a tile that is not listed, and none is hidden in a full one."""
    M, N = (data.draw(st.integers(1, 500)) for _ in "MN")
    size = drawn.Shape(2, 2, 1, M, N, 8, 8)
    options = data.draw(drawn.mask_options(size))
    graph = masked(M, N, **{**options, "align": options["align"] or "top_left"})
    problem = of_pass(graph, backward)
    assume(problem.node.mask is not None and problem.node.mask.needs)
    mask = mask_tensors(graph, problem, seed)
    kinds = listed_kinds(problem, tile, mask)
    assume(kinds is not None)
    assert kinds is not None
    dense = dense_kinds(problem, tile, mask)
    kinds = kinds.expand(dense.shape)
    assert not ((kinds == 0) & (dense > 0)).any()
    assert not ((kinds == FULL) & (dense != FULL)).any()


def documents(count: int, length: int, random: torch.Generator) -> torch.Tensor:
    """Documents one after another, [2, length]."""
    return torch.randint(count, (2, length), generator=random).sort(1).values


EXACT: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "boolean mask": lambda M, N: {"keep": ag.TensorSpec((2, 2, M, N), torch.bool)},
    "lengths": lambda M, N: {
        "q_lengths": ag.TensorSpec((2,), I32),
        "kv_lengths": ag.TensorSpec((2,), I32),
    },
    "documents": lambda M, N: {"segments": (ag.TensorSpec((2, M), I64),) * 2},
}


@interpreted
@pytest.mark.parametrize("name", EXACT)
@given(st.integers(1, 500), st.integers(1, 500), drawn.seeds, tiles, st.booleans())
@settings(max_examples=settings().max_examples * 2 // 5)
def test_lists_made_on_the_device_are_the_mask_by_tiles(
    name: str, M: int, N: int, seed: int, tile: tuple[int, int], backward: bool
) -> None:
    N = M if name == "documents" else N
    graph = masked(M, N, **EXACT[name](M, N))
    problem = of_pass(graph, backward)
    random = torch.Generator().manual_seed(seed)
    if name == "documents":
        ids = documents(3, M, random)
        mask: Tensors = dict.fromkeys(problem.by_role.mask, ids)
    elif name == "lengths":
        most = {"q_lengths": M, "kv_lengths": N}
        mask = {
            n: torch.randint(most[n] + 1, (2,), generator=random, dtype=I32)
            for n in problem.by_role.mask
        }
    else:
        blocks = torch.randint(3, (2, 2, -(-M // 100), -(-N // 100)), generator=random)
        places = blocks.repeat_interleave(100, 2).repeat_interleave(100, 3)[:, :, :M, :N]
        flags = (places == 1) | ((places == 2) & (torch.rand(2, 2, M, N, generator=random) < 0.5))
        mask = {"keep": flags}
    kinds = listed_kinds(problem, tile, mask)
    assert kinds is not None
    dense = dense_kinds(problem, tile, mask)
    assert kinds.expand(dense.shape).tolist() == dense.tolist()


TARGETS = (H200, B200)


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On both targets a model of the package runs, each call with lists wherever data decide."""
    monkeypatch.setattr(fa4_run, "call_package", call_model)
    monkeypatch.setattr(fa4_run, "find_misplaced", lambda _: [])  # as drawn they begin anywhere
    monkeypatch.setattr(fa4_lists, "may_repay", lambda *_: True)
    VIRTUAL.update(TARGETS)
    yield
    VIRTUAL.difference_update(TARGETS)


@interpreted
@pytest.mark.usefixtures("modelled")
@given(near(), st.sampled_from(TARGETS), drawn.seeds, skips)
@settings(fixed, max_examples=settings().max_examples // 2)
def test_a_call_with_lists_of_its_own_gives_what_the_graph_says(
    graph: ag.Graph, target: ag.Target, seed: int, skip: Skip
) -> None:
    """Both passes, by a model of the package that visits the listed tiles alone."""
    check_backend(graph, target, seed, skip)
