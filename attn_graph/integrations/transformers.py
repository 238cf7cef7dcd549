"""attn_graph as an attention implementation of transformers: import this module, then select it.

    >>> import attn_graph.integrations.transformers
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attn_graph")

or, for a loaded model, `model.set_attn_implementation("attn_graph")`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attn_graph.errors import GraphError
from attn_graph.integrations.conditions import Kind, pair_kinds
from attn_graph.integrations.layer_masks import MaskDescription, Tensors, decode_mask, say_once
from attn_graph.integrations.whole_model import NAME as NAME
from attn_graph.integrations.whole_model import explain_layers as explain_layers
from attn_graph.integrations.whole_model import explain_model as explain_model
from attn_graph.integrations.whole_model import note_call
from attn_graph.ir.arguments import order_inputs
from attn_graph.masks import And, Causal, Mask, SameSegment, Window, flatten_join
from attn_graph.nn.calls import PLAIN, SEGMENTS, attend_as, draw_seed
from attn_graph.nn.functional import read_mask
from attn_graph.nn.packed_sizes import round_size

BATCHES = "attn_graph_flash"  # transformers batches requests by names of this kind, or SDPA
LAST = Causal("bottom_right")
WEIGHTS = (
    "output_attentions: weights [B,H,M,N] are never made; for them say "
    'model.set_attn_implementation("eager")'
)
# Tensors that layers hand on, of which attention itself reads none:
HANDED_ON = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "seq_idx", "num_items_in_batch"}
    | {"max_length_q", "max_length_k"}
)
OF_A_BATCH = frozenset(  # tensors of a step, which the cache or the model reads
    {"read_index", "write_index", "cu_seq_lens_k", "block_table"}
    | {"logits_indices", "logits_processor_args"}
)


def attend_layer(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskDescription | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    output_attentions: bool | None = False,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention interface: query [B,H,M,D], key and value [B,G,N,D] -> [B,M,H,D], and None.

    s_aux: sinks [H]. sinks: of each query, [B,H,M,1]. indices: the only keys that a query sees,
    [B,M,count]. position_bias: [1 or B,H,M,N], differentiable. cu_seq_lens_q, cu_seq_lens_k: starts
    and ends of documents in a row, [documents + 1]. Raises GraphError if weights are wanted, since
    they are never made, for documents with different queries and keys, and for other tensors.
    """
    if output_attentions:
        raise GraphError(WEIGHTS)
    if others:
        refuse_tensors(others)
    chosen = None if indices is None else select_keys(query, key, indices)
    adds = softcap is None and s_aux is None
    mask, tensors, n = read_layer_mask(module, query, attention_mask, is_causal, adds)
    if n is not None:
        key, value = key[:, :, :n], value[:, :, :n]
        position_bias = None if position_bias is None else position_bias[..., :n]
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        documents = number_documents(query, key, cu_seq_lens_q, cu_seq_lens_k)
        mask, tensors = separate_documents(mask, tensors, documents)
    if chosen is not None:
        tensors = with_fewer_keys(tensors, chosen[..., : key.shape[2]])
    if position_bias is not None:
        tensors["bias"] = position_bias + tensors["bias"] if "bias" in tensors else position_bias
    if s_aux is not None:
        tensors["sinks"] = s_aux
    options = (mask, scaling, None, softcap, False, dropout, sinks is not None, None, *PLAIN)
    note_call(module, {"q": query, "k": key, "v": value, **tensors}, options)
    # `attention` reads three times as many arguments at each call
    named = order_inputs(tensors) if len(tensors) > 1 else tensors
    if dropout:
        named = {**named, **draw_seed(query.device)}
    o = attend_as(query, key, value, named, options)
    if sinks is not None:
        o = weigh_sinks(o[0], o[1], sinks)
    assert isinstance(o, Tensor)
    return o.transpose(1, 2).contiguous(), None


