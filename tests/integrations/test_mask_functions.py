"""Masks as transformers says them are read as data that means the same, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import frozen
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_graph.errors import GraphError
from attn_graph.masks import Band, Causal, Keep, KeyLengths, SameSegment
from attn_graph.masks.places import Block, Place
from attn_graph.spec import INTEGERS

pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")

from transformers import LlamaConfig
from transformers import masking_utils as hf

from attn_graph.integrations import layer_masks
from attn_graph.integrations import transformers as integration
from attn_graph.integrations.conditions import UnreadableMaskError
from attn_graph.integrations.mask_functions import Frame, read_mask_function

B = 2
TABLE = torch.tensor([[0, 0, 1, 1], [2, 0, 1, 1]])
MaskFunction = Any  # of b, h, i and j
Draw = st.DrawFn


@frozen
class Call:
    """A call of the mask interface: of which tokens, by which function, with which padding."""

    M: int
    N: int
    q_offset: int
    kv_offset: int
    function: MaskFunction
    padding: Tensor | None
    on_device: bool = False  # whether q_offset is a tensor

    def arguments(self) -> dict[str, Any]:
        """Those of the interface."""
        return {
            "batch_size": B,
            "q_length": self.M,
            "kv_length": self.N,
            "q_offset": torch.tensor(self.q_offset) if self.on_device else self.q_offset,
            "kv_offset": self.kv_offset,
            "mask_function": self.function,
            "attention_mask": self.padding,
            "use_vmap": False,
            "device": "cpu",
        }


def numbers(draw: Draw, length: int, least: int = 0, most: int = 3) -> Tensor:
    """Integers [B, length]."""
    some = st.integers(least, most)
    rows = st.lists(some, min_size=B * length, max_size=B * length)
    return torch.tensor(draw(rows)).reshape(B, length)


ENDS = {torch.int32: 2**31, torch.int64: 2**63}  # beyond the largest number


def segments(draw: Draw, length: int) -> Tensor:
    """Numbers of segments [B, length]: few, or far apart, or as large as their dtype has them."""
    dtype = draw(st.sampled_from([*ENDS]))
    end = ENDS[dtype]
    few = draw(st.sampled_from([[0, 1, 2], [-1, 0, 7], [-end, 0, end - 1], [end // 2, end - 2, 1]]))
    rows = draw(st.lists(st.sampled_from(few), min_size=B * length, max_size=B * length))
    return torch.tensor(rows, dtype=dtype).reshape(B, length)


def banded(size: int) -> list[MaskFunction]:
    """Mask functions that compare positions."""
    return [
        hf.causal_mask_function,
        hf.bidirectional_mask_function,
        hf.sliding_window_overlay(size),
        hf.sliding_window_causal_mask_function(size),
        hf.sliding_window_bidirectional_mask_function(size),
        lambda b, h, i, j: j < size,
        lambda b, h, i, j: size <= i,
        lambda b, h, i, j: (i != j) & (abs(j - i) > size - 2),
        lambda b, h, i, j: (abs(j - i + 1) <= size) | ((i - j) - size == 1),
        lambda b, h, i, j: (i == j - size) | (j == size) | (size - 2 > i - j),
    ]


@st.composite
def conditions(draw: Draw, tokens: int, *, packs: bool) -> MaskFunction:
    """A mask function of transformers over so many tokens that joins no others, but packed ones."""
    size, table = draw(st.integers(1, 5)), segments(draw, tokens)
    flags, starts = numbers(draw, tokens, 0, 1).bool(), numbers(draw, 1)[:, 0]
    known = [
        *banded(size),
        hf.chunked_overlay(size, starts),
        hf.chunked_causal_mask_function(size, starts),
        hf.blockwise_overlay(table),
        hf.packed_sequence_mask_function(table),
        hf.padding_mask_function(flags),
        lambda b, h, i, j: flags[b, i],
        lambda b, h, i, j: table[b, i] > 0,
        lambda b, h, i, j: table[b, j] != table[0, 0].item(),
    ]
    if packs:
        ends = numbers(draw, tokens, 0, 1).cumsum(1)
        positions = torch.stack([count_within(row) for row in ends])
        each = draw(st.sampled_from([*banded(size), hf.blockwise_overlay(table)]))
        known += [
            hf.packed_sequence_compatibility_function(each, positions, ends),
            hf.remap_positions_for_packed_sequence(each, positions),
            hf.packed_sequence_mask_function(positions),
        ]
    return draw(st.sampled_from(known))


@st.composite
def others(draw: Draw, tokens: int) -> MaskFunction:
    """A mask function that reads tensors as transformers' own don't."""
    table = numbers(draw, tokens + 1, -2, 2)
    dtypes = [torch.int64, torch.bool, torch.uint8, torch.int8, torch.float32, torch.float64]
    table = table.to(draw(st.sampled_from(dtypes)))
    n, shift = draw(st.integers(-B, B - 1)), draw(st.integers(-1, 1))
    row, starts = table[0], numbers(draw, 1, -2, 2)[:, 0]
    return draw(
        st.sampled_from(
            [
                lambda b, h, i, j: table[n, i] == table[n, j],
                lambda b, h, i, j: table[h, i] == table[b, j],
                lambda b, h, i, j: table[b, i + shift] == table[b, j],
                lambda b, h, i, j: table[b, i] == table[b, j + shift],
                lambda b, h, i, j: row[i] == row[j],
                lambda b, h, i, j: (j - starts[h]) // 2 == (i - starts[b]) // 2,
                lambda b, h, i, j: (j - starts[b]) // 2 == (i - starts[b]) // 2,
                lambda b, h, i, j: table[b, i] + shift == table[b, j],
                lambda b, h, i, j: table[b, i] == j,
            ]
        )
    )


KEYS = [lambda b, h, i, j: j < 1, lambda b, h, i, j: j < 2]


def negated(function: MaskFunction) -> MaskFunction:
    """Where a function does not keep it."""
    return lambda b, h, i, j: ~function(b, h, i, j)


def functions(tokens: int, *, packs: bool) -> st.SearchStrategy[MaskFunction]:
    """A mask function of transformers over so many tokens: joins of conditions."""
    leaves = conditions(tokens, packs=packs)

    def join(inner: st.SearchStrategy[MaskFunction]) -> st.SearchStrategy[MaskFunction]:
        several = st.lists(inner, min_size=2, max_size=3)
        joins = [several.map(lambda each: hf.and_masks(*each))]
        joins += [several.map(lambda each: hf.or_masks(*each)), inner.map(negated)]
        return st.one_of(joins)

    return st.recursive(leaves, join, max_leaves=6)


def count_within(segments: Tensor) -> Tensor:
    """The place of each token within its segment."""
    first = torch.searchsorted(segments, segments)
    return torch.arange(len(segments)) - first


@st.composite
def calls(draw: Draw) -> Call:
    """Prefill, a part after others, a decode step, a cache that is full or longer than filled."""
    packs, M = draw(st.booleans()), draw(st.integers(1, 7))
    past, rest = (0, 0) if packs else (draw(st.integers(0, 6)), draw(st.sampled_from([0, 3])))
    kv_offset = draw(st.integers(0, past))
    N = past + M - kv_offset + rest
    function = draw(functions(kv_offset + N, packs=packs))
    if draw(st.integers(0, 7)) == 0:
        joined = draw(st.sampled_from([hf.and_masks, hf.or_masks]))
        function = joined(function, draw(others(kv_offset + N)))
    padding = None
    if draw(st.booleans()):
        kind, lengths = draw(st.sampled_from(["first", "last", "any"])), numbers(draw, 1, 0, N)
        at = torch.arange(past + M)
        flags = {"first": at < lengths, "last": at >= lengths}
        padding = flags[kind] if kind in flags else numbers(draw, past + M, 0, 1).bool()
    return Call(M, N, past, kv_offset, function, padding, draw(st.booleans()))


def dense(described: layer_masks.MaskDescription, M: int, N: int) -> Tensor:
    """What a description keeps [B,1,M,N]."""
    data = dict(described.tensors)
    assert {x.dtype for name, x in data.items() if "segments" in name} <= {*INTEGERS}
    mask = Band() if described.mask is None else described.mask
    if "keep" in data:
        mask &= Keep()
    if "kv_lengths" in data and "kv_lengths" not in mask.needs:
        mask &= KeyLengths()
    n = N if described.keys is None else described.keys
    block = Block(range(B), range(1), range(M), 1, M, n, data)
    keep: Tensor = mask.resolved(M, n, ()).keep(Place.of(block, range(n)))
    return F.pad(torch.ones(B, 1, M, n, dtype=torch.bool) & keep, (0, N - n))


def transformers_mask(arguments: dict[str, Any]) -> Any:  # Any: a tensor, None if it is skipped
    """What transformers makes for SDPA."""
    return hf.sdpa_mask(**arguments, allow_is_causal_skip=False)


@settings(max_examples=4 * settings().max_examples)
@given(calls())
def test_a_mask_means_what_transformers_makes_of_it(call: Call) -> None:
    """Place by place: as data, or as the very tensor where no mask says it."""
    event("as data" if check_call(call) else "as a tensor")


def check_call(call: Call) -> bool:
    """Hold a call to the mask that transformers makes; whether it is data."""
    expected = transformers_mask(call.arguments())
    with pytest.MonkeyPatch.context() as patch:
        if call.on_device:  # as where the host would wait for it
            patch.setattr(layer_masks, "read_offset", lambda q_offset: q_offset)
        described = layer_masks.decode_mask(**call.arguments())
    assert torch.equal(dense(described, call.M, call.N), expected), described
    assert torch.equal(described.clone(), hf.eager_mask(**call.arguments()))
    return is_data(described)


def is_data(described: layer_masks.MaskDescription) -> bool:
    """False for a mask that is all places, [B,1,M,N]."""
    keep = described.tensors.get("keep")
    return described.mask is not None or keep is None or keep.shape != described.shape


@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_the_room_of_a_cache_behind_the_last_token_is_left_out(on_device: bool) -> None:
    """Where all later keys are hidden; of a prompt and of one token, whose plans are for any number
    of keys."""

    def keys(M: int, past: int, function: MaskFunction) -> int | None:
        padding = torch.ones(B, past + M, dtype=torch.bool)
        call = Call(M, 12, past, 0, function, padding, on_device)
        described = layer_masks.decode_mask(**call.arguments())
        assert not described.tensors or described.keys is None
        return described.keys

    later = hf.or_masks(hf.causal_mask_function, lambda b, h, i, j: j == 11)
    window = hf.sliding_window_causal_mask_function(3)
    for function in (hf.causal_mask_function, window, hf.and_masks(KEYS[1], window)):
        assert keys(1, 7, function) == 8
        assert keys(5, 0, function) == 5
        assert keys(1, 11, function) is keys(12, 0, function) is None  # there is none
        assert keys(3, 4, function) is None
    next_too: MaskFunction = lambda b, h, i, j: j <= i + 1  # noqa: E731  # as those of transformers
    hidden = negated(hf.causal_mask_function)
    for function in (hf.bidirectional_mask_function, later, next_too, hidden):
        assert keys(1, 7, function) is keys(5, 0, function) is None


@pytest.mark.parametrize("on_device", [False, True])
def test_queries_after_any_number_of_keys_have_one_mask(on_device: bool) -> None:
    """And so one plan: how many keys there are is data."""
    window = hf.sliding_window_causal_mask_function(3)
    masks = set()
    for past in (4, 5):
        padding = torch.ones(B, past + 3, dtype=torch.bool)
        call = Call(3, 12, past, 0, window, padding, on_device)
        described = layer_masks.decode_mask(**call.arguments())
        masks.add(described.mask)
    assert len(masks) == 1


@given(size=st.integers(1, 9), N=st.integers(1, 12), data=st.data())
def test_near_keys_have_the_mask_of_a_window_or_a_chunk(
    size: int, N: int, data: st.DataObject
) -> None:
    """It is causal there, as transformers says."""
    M, padded = data.draw(st.integers(1, N)), data.draw(st.integers(0, N - 1))
    padding = torch.arange(N).expand(B, N) >= torch.tensor([[0], [padded]])
    for function in (
        hf.sliding_window_causal_mask_function(size),
        hf.chunked_causal_mask_function(size, padding.logical_not().sum(1)),
    ):
        arguments = Call(M, N, N - M, 0, function, padding).arguments()
        described = layer_masks.decode_mask(**arguments, allow_is_causal_skip=True, local_size=size)
        assert torch.equal(dense(described, M, N), transformers_mask(arguments))


def test_layers_read_no_key_behind_the_last_token() -> None:
    """Whatever is there: neither the keys, nor what a position bias adds to their scores."""
    q, k, v = torch.randn(B, 2, 1, 4), torch.randn(B, 2, 12, 4), torch.randn(B, 2, 12, 4)
    bias, layer = torch.randn(1, 2, 1, 12), torch.nn.Identity()
    call = Call(1, 12, 7, 0, hf.causal_mask_function, torch.ones(B, 8, dtype=torch.bool), True)
    described = layer_masks.decode_mask(**call.arguments())
    due, _ = integration.attend_layer(layer, q, k, v, described, position_bias=bias)
    for x in (k, v, bias.mT):
        x[:, :, 8:] = torch.nan
    o, _ = integration.attend_layer(layer, q, k, v, described, position_bias=bias)
    assert torch.equal(o, due)
    first = k[:, :, :8], v[:, :, :8], None
    alone, _ = integration.attend_layer(layer, q, *first, position_bias=bias[..., :8])
    torch.testing.assert_close(o, alone)


IDS = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]])
KINDS = [hf.packed_sequence_mask_function(x) for x in (IDS, IDS.roll(1, 1), IDS.flip(1))]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "join",
    [
        lambda same: hf.or_masks(
            hf.and_masks(hf.or_masks(hf.causal_mask_function, KEYS[1]), same), KEYS[0]
        ),
        lambda same: negated(hf.and_masks(negated(hf.and_masks(KEYS[1], KEYS[0])), same)),
        lambda same: hf.and_masks(hf.causal_mask_function, same, *KINDS[1:]),
        lambda same: hf.and_masks(KINDS[1], same, KINDS[2]),
    ],
)
def test_a_join_keeps_every_kind_of_segments(
    join: Callable[[MaskFunction], MaskFunction], dtype: torch.dtype
) -> None:
    same = hf.packed_sequence_mask_function(IDS.to(dtype))
    assert check_call(Call(4, 4, 0, 0, join(same), None))


@pytest.mark.parametrize(
    ("counts", "is_data"),
    [([0, 1, 0, 1], True), ([0, 0, 0, 1], False), ([0, 1, 2, 1], False), ([3, 4, 7, 8], True)],
)
def test_numbers_are_put_in_order_only_where_they_count(counts: list[int], is_data: bool) -> None:
    """By one within each segment, here two of two tokens each."""
    positions = torch.tensor([counts] * B)
    each = hf.sliding_window_causal_mask_function(2)
    ends = torch.tensor([[0, 0, 1, 1]] * B)
    function = hf.packed_sequence_compatibility_function(each, positions, ends)
    assert check_call(Call(4, 4, 0, 0, function, None)) == is_data
    assert not check_call(Call(4, 4, 0, 0, hf.or_masks(function, KINDS[0]), None))
    wrong = hf.packed_sequence_compatibility_function(each, positions, ends.flip(1))
    assert not check_call(Call(4, 4, 0, 0, wrong, None))


def test_documents_are_joined_to_the_segments_of_a_mask() -> None:
    """As those of a model whose masks have chunks or blocks: into them, or beside them."""
    keep, documents = torch.tensor([1, 1, 0, 1]).bool().expand(B, 1, 1, 4), (IDS, IDS.roll(1, 1))
    apart = (documents[0][:, :, None] == documents[1][:, None])[:, None]
    for mask in (Causal(), Causal() & SameSegment(), Causal() | SameSegment()):
        tensors: dict[str, Any] = {"keep": keep}
        if "q_segments" in mask.needs:
            tensors |= {"q_segments": IDS.flip(1), "kv_segments": IDS}
        arguments = describe(hf.causal_mask_function).arguments
        kept = dense(layer_masks.MaskDescription.of(mask, tensors, arguments), 4, 4)
        joined = integration.separate_documents(mask, tensors, documents)
        assert torch.equal(
            dense(layer_masks.MaskDescription.of(*joined, arguments), 4, 4), kept & apart
        )


def describe(function: MaskFunction, **changes: Any) -> Any:  # Any: as `decode_mask`
    call = Call(4, 4, 0, 0, function, None)
    return layer_masks.decode_mask(**{**call.arguments(), **changes})


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda b, h, i, j: i % 2 == j % 2, "does more than compare positions"),
        (lambda b, h, i, j: TABLE[b, j] <= TABLE[b, i], "puts the numbers of a tensor in order"),
        (lambda b, h, i, j: j <= TABLE[b, i], "puts the numbers of a tensor in order"),
        (lambda b, h, i, j: abs(i - j) == 2, "compares a distance with something that is not a"),
        (lambda b, h, i, j: abs(i) // 2 <= j, "does more than compare positions"),
        (lambda b, h, i, j: torch.where(j <= i, True, False), "calls where on a position"),
        (lambda b, h, i, j: h == 0, "compares something that is not a position"),
        (lambda b, h, i, j: j - i < TABLE[b, j], "compares something that is not a position"),
        (lambda b, h, i, j: j <= 0.5 * TABLE[0, 0], "compares something that is not a position"),
        (lambda b, h, i, j: TABLE[0, i] == TABLE[0, j], "indexes a tensor otherwise than by"),
        (lambda b, h, i, j: TABLE[h, i] == TABLE[b, j], "indexes a tensor otherwise than by"),
        (lambda b, h, i, j: j < TABLE[h, 0], "indexes a tensor otherwise than by"),
        (lambda b, h, i, j: TABLE[0][i] == TABLE[0][j], "indexes a tensor otherwise than by"),
        (lambda b, h, i, j: TABLE[b, i - 1] == TABLE[b, j], "indexes a tensor where it has no"),
        (lambda b, h, i, j: TABLE.float()[b, j] > 0, "reads a tensor of torch.float32"),
        (lambda b, h, i, j: TABLE.byte()[b, i] == j, "reads a tensor of torch.uint8"),
        (hf.and_masks(hf.or_masks(KINDS[0], KEYS[0]), KINDS[1]), "joins several kinds of segments"),
        (
            hf.remap_positions_for_packed_sequence(hf.causal_mask_function, TABLE),
            "puts the numbers",
        ),
    ],
)
def test_what_no_mask_says_is_a_tensor_and_the_log_says_why_once(
    function: MaskFunction, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer_masks.SAID.clear()
    masks = [describe(function, use_vmap=True) for _ in range(2)]
    arguments = describe(hf.causal_mask_function).arguments | {"mask_function": function}
    assert masks[1].mask is None
    assert torch.equal(masks[1].tensors["keep"], transformers_mask(arguments))
    (record,) = caplog.records
    assert f"since a mask function {reason}" in record.message


def test_a_function_that_branches_is_not_read() -> None:
    frame = Frame(B, 4, 4, 0, 0, "cpu", trusts=False)
    for function in (lambda b, h, i, j: j <= i or j < 2, lambda b, h, i, j: {i: j}[j] <= i):
        with pytest.raises(UnreadableMaskError):
            read_mask_function(function, frame)


def identities(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values to which a mask belongs."""
    k = torch.eye(m.shape[3]).expand(B, 1, -1, -1)
    return torch.ones(m.shape), k, k


