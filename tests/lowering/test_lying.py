"""How operands lie is read once: padded problems mean the tensors that were declared."""

from __future__ import annotations

import ast
from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from tests.support.sources import source_files, tree_of

HALF, I32, FLOAT = torch.bfloat16, torch.int32, torch.float32
B, H, G, M, N, D, T, T_KEYS, PAGE, POOL = 3, 4, 2, 24, 32, 16, 40, 56, 8, 17


@final
@frozen
class Way:
    """A way in which the operands of an attention lie. gaps: more elements between rows."""

    rows: str
    keys: str
    lengths: bool = False
    scaled: bool = False
    gaps: int = 0
    goes_back: bool = False

    def spec(self, *shape: int, dtype: torch.dtype = HALF) -> ag.TensorSpec:
        """A packed tensor [T,H,D], or a pool [n,P,G,D], with gaps after rows."""
        *_, L, heads, size = shape
        row = heads * size + self.gaps
        strides = (L * row, row, size, 1)
        return ag.TensorSpec(shape, dtype, strides[-len(shape) :])

    def graph(self) -> ag.Graph:
        """The attention, or its gradient, after all passes."""
        kind = torch.int8 if self.scaled else HALF
        more: dict[str, Any] = {}
        q = self.spec(T, H, D) if self.rows == "packed" else ag.TensorSpec((B, H, M, D), HALF)
        k = {
            "dense": ag.TensorSpec((B, G, N, D), kind),
            "packed": self.spec(T_KEYS, G, D, dtype=kind),
            "paged": self.spec(POOL, PAGE, G, D, dtype=kind),
        }[self.keys]
        starts, lengths = ag.TensorSpec((B + 1,), I32), ag.TensorSpec((B,), I32)
        if self.rows == "packed":
            more |= {"q_starts": starts} | ({"q_lengths": lengths} if self.lengths else {})
        if self.keys == "packed":
            more |= {"kv_starts": starts} | ({"kv_lengths": lengths} if self.lengths else {})
        if self.keys == "paged":
            more |= {"pages": ag.TensorSpec((B, N // PAGE), I32), "kv_lengths": lengths}
        if "packed" in (self.rows, self.keys):
            pair = M if self.rows == "packed" else None, N if self.keys == "packed" else None
            more["max_lengths"] = pair
        if self.scaled:
            scale = ag.TensorSpec((1,) * (len(k.shape) - 2) + (G, 1), FLOAT)
            scale = ag.TensorSpec((1, G, 1, 1), FLOAT) if self.keys == "dense" else scale
            more |= {"k_scale": scale, "v_scale": scale}
        graph = ag.attention(q, k, k, stats=True, **more)
        return simplify(ag.vjp(graph, ["q"])[1] if self.goes_back else graph)

    @property
    def lying(self) -> Lying:
        lying = facts_of(self.graph()).once(Lying.of)
        assert lying is not None
        return lying


ways = st.builds(
    Way,
    rows=st.sampled_from(["dense", "packed"]),
    keys=st.sampled_from(["dense", "packed", "paged"]),
    lengths=st.booleans(),
    scaled=st.booleans(),
    gaps=st.sampled_from([0, 8]),
    goes_back=st.booleans(),
)
SIZES = {"B": B, "H": H, "G": G, "M": M, "N": N, "D": D}


@given(ways)
def test_both_padded_problems_have_the_sizes_of_sequences(way: Way) -> None:
    lying = way.lying
    for problem in (lying.problem, lying.stepped):
        assert {name: getattr(problem, name) for name in SIZES} == SIZES
        assert (problem.grad is not None) == way.goes_back
    assert lying.most == {"rows": M, "keys": N}


@given(ways)
def test_a_stepped_problem_keeps_the_steps_of_rows_and_heads(way: Way) -> None:
    """Of operands that are read in place; all others are as in the dense problem."""
    lying = way.lying
    for name, dense, spec in zip("qkv", lying.problem.specs, lying.stepped.specs, strict=False):
        own = lying.in_place.get(name)
        assert spec.shape == dense.shape
        if own is None:
            assert spec.unit_last
            continue
        *_, row, head, last = own.strides
        assert spec.strides[1:] == (head, row, last)


@given(ways)
def test_tables_and_totals_are_those_of_packed_and_paged_operands(way: Way) -> None:
    lying = way.lying
    totals = {"rows": T} if way.rows == "packed" else {}
    totals |= {"keys": T_KEYS} if way.keys == "packed" else {}
    assert lying.totals == totals
    names = ("k_scale", "v_scale") * way.scaled
    names += ("q_starts",) * (way.rows == "packed") + ("kv_starts",) * (way.keys == "packed")
    assert tuple(lying.tables) == names + ("pages",) * (way.keys == "paged")
    assert (lying.page, len(lying.pools)) == ((PAGE, 2) if way.keys == "paged" else (0, 0))
    assert lying.gapless == (() if way.lengths else tuple(totals))
    assert not lying.alike
    for side, spec in (("rows", lying.specs[0]), ("keys", lying.specs[1])):
        count = {"rows": B * M, "keys": POOL * PAGE if way.keys == "paged" else B * N} | totals
        assert lying.rows_of(spec, side) == count[side]


def test_one_tensor_of_starts_packs_both_sides_alike() -> None:
    q, starts = ag.TensorSpec((T, H, D), HALF), ag.TensorSpec((B + 1,), I32)
    graph = ag.attention(q, q, q, q_starts=starts, max_lengths=(M, M))
    lying = facts_of(simplify(graph)).once(Lying.of)
    assert lying is not None
    assert lying.alike
    assert lying.gapless == ("rows", "keys")
    assert [*lying.tables] == ["q_starts", "kv_starts"]


@given(ways)
def test_results_lie_like_their_operands(way: Way) -> None:
    lying = way.lying
    assert lying.o().shape == ((T, H, D) if way.rows == "packed" else (B, H, M, D))
    assert lying.statistic() == ((H, T) if way.rows == "packed" else (B, H, M))
    assert [lying.gradient(n).shape for n in range(3)] == [x.shape for x in lying.specs[:3]]


@given(ways)
def test_libraries_read_all_but_quantised_keys(way: Way) -> None:
    facts = facts_of(way.graph())
    lying = facts.once(Lying.for_libraries)
    assert (lying is None) == way.scaled
    assert lying is None or lying == facts.once(Lying.of)


GPUS = ("triton", "cudnn", "fa4", "torch_cuda")
PLACES = {"Packed", "row_count", "count_sequences", "Unpack", "Unpage"}


@pytest.mark.parametrize("backend", GPUS)
def test_no_backend_for_gpus_reads_packed_operands_by_itself(backend: str) -> None:
    """Places, sizes and tables of operands are read off a Lying."""
    wrong = [
        f"{module}: {ast.unparse(node)}"
        for module, path in source_files("*.py").items()
        if module.startswith(f"attn_graph.lowering.{backend}.")
        for node in ast.walk(tree_of(path))
        if getattr(node, "id", getattr(node, "name", None)) in PLACES
        or (isinstance(node, ast.Attribute) and getattr(node.value, "attr", "") == "packed")
    ]
    assert not wrong
