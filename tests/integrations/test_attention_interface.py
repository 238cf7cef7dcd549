"""What layers of transformers hand to attention is computed with, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from attn_graph.errors import GraphError

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

import transformers as hf
from transformers import masking_utils

from attn_graph.integrations import layer_masks
from attn_graph.integrations import transformers as integration
from attn_graph.integrations.transformers import HANDED_ON, attend_layer
from attn_graph.nn.calls import attend_as
from tests.lowering.test_python_calls import count_calls
from tests.support.tracing import traces

B, H, M, D = 2, 4, 5, 8
CALLS = 23  # of Python, for a layer's attention in a step
LAYER = nn.Module()
HOLDERS: list[Callable[[Tensor], object]] = [
    lambda x: x, lambda x: [None, x], lambda x: (1.0, {"table": x}), lambda x: {"a": [x]},
]  # fmt: skip


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_qkv(N: int = M, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q = draw(B, H, M, D, seed=0, dtype=dtype)
    k, v = (draw(B, 2, N, D, seed=n, dtype=dtype) for n in (1, 2))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
    """Attention by the interface."""
    return attend_layer(LAYER, q, k, v, mask, is_causal=False, **others)[0]


@given(
    name=st.sampled_from(["sink", "block_indices", "attention_bias", "rel_pos", "key_scale"]),
    holder=st.sampled_from(HOLDERS),
)
def test_a_tensor_that_is_not_known_is_refused(
    name: str, holder: Callable[[Tensor], object]
) -> None:
    """However it is held."""
    others: dict[str, Any] = {name: holder(torch.ones(H))}
    with pytest.raises(GraphError, match=f'^{name}: .*set_attn_implementation."eager"'):
        attend(*draw_qkv(), **others)


@given(names=st.sets(st.sampled_from(sorted(HANDED_ON))), holder=st.sampled_from(HOLDERS))
def test_what_layers_only_hand_on_changes_nothing(
    names: set[str], holder: Callable[[Tensor], object]
) -> None:
    others: dict[str, Any] = dict.fromkeys(names, holder(torch.arange(M)))
    others["output_router_logits"] = True
    assert torch.equal(attend(*draw_qkv(), **others), attend(*draw_qkv()))


def formula(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attention with a logit of each query and head beside its scores."""
    s = q @ k.repeat_interleave(2, 1).mT / D**0.5
    if keep is not None:
        s = s.masked_fill(~keep, -torch.inf)
    count = s.shape[-1]
    whole = s if sinks is None else torch.cat((s, sinks), -1)
    p = whole.softmax(-1)[..., :count].nan_to_num(0.0)
    return (p @ v.repeat_interleave(2, 1)).transpose(1, 2)


MASKS: list[Callable[[], Tensor | None]] = [
    lambda: None,
    lambda: torch.ones(M, M).tril().bool().expand(B, 1, M, M),
    lambda: torch.tensor([[1] * M, [0, 0, 1, 1, 0]]).bool()[:, None, None].expand(-1, -1, M, -1),
]


@given(
    size=st.sampled_from([0.1, 3.0, 40.0]),
    mask=st.sampled_from(MASKS),
    head_sinks=st.booleans(),
)
def test_a_sink_of_each_query_takes_its_share_of_the_weights(
    size: float, mask: Callable[[], Tensor | None], head_sinks: bool
) -> None:
    """With its gradient, in float64."""
    keep, given_s_aux = mask(), draw(H, seed=8) if head_sinks else None
    inputs = [*draw_qkv(), size * draw(B, H, M, 1, seed=7)]
    for x in inputs:
        x.requires_grad_()
    q, k, v, sinks = inputs
    every = sinks
    if given_s_aux is not None:  # both at once: the sum of two exponentials
        every = torch.logaddexp(sinks, given_s_aux[:, None, None])
    due = formula(q, k, v, keep, every)
    o = attend(q, k, v, keep, sinks=sinks, s_aux=given_s_aux)
    torch.testing.assert_close(o, due)
    weights = draw(*o.shape, seed=9)
    grads, expected = (torch.autograd.grad((x * weights).sum(), inputs) for x in (o, due))
    for grad, each in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, each)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sinks_of_queries_are_rounded_once_more(dtype: torch.dtype) -> None:
    """o is rounded, and its product with the share."""
    qkv, sinks = draw_qkv(dtype=dtype), draw(B, H, M, 1, seed=7, dtype=dtype)
    q, k, v = qkv
    due = formula(q.double(), k.double(), v.double(), None, sinks.double())
    o = attend(q, k, v, sinks=sinks)
    assert o.dtype == dtype
    eps = torch.finfo(dtype).eps
    low = formula(q, k, v, None, sinks).double()
    allowed = 2 * (low - due).abs().max() + 2 * eps * due.abs().max()
    assert (o.double() - due).abs().max() <= allowed