USES: dict[str, Callable[[Any], Any]] = {  # of a mask, in models that compute with it
    "add": lambda m: torch.ones(m.shape) + m,
    "add to it": lambda m: m + torch.ones(m.shape),
    "add by name": lambda m: torch.add(input=torch.ones(m.shape), other=m),
    "add in place": lambda m: torch.ones(m.shape).add_(m),
    "join": lambda m: torch.cat([m, m], -1),
    "join by name": lambda m: torch.cat(tensors=(m, torch.zeros(m.shape)), dim=2),
    "stack": lambda m: torch.stack([m, 2 * m]),
    "compare": lambda m: m == 0,
    "not": lambda m: ~(m == 0.0),
    "logical not": lambda m: m.logical_not(),
    "select": lambda m: torch.where(m < 0, torch.zeros(m.shape), torch.ones(m.shape)),
    "fill": lambda m: torch.ones(m.shape).masked_fill(m.bool(), torch.finfo(m.dtype).min),
    "index": lambda m: m[:, :, :, :2],
    "cast": lambda m: m.to(torch.float16),
    "cast by name": lambda m: m.to(dtype=torch.float16),
    "cast like another": lambda m: m.to(torch.ones(1, dtype=torch.float16)),
    "pad": lambda m: F.pad(m, (0, 3), value=0.0),
    "expand": lambda m: m.expand(-1, 3, -1, -1),
    "subtract from 1": lambda m: 1.0 - m,
    "add up": lambda m: sum([m, m]),
    "attend": lambda m: F.scaled_dot_product_attention(*identities(m), attn_mask=m),
    "copy": copy.deepcopy,
    "put in a new tensor": lambda m: torch.empty(m.shape).copy_(m),
    "multiply": lambda m: m.mul(torch.tensor(0.5)),
    "in a list": lambda m: [*m.unbind(0)],
}