def read_layer_mask(
    module: torch.nn.Module,
    query: Tensor,
    attention_mask: MaskDescription | Tensor | None,
    is_causal: bool | None,
    adds: bool,
) -> tuple[Mask | None, Tensors, int | None]:
    """A layer's mask, its tensors, and the number of keys that it reads, None for all.

    adds: True if padding may be numbers added to scores, which are otherwise as the kernel of a CPU
    has them.
    """
    if isinstance(attention_mask, MaskDescription):
        if adds and not is_dynamo_compiling():  # which knows no parts of a mask made before
            padding = attention_mask.padding
            if padding is not None and padding.dtype == query.dtype:
                return None, {"bias": padding}, attention_mask.keys
        return attention_mask.mask, {**attention_mask.tensors}, attention_mask.keys
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and query.shape[2] > 1 and attention_mask is None
    mask, given = read_mask(attention_mask, causal)
    return mask, {**given}, None


def refuse_tensors(others: Mapping[str, object]) -> None:
    """Raise GraphError for a keyword that holds a tensor and is not known to be only handed on."""
    for name, x in others.items():
        if name in HANDED_ON or isinstance(x, bool | int | float | str | None):
            continue
        if any(isinstance(each, Tensor) for each in tree_leaves(x)):
            raise GraphError(
                f"{name}: a layer passes this tensor to its attention, which {NAME} does not read; "
                'call model.set_attn_implementation("eager")'
            )


def weigh_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """o, with a sink of each query among its weights: exp(lse) / (exp(lse) + exp(sink)) of it.

    Raises GraphError for sinks of another shape than [B,H,M,1].
    """
    if sinks.shape != (*lse.shape, 1):
        raise GraphError(
            f"sinks: a logit of each query and head is {[*lse.shape, 1]}, and this is "
            f"{[*sinks.shape]}; those of heads alone, [H], are s_aux"
        )
    return (o * torch.sigmoid(lse[..., None] - sinks)).to(o.dtype)


def number_documents(
    query: Tensor, key: Tensor, q_ends: Tensor | None, kv_ends: Tensor | None
) -> Kind:
    """The document of each query [B,M] and key [B,N], by cumulative lengths over all rows.

    Raises GraphError if M and N differ: the place of a query in its document is unknown then. And
    if one of the two is missing.
    """
    if q_ends is None or kv_ends is None:
        raise GraphError("cu_seq_lens_q, cu_seq_lens_k: documents in a row need both")
    (B, _, M, _), N = query.shape, key.shape[2]
    if M != N:
        raise GraphError(
            f"cu_seq_lens_q: documents in a row need as many keys as queries, and there are {N} "
            f"keys and {M} queries; call the model with use_cache=False, or without cu_seq_lens_q"
        )
    token = torch.arange(B * M, device=query.device, dtype=q_ends.dtype).view(B, M)
    q, kv = (torch.bucketize(token, ends[1:], right=True) for ends in (q_ends, kv_ends))
    return q, kv


def separate_documents(
    mask: Mask | None, tensors: Tensors, documents: Kind
) -> tuple[Mask | None, Tensors]:
    """A mask and its tensors, with query and key restricted to one document."""
    known = tuple(tensors[name] for name in SEGMENTS if name in tensors)
    if not known:
        whole = SameSegment() if mask is None else mask & SameSegment()
        return whole, tensors | dict(zip(SEGMENTS, documents, strict=True))
    if keeps_segments_apart(mask):
        pairs = pair_kinds(((known[0], known[1]), documents))
        return mask, tensors | dict(zip(SEGMENTS, pairs, strict=True))
    say_once("documents in a row are not the segments of a layer's mask")
    q, kv = documents
    return mask, with_fewer_keys(tensors, (q[:, :, None] == kv[:, None])[:, None])


def select_keys(query: Tensor, key: Tensor, indices: Tensor) -> Tensor:
    """True [B,1,M,N] at the keys of each query, given by indices [B,M,count]."""
    B, M, N = query.shape[0], query.shape[2], key.shape[2]
    none = torch.zeros((B, M, N), dtype=torch.bool, device=query.device)
    return none.scatter(-1, indices.long(), True)[:, None]


def with_fewer_keys(tensors: Tensors, keep: Tensor) -> Tensors:
    """A mask's tensors, with fewer keys: those of `keep` [B,1,M,N]."""
    return tensors | {"keep": tensors["keep"] & keep if "keep" in tensors else keep}


