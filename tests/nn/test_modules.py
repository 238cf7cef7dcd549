"""Modules of attention: PyTorch's parameters and arguments, and options that stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.nn import Attention, MultiheadAttention
from attn_graph.nn.functional import attention
from tests.support.like_torch import check_like_torch
from tests.support.tracing import traces

B, M, N, WIDTH, HEADS = 2, 5, 7, 32, 4
PADDING = torch.arange(N) >= torch.tensor([[N], [4]])
MASK = torch.rand(M, N, generator=torch.Generator().manual_seed(1)) < 0.3
MASK[:, 0] = False  # no row is masked altogether: PyTorch's weights are NaN there
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "keys of bias": {"add_bias_kv": True},
    "keys of zeros": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "other sizes": {"kdim": 8, "vdim": 24},
    "other size of keys": {"kdim": 8, "batch_first": True, "bias": False},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "mask": {"attn_mask": MASK},
    "both": {"key_padding_mask": PADDING, "attn_mask": MASK},
    "numbers": {"attn_mask": torch.linspace(-2, 1, M * N).view(M, N)},
    "numbers and booleans": {"attn_mask": MASK.float() * -3, "key_padding_mask": PADDING},
    "per head": {"attn_mask": MASK.expand(B * HEADS, M, N)},
}


def pair(**options: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    """PyTorch's module and ours with its state."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, **options)
    if theirs.in_proj_bias is not None:
        torch.nn.init.normal_(theirs.in_proj_bias)
    ours = MultiheadAttention(WIDTH, HEADS, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def inputs_of(options: dict[str, Any]) -> list[torch.Tensor]:
    """Query, key and value for a module with these options."""
    g = torch.Generator().manual_seed(2)
    widths = WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH)
    tensors = [torch.randn(n, B, w, generator=g) for n, w in zip((M, N, N), widths, strict=True)]
    return [x.transpose(0, 1) for x in tensors] if options.get("batch_first") else tensors


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_pytorch_s(options: str, masks: str) -> None:
    theirs, ours = pair(**OPTIONS[options])

    def run(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = inputs[0].dtype
        given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in MASKS[masks].items()}
        o, weights = model(*inputs, need_weights=False, **given)
        assert weights is None
        return o  # type: ignore[no-any-return]  # of a module

    check_like_torch(theirs, inputs_of(OPTIONS[options]), run, other=ours)


def test_self_attention_projects_in_one_product_and_the_hint_is_heeded() -> None:
    theirs, ours = pair(batch_first=True)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(M)

    def run(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        (x,) = inputs
        mask = causal.to(x.dtype)
        return model(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]  # type: ignore[no-any-return]  # as above

    check_like_torch(theirs, [torch.randn(B, M, WIDTH)], run, other=ours)


def test_inputs_without_a_batch() -> None:
    theirs, ours = pair()
    q, k, v = (x[:, 0] for x in inputs_of({}))
    masks = {"key_padding_mask": PADDING[1], "attn_mask": MASK}
    due, _ = theirs(q, k, v, need_weights=False, **masks)
    torch.testing.assert_close(ours(q, k, v, need_weights=False, **masks)[0], due)


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_pytorch_s_own(average: bool) -> None:
    theirs, ours = pair(batch_first=True)
    inputs = inputs_of({"batch_first": True})
    due = theirs(*inputs, key_padding_mask=PADDING, average_attn_weights=average)
    result = ours(*inputs, key_padding_mask=PADDING, average_attn_weights=average)
    for x, ref in zip(result, due, strict=True):
        assert torch.equal(x, ref)


def test_dropout_counts_in_training_alone() -> None:
    _, ours = pair(dropout=0.5)
    q, k, v = inputs_of({})
    torch.manual_seed(1)
    first = ours(q, k, v, need_weights=False)[0]
    torch.manual_seed(1)
    assert torch.equal(ours(q, k, v, need_weights=False)[0], first)
    ours.eval()
    theirs, _ = pair()
    due = theirs(q, k, v, need_weights=False)[0]
    torch.testing.assert_close(ours(q, k, v, need_weights=False)[0], due)


def test_wrong_sizes_raise_as_in_pytorch() -> None:
    _, ours = pair()
    q, k, v = inputs_of({})
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception]]] = [
        ((q[..., 1:], k, v), {}, AssertionError),
        ((q, k[1:], v), {}, AssertionError),
        ((q, k, v), {"attn_mask": MASK[1:]}, RuntimeError),
        ((q, k, v), {"key_padding_mask": PADDING[:, 1:]}, AssertionError),
        ((q, k, v), {"is_causal": True}, RuntimeError),
        ((q[0, 0], k, v), {}, AssertionError),
    ]
    for inputs, masks, kind in wrong:
        with pytest.raises(kind):
            ours(*inputs, need_weights=False, **masks)


def test_modules_are_copied_and_pickled() -> None:
    _, ours = pair(add_bias_kv=True)
    inputs = inputs_of({})
    due = ours(*inputs, need_weights=False)[0]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert isinstance(other, MultiheadAttention)
        assert torch.equal(other(*inputs, need_weights=False)[0], due)
    module = Attention(mask=ag.Causal("top_left") & ag.Window(3), soft_cap=2.0)
    q = torch.randn(1, 2, 6, 8)
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(q, q, q), module(q, q, q))


def test_attention_keeps_its_options_and_takes_tensors() -> None:
    q = torch.randn(1, 2, 6, 8)
    bias, lengths = torch.randn(6, 6)[None, None], torch.tensor([4])
    module = Attention(mask=ag.Causal(), soft_cap=5.0, scale=0.5, stats=True)
    due = attention(
        q,
        q,
        q,
        mask=ag.Causal(),
        soft_cap=5.0,
        scale=0.5,
        stats=True,
        bias=bias,
        kv_lengths=lengths,
    )
    for x, ref in zip(module(q, q, q, bias=bias, kv_lengths=lengths), due, strict=True):
        assert torch.equal(x, ref)
    assert repr(module) == "Attention(mask=Causal(), scale=0.5, soft_cap=5.0, stats=True)"
    assert not module.state_dict()


def test_dropout_of_attention_counts_in_training_alone() -> None:
    q = torch.randn(1, 2, 6, 8)
    module: Any = Attention(dropout=0.5)
    assert not torch.equal(module(q, q, q), module(q, q, q))
    module.eval()
    due: Any = attention(q, q, q)
    assert torch.equal(module(q, q, q), due)


@traces
def test_modules_compile_as_a_whole() -> None:
    torch._dynamo.reset()
    _, ours = pair(batch_first=True)
    q, k, v = inputs_of({"batch_first": True})
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    due = ours(q, k, v, need_weights=False)[0]
    torch.testing.assert_close(compiled(q, k, v, need_weights=False)[0], due)
    module = Attention(mask=ag.Causal("top_left"))
    x = torch.randn(1, 2, 6, 8)
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x, x, x), module(x, x, x))
