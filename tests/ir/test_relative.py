"""A table of positions in a part of all places, and what it can't be."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.boxes import move_modifier
from attn_graph.ir.modifiers import every_place
from attn_graph.masks.moving import Box, cut_data
from attn_graph.testing.mask_check import ranges
from attn_graph.testing.strategies import Shape, alignments, data_specs, relative_biases, shapes
from attn_graph.testing.tensors import filler, lay_out

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
    whole = op.change(s.clone(), every_place(s, read))
    due = whole[tuple(slice(x.start, x.stop) for x in parts)]
    assert moved.change(here.clone(), every_place(here, cut)).equal(due)


def test_a_table_that_has_no_meaning_is_refused() -> None:
    for entries in (4, 0):
        with pytest.raises(ag.GraphError, match=f"entries {entries} must be 2 R \\+ 1"):
            ag.RelativeBias(entries)
    with pytest.raises(ag.GraphError, match="places have no alignment; drop align="):
        ag.RelativeBias(4, "top_left", places=True)
