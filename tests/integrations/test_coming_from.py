"""The page for those who come from another library has a row for each argument there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import attn_graph as ag
from attn_graph.integrations.xformers import REACHES
from tests.support.sources import ROOT

PAGE = (ROOT / "docs/guides/coming-from.md").read_text(encoding="utf-8")
SECTIONS = {
    title.strip("`"): text
    for title, _, text in (part.partition("\n") for part in re.split("^## ", PAGE, flags=re.M))
}


def torch_arguments() -> Iterable[str]:
    """Of PyTorch's own attention, as its operator declares them."""
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    return [argument.name for argument in schema.arguments]


def flex_arguments() -> Iterable[str]:
    """Of FlexAttention and its block masks, but for those that are internal."""
    calls = (flex.flex_attention, flex.create_block_mask)
    names = [name for call in calls for name in inspect.signature(call).parameters]
    return [name for name in names if not name.startswith("_")]


ARGUMENTS = {  # of libraries that need not be there: as of flash-attn 2.8, xformers 0.0.32, jax 0.8
    "F.scaled_dot_product_attention": torch_arguments(),
    "FlexAttention": flex_arguments(),
    "flash-attn": (
        *("q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap"),
        *("alibi_slopes", "deterministic", "return_attn_probs"),
    ),
    "xformers": ("query", "key", "value", "attn_bias", "p", "scale", "op", "output_dtype"),
    "jax.nn.dot_product_attention": (
        *("query", "key", "value", "bias", "mask", "scale", "is_causal", "query_seq_lengths"),
        *("key_value_seq_lengths", "local_window_size", "implementation", "return_residual"),
    ),
}


def words_there(section: str) -> set[str]:
    """The words of code in the first column of a section's tables."""
    rows = re.findall(r"^\| (.*?) \| ", SECTIONS[section], re.MULTILINE)
    return {word for row in rows for code in re.findall("`(.*?)`", row) for word in names_in(code)}


def names_in(code: str) -> list[str]:
    """The names of a piece of code."""
    return re.findall(r"[A-Za-z_]\w*", code)


@pytest.mark.parametrize("library", ARGUMENTS)
def test_each_argument_has_a_row(library: str) -> None:
    assert not {*ARGUMENTS[library]} - words_there(library)


def test_each_class_of_xformers_that_is_read_has_a_row() -> None:
    assert not REACHES.keys() - words_there("xformers")


def test_what_the_page_names_is_there() -> None:
    names = {*re.findall(r"\bag\.(\w+)", PAGE)}
    assert not {name for name in names if not hasattr(ag, name)}
