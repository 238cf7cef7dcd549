"""`replace_sdpa`: whose attention it replaces, what it leaves, and what it reports."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import checkpoint

import attn_graph as ag
from attn_graph.layers.report import MOST_TIMES, Report
from tests.support.like_torch import check_like_torch
from tests.support.tracing import traces

PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(6)


@contextmanager
def watched(**options: Any) -> Iterator[Report]:
    """A block that reports."""
    with ag.replace_sdpa(report=True, **options) as report:
        assert report is not None
        yield report


def qkv(*shape: int, seed: int = 0) -> list[Any]:  # Any: tensors
    """Three tensors of one shape, by default [2,4,6,8]."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape or (2, 4, 6, 8), generator=g) for _ in range(3)]


def backends(report: Report) -> list[str | None]:
    """Who ran each row."""
    return [row.usage.backend for row in report.rows]


def test_direct_calls_are_replaced_by_whatever_name() -> None:
    q, k, v = qkv()
    with watched() as report:
        outputs = F.scaled_dot_product_attention(q, k, v, is_causal=True), by_name(q, k, v)
        inner = torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, scale=2)
    F.scaled_dot_product_attention(q, k, v)
    assert backends(report) == ["torch_sdpa"] * 3
    given: list[dict[str, Any]] = [{"is_causal": True}, {}, {"scale": 2}]
    for o, options in zip((*outputs, inner), given, strict=True):
        torch.testing.assert_close(o, F.scaled_dot_product_attention(q, k, v, **options))


def test_only_this_thread_and_this_block_is_replaced() -> None:
    def call() -> None:
        F.scaled_dot_product_attention(*qkv())

    with watched() as report:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    call()
    assert not report.rows
    assert str(report) == "0 calls of attention, 0 left to PyTorch"


MASKS: dict[str, dict[str, torch.Tensor | bool]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(2, 6).masked_fill(PADDING, -2.0)},
    "mask": {"attn_mask": CAUSAL.bool()},
    "hint": {"attn_mask": CAUSAL, "is_causal": True},
    "hint and padding": {
        "attn_mask": CAUSAL.bool(),
        "is_causal": True,
        "key_padding_mask": PADDING,
    },
    "per head": {"attn_mask": torch.linspace(-1, 1, 2 * 4 * 6 * 6).view(8, 6, 6)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_multihead_attention_is_pytorch_s(
    name: str, batch_first: bool, more: dict[str, bool]
) -> None:
    torch.manual_seed(1)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=batch_first, **more)
    x = torch.randn(2, 6, 32) if batch_first else torch.randn(6, 2, 32)

    def run(model: Any, inputs: Sequence[torch.Tensor]) -> Any:
        (x,) = inputs
        dtype = x.dtype
        masks = {
            n: m.to(dtype) if isinstance(m, torch.Tensor) and m.is_floating_point() else m
            for n, m in MASKS[name].items()
        }
        o, weights = model(x, x, x, need_weights=False, **masks)
        assert weights is None
        return o

    check_like_torch(layer, [x], run, around=ag.replace_sdpa)


