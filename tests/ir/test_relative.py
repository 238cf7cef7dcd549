"""A table of positions in a part of all places, and what it can't be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.transforms.boxes import move_modifier
from attn_graph.ir.transforms.moving import Box, cut_data
from attn_graph.masks.places import Place
from attn_graph.testing.mask_check import ranges
from attn_graph.testing.strategies import (
    Shape,
    alignments,
    data_specs,
    relative_biases,
    seeds,
    shapes,
)
from attn_graph.testing.tensors import filler, lay_out
from tests.support.sequences import Batch, batches

attention: Any = ag.nn.functional.attention  # Any: results are single tensors here
LENGTHS = st.sets(st.sampled_from(["kv_lengths", "q_lengths"])).map(sorted).map(tuple)


@given(shapes(9), st.data())
def test_a_part_of_all_places_reads_what_the_whole_reads(shape: Shape, data: st.DataObject) -> None:
    op = data.draw(relative_biases(alignments(shape, None), LENGTHS))
    sizes, random = shape.full("bhij"), torch.Generator().manual_seed(0)
    needs = data.draw(data_specs(op.needs, shape))
    read = {n: lay_out(s, filler(s.type, random, 9, 0.0, 1.0), random) for n, s in needs.items()}
    s = torch.zeros(sizes, dtype=torch.float64)
    parts = batch, heads, rows, keys = tuple(data.draw(ranges(n)) for n in sizes)
    box = evolve(Box.whole(*sizes), batch=batch, heads=heads, rows=rows, keys=keys)
    assume(not box.has_all_positions)  # then lengths are those of the part
    moved = move_modifier(op, box)
    cut = cut_data({name: x.axes for name, x in moved.needs.items()}, box, read)
    here = s[tuple(slice(x.start, x.stop) for x in parts)]
    whole = op.change(s.clone(), Place.whole(s, read))
    due = whole[tuple(slice(x.start, x.stop) for x in parts)]
    assert moved.change(here.clone(), Place.whole(here, cut)).equal(due)


def test_a_table_that_has_no_meaning_is_refused() -> None:
    for entries in (4, 0):
        with pytest.raises(ag.GraphError, match=f"entries {entries} must be 2 R \\+ 1"):
            ag.RelativeBias(entries)
    with pytest.raises(ag.GraphError, match="places have no alignment; drop align="):
        ag.RelativeBias(4, "top_left", places=True)


@given(batch=batches(), seed=seeds, align=st.sampled_from(["top_left", "bottom_right"]))
def test_a_packed_sequence_reads_a_table_as_it_does_alone(
    batch: Batch, seed: int, align: Any
) -> None:
    """Whatever the longest sequences are said to be, and wherever the alignment is said."""
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch.total(side), 2, 4, generator=random) for side in (0, 1))
    table, M, N = torch.randn(2, 7, generator=random), *batch.most
    starts, counts = [*map(batch.starts, (0, 1))], [*map(batch.lengths, (0, 1))]
    where: dict[str, Any] = dict(zip(("q_starts", "kv_starts"), starts, strict=True))
    where |= dict(zip(("q_lengths", "kv_lengths"), counts, strict=True)) if batch.gaps else {}
    said, free = ag.RelativeBias(7, align), ag.RelativeBias(7)
    first, *others = (
        attention(q, k, k, **where, modifiers=(step,), table=table, align=whole, max_lengths=most)
        for step, whole in ((said, None), (free, align))
        for most in ((M, N), (M + 2, N + 5), None)
    )
    assert all(map(first.equal, others))
    firsts = zip(*(x[:-1].tolist() for x in starts), strict=True)
    sizes = zip(batch.rows, batch.keys, strict=True)
    for (i, j), (m, n) in zip(firsts, sizes, strict=True):
        rows, keys = q[i : i + m].transpose(0, 1)[None], k[j : j + n].transpose(0, 1)[None]
        due = attention(rows, keys, keys, modifiers=(said,), table=table)
        torch.testing.assert_close(first[i : i + m], due[0].transpose(0, 1))


def test_a_table_counts_by_lengths_of_padded_tensors_as_alibi_does() -> None:
    """With slopes of 1 both are one."""
    q, k = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 6, 4)
    options: dict[str, Any] = {"kv_lengths": torch.tensor([6, 4]), "align": "bottom_right"}
    table = -torch.arange(-8, 9).abs()[None].float()
    by_table = attention(q, k, k, modifiers=(ag.RelativeBias(17),), table=table, **options)
    by_slopes = attention(q, k, k, alibi=torch.ones(1), **options)
    torch.testing.assert_close(by_table, by_slopes)


def test_a_step_of_packed_sequences_asks_for_an_alignment() -> None:
    x, starts = ag.TensorSpec((6, 2, 4), torch.float32), ag.TensorSpec((3,), torch.int32)
    slopes = ag.TensorSpec((2,), torch.float32)
    where: dict[str, Any] = {"q_starts": starts, "kv_starts": starts, "max_lengths": (4, 4)}
    steps: dict[ag.Modifier, dict[str, Any]] = {
        ag.RelativeBias(7): {"table": ag.TensorSpec((2, 7), torch.float32)},
        ag.Alibi(): {"alibi": slopes},
    }
    for step, reads in steps.items():
        with pytest.raises(ag.GraphError, match="a sequence may have more keys than queries"):
            ag.attention(x, x, x, modifiers=(step,), **where, **reads)