KEPT = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("others", [{}, {"softcap": 3.0}, {"s_aux": torch.ones(H)}])
@pytest.mark.parametrize("M", [1, 2])
def test_layers_of_a_token_share_the_numbers_of_its_padding(
    M: int, others: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel adds them. Elsewhere each layer reads the booleans."""
    given = list[tuple[str, Tensor]]()

    def note(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Tensor], options: Any) -> Any:
        given.extend((name, x) for name, x in named.items() if name != "sinks")
        return attend_as(q, k, v, named, options)

    monkeypatch.setattr(integration, "attend_as", note)
    described = layer_masks.decode_mask(B, M, 5, 5 - M, attention_mask=KEPT, dtype=dtype)
    q, k, v = draw_qkv(dtype=dtype)
    o, _ = (attend(q[:, :, :M], k, v, described, **others) for _ in range(2))
    (name, first), (_, second) = given
    adds = M == 1 and not others and dtype != torch.bfloat16
    assert name == ("bias" if adds else "keep")
    assert first is second
    due = attend(q[:, :, :M], k, v, hidden(M, dtype), **others)
    torch.testing.assert_close(o, due)


def test_a_layer_takes_few_python_calls_for_a_token_beside_padding() -> None:
    """And for one key more, as in each step; the integration's own are six."""

    def decode(N: int) -> int:
        q, (k, v) = draw(B, 8, 1, D), draw(2, B, 2, N, D)
        mask = layer_masks.decode_mask(
            B, 1, N, N - 1, attention_mask=F.pad(KEPT, (0, N - 5), value=True), dtype=q.dtype
        )
        more: dict[str, Any] = {"dropout": 0.0, "position_ids": KEPT, "use_cache": True}
        return count_calls(lambda: attend_layer(LAYER, q, k, v, mask, scaling=0.5, **more))

    with torch.no_grad():
        *_, last = [decode(N) for N in (66, 67, 68)]
    assert last <= CALLS


def hidden(M: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of the last M tokens, [B,1,M,5]."""
    seen = KEPT[:, None, None] & torch.ones(M, 5).tril(5 - M).bool()
    return torch.zeros(B, 1, M, 5, dtype=dtype).masked_fill(~seen, -torch.inf)


def test_a_row_without_keys_gives_0_whatever_its_sink() -> None:
    keep = torch.ones(B, 1, M, M).bool()
    keep[0, :, 2] = False
    sinks = draw(B, H, M, 1).requires_grad_()
    o = attend(*draw_qkv(), keep, sinks=sinks)
    assert not o[0, 2].any()
    (grad,) = torch.autograd.grad(o.sum(), sinks)
    assert not grad[0, :, 2].any()
    assert grad.isfinite().all()


@pytest.mark.parametrize("shape", [(H,), (B, H, M), (1, H, 1, 1), (B, H, 1, 1), (B, 1, M, 1)])
def test_sinks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Which would be spread over queries or heads in silence."""
    with pytest.raises(GraphError, match=r"sinks: .*\[2, 4, 5, 1\].*s_aux"):
        attend(*draw_qkv(), sinks=torch.ones(shape))


@given(
    seed=st.integers(0, 99),
    count=st.integers(1, 6),
    mask=st.sampled_from(["none", "dense", "data"]),
)
def test_a_query_sees_the_keys_of_its_indices_alone(seed: int, count: int, mask: str) -> None:
    """As DeepSeek V3.2's indexer chooses them; beside a mask, also one of a cache that is not full,
    whose last keys layers do not read."""
    q, k, v = draw_qkv(8)
    q = q[:, :, :1]
    scores = torch.rand(B, 1, 8, generator=torch.Generator().manual_seed(seed))
    indices = scores.topk(count).indices.int()
    keep = torch.zeros(B, 1, 8).bool().scatter(-1, indices.long(), True)[:, None]
    masks: dict[str, Any] = {
        "none": None,
        "dense": torch.rand(B, 1, 1, 8, generator=torch.Generator().manual_seed(seed)) < 0.6,
        "data": layer_masks.decode_mask(B, 1, 8, 5, use_vmap=False),
    }
    visible = {"none": keep, "dense": keep & masks["dense"], "data": keep.clone()}[mask]
    if mask == "data":
        assert masks["data"].keys == 6
        visible[..., 6:] = False
    o = attend(q, k, v, masks[mask], indices=indices)
    torch.testing.assert_close(o, formula(q, k, v, visible))


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_documents_without_both_their_ends_are_refused(name: str) -> None:
    with pytest.raises(GraphError, match=r"cu_seq_lens_q, cu_seq_lens_k: .* need both"):
        attend(*draw_qkv(), **{name: torch.tensor([0, 2, M])})


# Models with attention of their own, as code, or as classes picked by the names of others:
WITHOUT: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]],
    },
    "data2vec-vision": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32,
        "intermediate_size": 48,
    },
    "git": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 48,
        "vision_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32,
            "intermediate_size": 48,
        },
    },
}  # fmt: skip


