"""Every model type of transformers computes with attn_graph what it computes with eager attention.

`python -m tests.support.model_types RESULTS` checks all of them; here are those that other types
are like.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

from tests.support.model_types import check_type

CALLS = {"equal"}, {"equal"}  # loaded with our attention, and with it set later
REFUSED = {"refused"}, {"equal"}  # the model goes on with its own
SAMPLE = {
    "afmoe": CALLS,
    "bart": CALLS,
    "big_bird": REFUSED,
    "bigbird_pegasus": CALLS,  # its encoder has attention of its own
    "bloom": REFUSED,
    "codegen": REFUSED,
    "data2vec-vision": REFUSED,
    "deepseek_v32": CALLS,  # `indices`
    "deepseek_v4": CALLS,  # joins its mask with another
    "falcon": REFUSED,
    "git": REFUSED,
    "inkling2_text": CALLS,  # `sinks`
    "lasr_encoder": CALLS,  # reads rows that are all padding off its mask
    "led": REFUSED,
    "mpnet": REFUSED,
    "pix2struct": CALLS,  # tests the type of its mask
    "t5gemma2": CALLS,  # joins masks
    "xglm": REFUSED,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type_computes_what_it_does_with_eager_attention_or_is_refused(kind: str) -> None:
    """Padded at the start and at the end, by both ways, with gradients, in float64."""
    verdict = check_type(kind)
    loaded, changed = SAMPLE[kind]
    assert verdict.load.partition(":")[0] in loaded, verdict
    assert verdict.change.partition(":")[0] in changed, verdict
    assert (verdict.ours > 0) == (SAMPLE[kind] is CALLS)
