"""Generated masks compare each place once, and keep what the mask keeps, both ways round."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attn_graph as ag
from attn_graph.lowering.codegen.device_code import Tracer
from attn_graph.lowering.problem import Problem, sole
from attn_graph.masks.places import Block, Place

LENGTHS = torch.tensor([5, 0, 12, 9])  # as long as the keys, longer, and none at all
CAUSAL, FROM_BELOW = ag.Causal("top_left"), ag.Causal("bottom_right")
ONCE: dict[str, ag.Mask] = {
    "causal": CAUSAL,
    "causal from below": FROM_BELOW,
    "after": ag.Window(-1, None, align="top_left"),
    "window": ag.Window(2, 1, align="bottom_right"),
    "window before": ag.Window(4, -2, align="top_left"),
    "no keys for some": ag.Window(-6, 7, align="top_left"),
    "prefix": ag.Prefix(4),
    "long prefix in a window": ag.Prefix(100) & ag.Window(3, align="top_left"),
    "lengths": ag.KeyLengths(),
    "rows": ag.QueryLengths(),
    "causal lengths": FROM_BELOW & ag.KeyLengths() & ag.QueryLengths(),
    "window in lengths": ag.Window(2, 1, align="bottom_right") & ag.KeyLengths(),
}
OFTEN: dict[str, ag.Mask] = {
    "prefix or causal": CAUSAL | ag.Prefix(4),
    "two windows": ag.Window(1, 1, align="top_left") | ag.Window(-4, 6, align="top_left"),
    "not causal": ~CAUSAL,
    "hole": ag.Window(6, align="top_left") & ~ag.Window(2, align="top_left"),
    "tensor": CAUSAL & ag.Keep(),
}
SIZES = [(9, 9), (5, 12), (12, 5), (1, 12), (9, 1)]


class Lanes(np.ndarray[Any, Any]):
    """Integers of a tile, as generated code takes them."""

    def to(self, dtype: Any) -> Any:  # Any: a dtype of numpy
        """The same in another dtype; a negative integer wraps around as on a GPU."""
        return self.astype(dtype)


class Pointer:
    """A tensor's address, `at` elements after its first."""

    def __init__(self, values: torch.Tensor, at: Any = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.at + offset)


def load(pointer: Pointer, mask: Any = True, other: int = 0) -> Any:
    """What stands at an address, as [1,1] or more."""
    at = np.atleast_2d(np.where(mask, pointer.at, 0))
    read = pointer.values.flatten().numpy()[at.astype(np.int64)]
    return np.where(mask, read, other).view(Lanes)


LANGUAGE = SimpleNamespace(
    minimum=np.minimum,
    maximum=np.maximum,
    where=lambda *a: np.asarray(np.where(*a)).view(Lanes),
    load=load,
    **{name: getattr(np, name) for name in ("int32", "int64", "uint32")},
)


def problem_of(mask: ag.Mask, M: int, N: int) -> Problem:
    """The gradient of an attention of four batch entries under a mask."""
    q, k = (ag.TensorSpec((4, 2, n, 16), torch.float32) for n in (M, N))
    data: dict[str, Any] = {
        name: ag.TensorSpec((4, 1, M, N), torch.bool)
        if name == "keep"
        else ag.TensorSpec((4,), torch.int64)
        for name in mask.needs
    }
    problem = sole(ag.vjp(ag.attention(q, k, k, mask=mask, **data), ["q"])[1])
    assert problem is not None
    return problem


def evaluate(problem: Problem, mask: ag.Mask, by_keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What generated code keeps [4,M,N + 3], in tiles that reach beyond both ends, and what is
    due."""
    M, N, code = problem.M, problem.N, Tracer.of(problem).trace()
    reads = problem.by_role.mask
    tensors = {n: LENGTHS if n == "kv_lengths" else LENGTHS.flip(0) for n in reads}
    tensors |= {"keep": torch.rand(4, 1, M, N) > 0.5} if "keep" in reads else {}
    names: dict[str, Any] = {"tl": LANGUAGE}
    exec(code.keep_by_keys if by_keys else code.keep, names)
    i, j = (np.arange(n + 3, dtype=np.int32).view(Lanes) for n in (M, N))
    kept = []
    for b in range(4):
        place = (i[None, :], j[:, None]) if by_keys else (i[:, None], j[None, :])
        data = tuple(map(Pointer, tensors.values()))
        keep = names["keep"](b, 0, *place, M, N, data, code.numbers)
        shape = (N + 3, M + 3) if by_keys else (M + 3, N + 3)
        whole = torch.from_numpy(np.broadcast_to(keep, shape).copy())
        kept.append((whole.mT if by_keys else whole)[:M])
    block = Block(range(4), range(1), range(M), 2, M, N, tensors)
    due = torch.zeros(4, M, N + 3, dtype=torch.bool)
    keep = torch.as_tensor(mask.keep(Place.of(block, range(N))))
    due[:, :, :N] = keep.broadcast_to(4, 1, M, N)[:, 0]
    return torch.stack(kept), due


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", ONCE | OFTEN)
def test_generated_masks_keep_what_the_mask_keeps(name: str, by_keys: bool) -> None:
    problems = [problem_of((ONCE | OFTEN)[name], *sizes) for sizes in SIZES]
    for problem in problems:
        if (mask := problem.node.mask) is not None:  # one that hides nothing is gone
            kept, due = evaluate(problem, mask, by_keys)
            assert torch.equal(kept, due), problem.specs
    assert any(problem.node.mask is not None for problem in problems)


def comparisons_of_places(text: str) -> int:
    """How many lines of generated code compare something that depends on i and on j."""
    axes: dict[str, set[str]] = {name: {name} for name in "ij"}
    count = 0
    for name, expression in re.findall(r"^ +(\w+) = (.*)$", text, re.MULTILINE):
        read = re.findall(r"\b(?:x\d+|[ij])\b", expression)
        axes[name] = set().union(*(axes[each] for each in read))
        count += len(axes[name]) == 2 and bool(re.search(r"[<>=]=|<|>", expression))
    return count


@pytest.mark.parametrize("name", ONCE)
def test_a_place_is_compared_once(name: str) -> None:
    code = Tracer.of(problem_of(ONCE[name], 9, 12)).trace()
    assert comparisons_of_places(code.keep) <= 1
    assert comparisons_of_places(code.keep_by_keys) <= 1


def test_a_prefix_before_the_diagonal_is_one_comparison_of_a_query() -> None:
    code = Tracer.of(problem_of(CAUSAL | ag.Prefix(4), 9, 12)).trace()
    assert comparisons_of_places(code.keep) == 1
    assert comparisons_of_places(code.keep_by_keys) == 1