def config_of(kind: str) -> Any:  # Any: of transformers
    return hf.AutoConfig.for_model(kind, **WITHOUT[kind])


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_model_with_attention_of_its_own_is_refused_as_it_is_loaded(
    kind: str, tmp_path: Path
) -> None:
    """By either way, with the way out, which works."""
    refused = pytest.raises(
        GraphError, match=r"has attention of its own.*set_attn_implementation.*parts"
    )
    with refused:
        hf.AutoModel.from_config(config_of(kind), attn_implementation="attn_graph")
    model = hf.AutoModel.from_config(config_of(kind), attn_implementation="eager")
    model.save_pretrained(tmp_path)
    with refused:
        hf.AutoModel.from_pretrained(tmp_path, attn_implementation="attn_graph")
    again = hf.AutoModel.from_pretrained(tmp_path)
    again.set_attn_implementation("attn_graph")


def test_a_model_whose_source_cannot_be_read_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a notebook, which may have the interface."""

    class Own(hf.BertModel):  # type: ignore[misc]  # of Any
        pass

    monkeypatch.setattr(Own, "__module__", "no_such_module")
    for name in ("_can_set_attn_implementation_cached_value",):
        monkeypatch.delattr(hf.BertModel, name, raising=False)
    config = hf.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    model = Own._from_config(config, attn_implementation="attn_graph")
    assert model.config._attn_implementation == "attn_graph"


@traces
def test_a_compiled_model_computes_with_the_mask_of_eager_attention() -> None:
    """Where it tests its type, joins it, and adds it."""

    def score(s: Tensor, keep: Tensor) -> Tensor:
        mask: Any = layer_masks.decode_mask(
            B, M, M, attention_mask=keep, use_vmap=False, dtype=s.dtype
        )
        assert isinstance(mask, Tensor)
        assert mask.dtype == s.dtype
        return torch.cat((s, s), -1) + torch.cat([mask, mask.masked_fill(mask < 0, -1.0)], -1)

    keep = torch.tensor([[1] * M, [0, 1, 1, 1, 1]]).bool()
    s = draw(B, H, M, M)
    mask = masking_utils.eager_mask(B, M, M, attention_mask=keep, dtype=s.dtype)
    due = torch.cat((s + mask, s + mask.clamp(min=-1)), -1)
    assert torch.equal(score(s, keep), due)
    torch.compiler.reset()
    assert torch.equal(torch.compile(score, fullgraph=True, backend="eager")(s, keep), due)