def test_cross_attention_with_other_sizes_and_unbatched() -> None:
    torch.manual_seed(2)
    layer = torch.nn.MultiheadAttention(32, 4, kdim=8, vdim=24, bias=False)

    def run(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return model(*inputs, need_weights=False)[0]  # type: ignore[no-any-return]  # of a module

    inputs = torch.randn(5, 32), torch.randn(7, 8), torch.randn(7, 24)
    check_like_torch(layer, inputs, run, around=ag.replace_sdpa)
    batched = [x.unsqueeze(1).repeat(1, 3, 1) for x in inputs]
    check_like_torch(layer, batched, run, around=ag.replace_sdpa)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_whole_transformer_is_replaced_and_its_fused_layers_too(masked: bool) -> None:
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    masks = {"mask": CAUSAL} if masked else {"src_key_padding_mask": PADDING}
    x = torch.randn(2, 6, 32)
    for training in (True, False):
        encoder.train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                due = encoder(x, **masks)
                with watched() as report:
                    o = encoder(x, **masks)
            assert [row.calls for row in report.rows] == [2]
            assert None not in backends(report)
            keep = ~PADDING if not masked else torch.ones_like(PADDING)
            torch.testing.assert_close(o[keep], due[keep])
    assert torch.backends.mha.get_fastpath_enabled()


def test_decoders_with_cross_attention_are_pytorch_s() -> None:
    torch.manual_seed(4)
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def run(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        causal = CAUSAL.to(inputs[0].dtype)
        padding = PADDING[:, :5]
        return model(  # type: ignore[no-any-return]  # of a module
            *inputs, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding
        )

    inputs = torch.randn(2, 6, 32), torch.randn(2, 5, 32)
    check_like_torch(layer, inputs, run, around=ag.replace_sdpa)


def test_blocks_nest_and_threads_leave_the_switch_as_it_was() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    with ag.replace_sdpa():
        with ag.replace_sdpa(backends=("math",)):
            assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_inner_block_decides_and_its_options_bind() -> None:
    q, k, v = qkv()
    with watched() as outer, watched(backends=("math",)) as inner:
        F.scaled_dot_product_attention(q, k, v)
    assert not outer.rows
    assert backends(inner) == ["math"]
    with watched() as report, ag.avoid("torch_sdpa"):
        F.scaled_dot_product_attention(q, k, v)
    assert "torch_sdpa" not in backends(report)


def test_it_decorates_a_function() -> None:
    q, k, v = qkv()

    @ag.replace_sdpa(backends=("cudnn",), on_fallback="raise")
    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    for _ in range(2):
        with pytest.raises(ag.NoBackendError):
            call()


def as_nested(x: torch.Tensor) -> Any:
    """Two sequences of several lengths, of x [2,H,M,D]."""
    parts = [x[0].transpose(0, 1), x[1].transpose(0, 1)[:3]]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "meta": (
        lambda: F.scaled_dot_product_attention(*(x.to("meta") for x in qkv())),
        "tensors on meta",
    ),
    "nested": (
        lambda: F.scaled_dot_product_attention(
            *map(as_nested, qkv())
        ),
        "nested tensors",
    ),
    "weights": (
        lambda: torch.nn.MultiheadAttention(8, 2)(*qkv(3, 2, 8)),
        "need_weights=True returns the weights",
    ),
    "no backend": (
        lambda: F.scaled_dot_product_attention(*(x.half() for x in qkv())),
        "cudnn ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_no_plan_takes_stays_pytorch_s_and_the_report_says_why(name: str) -> None:
    call, text = LEFT[name]
    choice: dict[str, Any] = {"backends": ("cudnn",)} if name == "no backend" else {}
    with watched(**choice) as report:
        call()
    assert backends(report) == [None]
    assert any(reason.startswith(text) for reason in report.rows[0].usage.reasons)
    assert f"  - {text}" in str(report)
    with ag.replace_sdpa(on_fallback="warn", **choice), pytest.warns(ag.FallbackWarning) as caught:
        call()
    assert caught[0].filename == __file__
    with (
        ag.replace_sdpa(on_fallback="raise", **choice),
        pytest.raises((ag.GraphError, ag.NoBackendError)),
    ):
        call()


def test_nonsense_raises_as_in_pytorch() -> None:
    q, k, v = qkv()
    with ag.replace_sdpa():
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k[..., 1:], v)
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(q, k, v, None, 0.0, False, 2.0)
        layer = torch.nn.MultiheadAttention(8, 2)
        x = torch.randn(3, 2, 8)
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            layer(x, x, x, need_weights=False, is_causal=True)
        with pytest.raises(RuntimeError, match="shape of the 2D attn_mask"):
            layer(x, x, x, need_weights=False, attn_mask=torch.zeros(2, 2))
        with pytest.raises(AssertionError):
            layer(x, x, x[:2], need_weights=False)


@pytest.mark.parametrize("after", [True, False])
def test_a_checkpoint_recomputes_as_in_the_block(after: bool) -> None:
    q = qkv()[0].requires_grad_()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.5)

    with watched() as report:
        torch.manual_seed(0)
        (due,) = torch.autograd.grad(attend(q).sum(), q)
        torch.manual_seed(0)
        o = checkpoint(attend, q, use_reentrant=False)
        if not after:
            o.sum().backward()
    if after:
        o.sum().backward()
    assert sum(row.calls for row in report.rows) == 3
    assert q.grad is not None
    assert torch.equal(q.grad, due)


def test_a_reentrant_checkpoint_recomputes_by_pytorch_and_refuses_dropout() -> None:
    q = qkv()[0].requires_grad_()

    def attend(q: torch.Tensor, dropout: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)

    (due,) = torch.autograd.grad(attend(q, 0.0).sum(), q)
    with ag.replace_sdpa():
        checkpoint(attend, q, 0.0, use_reentrant=True).sum().backward()
        with pytest.raises(ag.GraphError, match="pass use_reentrant=False"):
            checkpoint(attend, q, 0.5, use_reentrant=True)
        with torch.no_grad():
            attend(q, 0.5)
    assert q.grad is not None
    torch.testing.assert_close(q.grad, due)


def test_autocast_and_inference_mode() -> None:
    q, k, v = qkv()
    with watched() as report, torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        o = F.scaled_dot_product_attention(q, k, v)
    assert o.dtype == torch.bfloat16
    assert backends(report) != [None]


def test_the_report_counts_times_and_prints() -> None:
    q, k, v = qkv()
    with watched() as report:
        for _ in range(MOST_TIMES + 5):
            F.scaled_dot_product_attention(q, k, v, torch.ones(6, 6, dtype=torch.bool))
    (row,) = report.rows
    assert row.calls == MOST_TIMES + 5
    assert row.seconds is not None
    assert row.first is not None
    assert row.usage.site.startswith(__file__)
    assert row.usage.query == "f32[2, 4, 6, 8]"
    assert row.usage.mask == "keep [6, 6]"
    text = str(report).splitlines()
    assert text[0] == "105 calls of attention, 0 left to PyTorch"
    assert text[1].startswith("call site")
    assert "nn/test_replace.py:" in text[2]
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["calls"] == MOST_TIMES + 5
    assert "<table>" in report._repr_html_()


def test_the_report_names_who_runs_the_backward() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with watched() as report:
        F.scaled_dot_product_attention(q, k, v, torch.zeros(6, 6))
    (row,) = report.rows
    assert row.usage.backward is not None
    assert row.usage.backward in row.usage.who or row.usage.backend == row.usage.backward


def test_it_shows_nothing_of_traced_calls() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with watched(recognize_masks=True) as report:
        make_fx(lambda q: F.scaled_dot_product_attention(q, q, q, CAUSAL))(qkv()[0])
    assert not report.rows


@pytest.mark.parametrize(("training", "grad"), [(True, True), (False, False)])
@traces
def test_compiled_regions_are_replaced(training: bool, grad: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).train(training)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(encoder, fullgraph=True, backend=backend)
    x = torch.randn(2, 6, 32)
    with torch.set_grad_enabled(grad):
        with ag.replace_sdpa(report=True, recognize_masks=True):
            *_, o = (compiled(x, mask=CAUSAL, is_causal=True) for _ in range(3))
        due = encoder(x, mask=CAUSAL)
    assert backend.frame_count == 1
    nodes = [str(n.target) for g in backend.graphs for n in g.graph.nodes]
    assert nodes.count("attn_graph.attention") == 2
    assert not [name for name in nodes if "scaled_dot_product" in name or "encoder_layer" in name]
    torch.testing.assert_close(o, due)


@traces
def test_a_region_compiled_before_the_block_is_compiled_again_in_it() -> None:
    torch._dynamo.reset()
    q = qkv()[0].requires_grad_()
    backend = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=backend)
    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    due = attend(q)
    with ag.replace_sdpa():
        o = attend(q)
        o.sum().backward()
    attend(q)
    assert backend.frame_count == 2
    torch.testing.assert_close(o, due)


