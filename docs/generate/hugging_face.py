"""Which models of transformers are tested, how, and what their layers ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.generate.pages import table

TESTS = {  # a column, and the test whose families it has
    "gradients": "test_logits_and_gradients_are_those_of_eager",
    "padded right": "test_padding_at_the_end_changes_nothing",
    "padded left": "test_padding_at_the_start_changes_nothing",
    "packed": "test_packed_sequences_do_not_see_each_other",
    "packed by lengths": "test_cumulative_lengths_separate_packed_sequences",
    "cached": "test_a_cache_changes_nothing",
    "static cache": "test_a_cache_of_fixed_size_changes_nothing",
    "generate": "test_generation_gives_the_tokens_that_eager_gives",
    "checkpointed": "test_checkpointed_layers_have_the_same_gradients",
    "compiled": "test_a_model_of_each_family_is_compiled_whole",
}


def models() -> str:
    """A row for each family: its class, what is tested of it, and what its layers ask for."""
    from tests.integrations import test_transformers as tests  # which imports transformers

    drawn = {column: families_of(getattr(tests, test)) for column, test in TESTS.items()}
    rows: list[tuple[object, ...]] = []
    for name in tests.FAMILIES:
        model = tests.model_of(name, "attn_graph")
        asked = "<br>".join(dict.fromkeys(map(describe_graph, graphs_of(tests, name, model))))
        rows.append(
            (
                f"{name}: `{type(model).__name__}`",
                *("yes" if name in families else "" for families in drawn.values()),
                asked,
            )
        )
    return table(("model", *TESTS, "its layers"), rows)


def families_of(test: Any) -> set[str]:  # Any: a test that pytest knows
    """The families that a test is run with."""
    marks = (mark for mark in test.pytestmark if mark.name == "parametrize")
    drawn = (each for mark in marks if "name" in mark.args[0] for each in mark.args[1])
    return {each if isinstance(each, str) else each.values[0] for each in drawn}


def graphs_of(tests: Any, name: str, model: Any) -> Iterator[Any]:  # Any: of the tests' module
    """The graphs of a model's layers, of one batch."""
    batch = tests.stack(tests.draw_inputs(name, (24, 24)))
    explained = tests.integration.explain_layers(model, "cpu", **batch)
    return (each.graph for each in explained.values())


def describe_graph(graph: Any) -> str:  # Any: a graph of one attention
    """What a layer's attention has beside q, k and v."""
    node = graph.eqns[0].op
    parts = [*map(str, node.modifiers), *([str(node.mask)] if node.mask is not None else [])]
    parts += ["sinks"] * node.sinks
    return ", ".join(f"`{part}`" for part in parts) or "no mask"