@pytest.mark.parametrize("use", USES)
@given(calls())
def test_whoever_computes_with_a_mask_gets_the_mask_of_eager_attention(
    use: str, call: Call
) -> None:
    """Floating, as in every model's own eager attention; never booleans, which would be added."""
    described = layer_masks.decode_mask(**call.arguments())
    due = hf.eager_mask(**call.arguments())
    results, expected = (USES[use](x) for x in (described, due))
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
    assert type(results) is type(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_mask_looks_like_that_of_eager_attention_and_is_not_made_to_be_looked_at(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, due = (
        function(**Call(3, 4, 1, 0, hf.causal_mask_function, None).arguments(), dtype=dtype)
        for function in (layer_masks.decode_mask, hf.eager_mask)
    )
    monkeypatch.setattr(layer_masks, "dense_mask", lambda _: pytest.fail("a dense mask"))
    assert isinstance(described, Tensor)
    assert described.contiguous() is described
    for look in ("shape", "dtype", "device", "ndim", "requires_grad"):
        assert getattr(described, look) == getattr(due, look)
    assert (len(described), described.size(2), described.dim()) == (B, 3, 4)
    assert torch.finfo(described.dtype) == torch.finfo(dtype)
    assert "Band(high=0)" in repr(described) or "Causal" in repr(described)


def test_a_mask_that_a_model_computes_with_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    layer_masks.SAID.clear()
    described = describe(hf.causal_mask_function)
    _ = described + 1, described + 1
    (record,) = caplog.records
    assert "since a model computes with the mask of a layer itself" in record.message


@pytest.mark.parametrize(
    "write",
    [lambda m: m.masked_fill_(m == 0, 1.0), lambda m: m.__setitem__(0, 1.0), lambda m: m.zero_()],
)
def test_what_is_written_into_a_mask_is_an_error(write: Callable[[Tensor], object]) -> None:
    """Since layers of ours would not see it."""
    with pytest.raises(GraphError, match=r"writes into a layer's mask.*attention_mask\.clone"):
        write(describe(hf.causal_mask_function))


def test_a_description_is_made_once() -> None:
    """`generate` makes masks, and the model makes them of those again."""
    described, config = describe(hf.causal_mask_function), LlamaConfig()
    config._attn_implementation = "attn_graph"
    assert hf.create_causal_mask(config, torch.ones(B, 4, 8), described, None) is described
    padded = describe(hf.causal_mask_function, attention_mask=torch.eye(B, 4).bool())
    for moved in (padded.to("meta"), padded.to(device="meta", non_blocking=True)):
        assert moved.tensors["keep"].is_meta
        assert moved.device == (moved + 1).device == torch.device("meta")


def test_nothing_is_read_from_a_device_while_it_decodes() -> None:
    """Tensors without numbers, which can't be read."""
    described = describe(
        hf.sliding_window_causal_mask_function(2),
        q_length=1,
        q_offset=torch.tensor(3, device="meta"),
        attention_mask=torch.ones(B, 4, dtype=torch.bool, device="meta"),
        device="meta",
    )
    assert {n: t.shape for n, t in described.tensors.items()} == {
        "kv_lengths": (B,),
        "keep": (B, 1, 1, 4),
    }


@pytest.mark.parametrize(
    ("flags", "names"),
    [([1, 1, 1, 1], set()), ([1, 1, 0, 0], {"kv_lengths"}), ([0, 1, 1, 1], {"keep"})],
)
def test_padding_is_what_it_takes_to_say_it(flags: list[int], names: set[str]) -> None:
    padding = torch.tensor([flags, [1, 1, 1, 1]]).bool()
    assert describe(hf.causal_mask_function, attention_mask=padding).tensors.keys() == names
