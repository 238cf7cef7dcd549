"""What `plan.check` says of numbers that point at nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.data_checks import check_data

attention: Any = ag.nn.functional.attention  # Any: tensors by name, and options
SPEC = ag.TensorSpec
I32, F32 = torch.int32, torch.float32
WHERE = {
    "q_starts": torch.tensor([0, 2, 2, 5], dtype=I32),
    "kv_lengths": torch.tensor([4, 0, 3], dtype=I32),
    "pages": torch.tensor([[0, 3], [-1, 9], [2, 9]], dtype=I32),
}


def make_paged() -> tuple[ag.Graph, dict[str, torch.Tensor]]:
    """Packed queries over pages of 3 rows, which nobody reads past the lengths."""
    q, pool = torch.randn(6, 2, 4), torch.randn(4, 3, 1, 4)
    where: dict[str, Any] = {name: SPEC.like(x) for name, x in WHERE.items()}
    mask = ag.Causal("bottom_right")
    specs = SPEC.like(q), SPEC.like(pool), SPEC.like(pool)
    graph = ag.attention(*specs, mask=mask, max_lengths=(3, None), **where)
    return graph, {"q": q, "k": pool, "v": pool, **WHERE}


WRONG = {
    "without 0": ("q_starts", [1, 3, 3, 5], "q_starts: expected 0 first, got 1"),
    "descending": ("q_starts", [0, 3, 2, 5], "q_starts: expected ascending ones, got 3, 2"),
    "past the rows": ("q_starts", [0, 2, 2, 7], "q_starts: from 0 to 7, of 6 rows"),
    "too long": ("q_starts", [0, 4, 4, 5], "sequence 0 has 4, and 4 rows .* of at most 3"),
    "past the pages": ("kv_lengths", [7, 0, 3], "kv_lengths: entry 0 has 7, and its pages 6 rows"),
    "negative": ("kv_lengths", [4, -1, 3], "kv_lengths: entry 1 has -1"),
    "page past the pool": ("pages", [[0, 4], [0, 0], [2, 0]], "entry 0 has pages from 0 to 4, of"),
    "page before it": ("pages", [[0, 1], [0, 0], [-1, 0]], "entry 2 has pages from -1 to -1, of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_check_names_the_tensor_and_both_values(name: str) -> None:
    graph, tensors = make_paged()
    tensor, values, words = WRONG[name]
    wrong = tensors | {tensor: torch.tensor(values, dtype=I32)}
    plan = ag.compile(graph, target="cpu")
    for attempt in (plan.check, plan):
        with pytest.raises(ag.PlanMismatchError, match=words):
            attempt(**wrong)


def test_a_check_passes_what_a_plan_takes() -> None:
    graph, tensors = make_paged()
    plan = ag.compile(graph, target="cpu")
    plan.check(**tensors)
    plan(**tensors)
    with pytest.raises(ag.PlanMismatchError, match="kv_lengths: expected i32"):
        plan.check(**tensors | {"kv_lengths": tensors["kv_lengths"].long()})


@pytest.mark.parametrize(
    ("kv", "q", "words"),
    [
        ([5, 2], [1, 2], "kv_lengths: entry 0 has 5"),
        ([4, 2], [1, -2], "q_lengths: entry 1 has -2"),
    ],
)
def test_lengths_of_padded_tensors_are_checked_too(kv: list[int], q: list[int], words: str) -> None:
    x, n = SPEC((2, 1, 4, 8), torch.float16), SPEC((2,), I32)
    graph = simplify(ag.attention(x, x, x, kv_lengths=n, q_lengths=n))
    tensors = {"kv_lengths": kv, "q_lengths": q}
    given = [torch.tensor(tensors.get(i.name, 0), dtype=I32) for i in graph.inputs]
    with pytest.raises(ag.PlanMismatchError, match=words):
        check_data(graph, dict(enumerate(given)))
    check_data(graph, {n: x.clamp(0, 4) for n, x in enumerate(given)})


@pytest.mark.parametrize("freed", [-1, 10**6])
def test_a_check_reads_no_pages_that_the_mask_hides_from_all_queries(freed: int) -> None:
    """Of 37 keys in pages of 8 the last query and the 9 before its key see those of two pages."""
    q, pool, table = SPEC((1, 2, 1, 4), F32), SPEC((10, 8, 1, 4), F32), SPEC((1, 5), I32)
    mask = ag.Window(9, 0, "bottom_right") & ag.Keep()
    where: dict[str, Any] = {
        "pages": table,
        "kv_lengths": SPEC((1,), I32),
        "keep": SPEC((1, 1, 1, 40), torch.bool),
    }
    graph = simplify(ag.attention(q, pool, pool, mask=mask, **where))
    inputs = {i.name: i for i in graph.inputs}
    tensors = {name: torch.zeros(i.spec.shape, dtype=i.spec.dtype) for name, i in inputs.items()}
    tensors["kv_lengths"] += 37

    def check(*pages: int) -> None:
        tensors["pages"] = torch.tensor([pages], dtype=I32)
        check_data(graph, {n: tensors[i.name] for n, i in enumerate(graph.inputs)})

    check(freed, freed, freed, 2, 9)
    for wrong in ((freed, freed, freed, 2, 10), (freed, freed, freed, freed, 9)):
        with pytest.raises(ag.PlanMismatchError, match="of a pool of 10"):
            check(*wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("wrong", [[5, 2], [4, -1]])
@pytest.mark.parametrize("name", ["kv_lengths", "q_lengths"])
def test_a_call_checks_lengths_of_padded_tensors(
    name: str, wrong: list[int], cap: float | None, dtype: torch.dtype
) -> None:
    """On CPUs, in both passes; within packed calls too."""
    x = torch.randn(2, 1, 4, 8).to(dtype)
    options: Any = {"soft_cap": cap, name: SPEC((2,), I32)}
    plan = ag.compile(ag.attention(*[SPEC.like(x)] * 3, **options), target="cpu")
    lengths = torch.tensor(wrong, dtype=I32)
    plan(x, x, x, lengths.clamp(0, 4))
    for leaf in (x, x.clone().requires_grad_()):
        with pytest.raises(ag.PlanMismatchError, match=f"{name}: entry . has .*, of 4 rows"):
            plan(leaf, x, x, lengths)
    rows = x.transpose(1, 2).flatten(0, 1)
    where = {"q_starts": torch.tensor([0, 3, 8])}
    with pytest.raises(ag.PlanMismatchError, match=r"kv_lengths: entry . has .*, of 4 rows"):
        attention(rows, x, x, **where, kv_lengths=lengths, max_lengths=(5, None))


@pytest.mark.parametrize("name", ["q_starts", "kv_starts"])
@pytest.mark.parametrize("formula", [None, ag.Formula("i >= j")])
def test_starts_begin_with_0(name: str, formula: ag.Mask | None) -> None:
    """Unless lengths say which rows are whose."""
    x, whole, late = torch.randn(6, 2, 4), torch.tensor([0, 2, 6]), torch.tensor([1, 2, 6])
    where = {"q_starts": whole, "kv_starts": whole} | {name: late}
    options: dict[str, Any] = {"mask": formula, "max_lengths": (5, 5)}
    with pytest.raises(ag.PlanMismatchError, match=f"{name}: expected 0 first, got 1"):
        attention(x, x, x, **where, **options)
    options |= {n: SPEC.like(y) for n, y in where.items()}
    plan = ag.compile(ag.attention(*[SPEC.like(x)] * 3, **options), target="cpu")
    with pytest.raises(ag.PlanMismatchError, match=f"{name}: expected 0 first, got 1"):
        plan.check(x, x, x, **where)
    lengths = dict.fromkeys(("q_lengths", "kv_lengths"), torch.tensor([1, 4]))
    o = attention(x, x, x, **options | where | lengths)
    assert (o[: late[0]] == 0).all() or name == "kv_starts"