def keeps_segments_apart(mask: Mask | None) -> bool:
    """True for `&` of `SameSegment` and of parts without segments."""
    parts = [] if mask is None else flatten_join(And, mask)
    return [part for part in parts if "q_segments" in part.needs] == [SameSegment()]


keeps_segments_apart._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result


def attend_batch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = False,
    cache: Any = None,  # Any: transformers' PagedAttentionCache
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **given: Any,  # Any: what the cache reads and changes
) -> tuple[Tensor, None]:
    """The attention interface of `continuous_batching`: query [1,H,T,D], key and value [1,G,T,D] of
    the new tokens of all requests -> [1,T,H,D], and None.

    Raises GraphError without a cache, for what a batch has no place for, and if weights are wanted.
    """
    if output_attentions:
        raise GraphError(WEIGHTS)
    if cache is None or cu_seq_lens_q is None:
        raise GraphError(
            "continuous_batching: the model is called without a paged cache; within the block call "
            "model.generate_batch, and anything else outside it"
        )
    refuse_tensors({name: x for name, x in given.items() if name not in OF_A_BATCH})
    others = {"dropout": dropout, **{x: given.get(x) for x in ("position_bias", "block_table")}}
    for name, x in others.items():
        if x is not None and not (isinstance(x, float) and x == 0):
            raise GraphError(f"continuous_batching: a layer passes {name}, which it does not read")
    key, value = cache.update(key, value, module.layer_idx, given)
    window = getattr(cache.layer_to_allocator[module.layer_idx], "sliding_window", None)
    mask = LAST if window is None else Window(window - 1, 0, "bottom_right")
    starts = {"q_starts": cu_seq_lens_q, "kv_starts": given["cu_seq_lens_k"]}
    longest = round_size(max_length_q), round_size(given["max_length_k"])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    named = order_inputs(starts if s_aux is None else {**starts, "sinks": s_aux})
    o = attend_as(
        q, k, v, named, (mask, scaling, None, softcap, False, 0.0, False, longest, *PLAIN)
    )
    assert isinstance(o, Tensor)  # without statistics
    return o[None], None


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[None]:
    """A block in which plans compute the attention of `model.generate_batch`.

        >>> with continuous_batching(model):
        ...     model.generate_batch(inputs=[[3, 4, 5], [6, 7]])

    All requests of a step are one packed call. Raises GraphError for a model without an attention
    interface.
    """
    if not model._can_set_attn_implementation():
        raise GraphError(
            f"continuous_batching: {type(model).__name__} has no attention interface, by which "
            "transformers calls others' attention"
        )
    configs = model.config, model.config.get_text_config(decoder=True)
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation_internal = BATCHES
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def refuse_own_attention(model: type[PreTrainedModel]) -> None:
    """Raise GraphError for a class of models that computes attention by code of its own, or picks
    such code by names among which ours is missing."""
    model._can_set_attn_implementation()  # keeps its answer, if it can read the source
    home = sys.modules.get(model.__module__)
    objects = vars(home).values() if home else ()
    picks = any(isinstance(x, dict) and "eager" in x and NAME not in x for x in objects)
    if picks or not getattr(model, "_can_set_attn_implementation_cached_value", True):
        raise GraphError(
            f"attn_implementation: {model.__name__} has attention of its own, which does not go "
            f"through transformers' attention interface, so it can't be {NAME!r}. Load the model "
            f"without it; model.set_attn_implementation({NAME!r}) then sets the parts that can"
        )


checks = PreTrainedModel.get_correct_attn_implementation  # transformers has no hook for others


@wraps(checks)
def check_ours_too(
    model: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
) -> str:
    """Refuse as `sdpa` is refused: while a model is made. Later transformers itself leaves out the
    parts without the interface."""
    if is_init_check and requested_attention == NAME:
        refuse_own_attention(type(model))
    name: str = checks(model, requested_attention, is_init_check)
    return name


setattr(PreTrainedModel, "get_correct_attn_implementation", check_ours_too)  # noqa: B010  # by another's type
AttentionInterface.register(NAME, attend_layer)
AttentionMaskInterface.register(NAME, decode_mask)
AttentionInterface.register(BATCHES, attend_batch)
AttentionMaskInterface.register(BATCHES, lambda *_, **__: None)