def test_packed_rows_stay_pytorchs_and_the_report_names_what_stands_in() -> None:
    from torch.nn.attention.varlen import varlen_attn

    x, starts = torch.randn(9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    with watched() as report, pytest.raises(NotImplementedError):  # PyTorch has it on GPUs alone
        varlen_attn(x, x, x, starts, starts, 5, 5)
    (row,) = report.rows
    assert (row.usage.function, row.usage.backend) == ("varlen_attn", None)
    assert "attn_graph.nn.varlen_attn takes the same arguments" in str(report)
    with (
        ag.replace_sdpa(on_fallback="raise"),
        pytest.raises(ag.TensorError, match="varlen_attn stays PyTorch's: it has packed rows"),
    ):
        varlen_attn(x, x, x, starts, starts, 5, 5)
    o = ag.nn.varlen_attn(x, x, x, starts, starts, 5, 5)
    assert isinstance(o, torch.Tensor)
    assert o.shape == x.shape


def attend_unread(layer: torch.nn.MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    """As code does that leaves need_weights at its default and drops the weights."""
    o: torch.Tensor = layer(x, x, x)[0]
    return o


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_that_nobody_reads_are_left_out(compiles: bool) -> None:
    torch.manual_seed(5)
    layer, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    run = torch.compile(attend_unread, backend="eager") if compiles else attend_unread
    due = attend_unread(layer, x)
    with ag.replace_sdpa(weights=False, on_fallback="raise", report=True) as report:
        o = run(layer, x)
        assert layer(x, x, x)[1] is None
    assert report is not None
    assert all(row.usage.backend for row in report.rows)
    torch.testing.assert_close(o, due)
    for got, exact in zip(
        torch.autograd.grad(o.square().sum(), [*layer.parameters()]),
        torch.autograd.grad(due.square().sum(), [*layer.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


def test_weights_are_left_out_of_positional_calls_too() -> None:
    """The arguments of the function behind the layer, up to need_weights, by their places."""
    layer, x = torch.nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    proj = layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0
    out = layer.out_proj.weight, layer.out_proj.bias, False, None, True
    with ag.replace_sdpa(weights=False, on_fallback="raise"):
        o, weights = F.multi_head_attention_forward(x, x, x, 8, 2, *proj, *out)
    assert weights is None
    torch.testing.assert_close(o, layer(x, x, x)[0])


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_report_says_that_flex_attention_stays_pytorch_s(compiles: bool) -> None:
    """By a mark that traced code sets and never reads, so that nothing compiles anew at a call."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = qkv()
    run = torch.compile(flex_attention, backend="eager") if compiles else flex_attention
    due = flex_attention(q, k, v)
    with watched() as report:
        assert "flex_attention" not in str(report)
        for _ in range(2 * torch._dynamo.config.recompile_limit):
            assert torch.equal(run(q, k, v), due)
    assert "flex_attention stays PyTorch's; from_flex translates its mods" in str(report)
    assert report.to_dict()["flex_attention"]
    with (
        ag.replace_sdpa(on_fallback="raise"),
        pytest.raises(RuntimeError, match="flex_attention stays PyTorch's"),
    ):
        run(q, k, v)
