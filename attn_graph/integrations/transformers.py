"""attn_graph as an attention implementation of transformers: import this module, then select it.

>>> import attn_graph.integrations.transformers
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attn_graph")

or, for a loaded model, `model.set_attn_implementation("attn_graph")`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attn_graph.compiler import explain
from attn_graph.errors import GraphError
from attn_graph.integrations.conditions import (
    Condition,
    Kind,
    UnreadableMaskError,
    is_readable_now,
    pair_kinds,
)
from attn_graph.integrations.mask_functions import Frame, MaskFunction, read_mask_function
from attn_graph.ir.builder import EXTRA
from attn_graph.ir.graph import Graph
from attn_graph.machine.ambient import is_traced
from attn_graph.machine.cache import remember
from attn_graph.machine.target import Target
from attn_graph.masks import And, Causal, Mask, SameSegment, Window, flatten_join
from attn_graph.nn.calls import SEGMENTS, Named, attend_as, draw_seed, make_graph, named_options
from attn_graph.nn.functional import read_mask
from attn_graph.nn.packed_sizes import round_size
from attn_graph.planner.explanation import Explanation
from attn_graph.spec import TensorSpec

NAME = "attn_graph"
BATCHES = "attn_graph_flash"  # transformers batches requests by names of this kind, or SDPA
LAST = Causal("bottom_right")
WEIGHTS = (
    "output_attentions: weights [B,H,M,N] are never made; for them say "
    'model.set_attn_implementation("eager")'
)
Tensors = dict[str, Tensor]
logger = logging.getLogger(__name__)
LayerGraphs = dict[torch.nn.Module, tuple[Graph, torch.device]]
layer_graphs: ContextVar[LayerGraphs | None]  # while layers are explained
layer_graphs = ContextVar("layer_graphs", default=None)


@define(eq=False)
class MaskDescription:
    """A layer's mask, or none, and its tensors by the names of a graph's inputs.

    It stands for transformers' boolean tensor [B,1,M,N], and becomes the tensor, with a line in the
    log, if the model computes with it. arguments: `sdpa_mask`'s. keys: the number up to the last
    query's token, if a layer need read no others.
    """

    mask: Mask | None
    tensors: Tensors
    arguments: Mapping[str, Any] = field(repr=False)  # Any: those of transformers
    keys: int | None = None
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """[B,1,M,N]."""
        names = ("batch_size", "q_length", "kv_length")
        B, M, N = (self.arguments[name] for name in names)
        return torch.Size((B, 1, M, N))

    def contiguous(self) -> MaskDescription:
        """Itself."""
        return self

    def dense(self) -> Tensor:
        say_once("a model computes with the mask of a layer itself")
        return dense_mask(self.arguments)

    def to(self, device: torch.device | str | int, **_: object) -> MaskDescription:
        """The description with its tensors on a device, for a model spread over several."""
        moved = {name: x.to(device) for name, x in self.tensors.items()}
        return MaskDescription(self.mask, moved, self.arguments, self.keys)

    def __getitem__(self, index: object) -> Tensor:
        return self.dense()[index]  # type: ignore[index]  # whatever indexes a tensor

    def __getattr__(self, name: str) -> Any:  # Any: whatever a tensor has
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],  # Any: whatever PyTorch's functions take and give
        types: Sequence[type],
        args: Sequence[Any] = (),  # Any: the same
        kwargs: Mapping[str, Any] | None = None,  # Any: the same
    ) -> Any:  # Any: the same
        dense = [x.dense() if isinstance(x, cls) else x for x in args]
        return func(*dense, **(kwargs or {}))


def decode_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,  # Any: indices and flags
    attention_mask: Tensor | MaskDescription | None = None,
    use_vmap: bool = True,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    **others: object,
) -> MaskDescription | Tensor:
    """The mask interface: a mask function and padding [B, tokens] as data.

    An unreadable mask function becomes a boolean tensor [B,1,M,N], with one line in the log.
    use_vmap: set by transformers for functions of others. allow_is_causal_skip: True if the mask
    function is causal within each window or chunk of local_size tokens.
    """
    if isinstance(attention_mask, MaskDescription):
        return attention_mask  # `generate` makes masks before the model does
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "use_vmap": use_vmap, "device": device,
    }  # fmt: skip
    first = read_offset(q_offset)
    frame = Frame(batch_size, q_length, kv_length, first, kv_offset, device, trusts=not use_vmap)
    try:
        if use_vmap and torch.compiler.is_compiling():
            raise UnreadableMaskError("is not transformers' own, and torch.compile traces it")
        near = allow_is_causal_skip and kv_length < (local_size or 0)
        function = causal_mask_function if near else mask_function
        condition, frame = read_keys_so_far(function, frame)
    except UnreadableMaskError as error:
        say_once(f"a mask function {error}")
        return dense_mask(arguments)
    tensors: Tensors = {}
    if condition.segments is not None:
        tensors |= zip(SEGMENTS, condition.segments, strict=True)
    if condition.lengths:
        tensors["kv_lengths"] = frame.lengths()
    if attention_mask is not None:
        tensors |= read_padding(attention_mask, frame)
    keys = None if kv_length == frame.N else frame.N
    return MaskDescription(condition.mask, tensors, arguments, keys)


def read_offset(q_offset: int | Tensor) -> int | Tensor:
    """The token of the first query, as a number if the host need not wait for it."""
    if isinstance(q_offset, Tensor) and is_readable_now(q_offset, 1):
        return int(q_offset)
    return q_offset


def read_keys_so_far(mask_function: MaskFunction, frame: Frame) -> tuple[Condition, Frame]:
    """A mask function's condition, with its keys. On CPUs one plan serves any number of keys, so
    the room of a cache behind the last token, hidden from all queries, is left out.

    Raises UnreadableMaskError.
    """
    on_cpu = torch.device(frame.device).type == "cpu"
    if on_cpu and not (torch.compiler.is_compiling() or is_traced()):
        shorter = frame.keys_so_far
        condition = read_mask_function(mask_function, shorter)
        if condition.ends or shorter is frame:
            return condition, shorter
    return read_mask_function(mask_function, frame), frame


def read_padding(attention_mask: Tensor, frame: Frame) -> Tensors:
    """The keys without padding: all, or the first of each batch entry, or flags [B,1,1,N].

    The tensor decides; but while decoding on a GPU, where reading waits for the device, and in
    traced or captured calls, they are flags.
    """
    flags = attention_mask[:, frame.kv_offset : frame.kv_offset + frame.N]
    if (missing := frame.N - flags.shape[1]) > 0:
        flags = torch.nn.functional.pad(flags, (0, missing))
    if is_readable_now(flags, frame.M):
        if flags.all():
            return {}
        if isinstance(frame.shift, int) and frame.shift == 0:
            lengths = flags.sum(1)
            first = torch.arange(frame.N, device=flags.device) < lengths[:, None]
            if torch.equal(flags, first):
                return {"kv_lengths": lengths}
    return {"keep": flags.contiguous()[:, None, None]}  # no strides of the whole, which grows


def dense_mask(arguments: Mapping[str, Any]) -> Tensor:  # Any: those of transformers
    """The boolean tensor [B,1,M,N] of transformers for SDPA."""
    mask: Tensor | None = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert mask is not None  # as where it may be skipped
    return mask


log_once = remember(logger.warning)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # of torch
def say_once(what: str) -> None:
    """Log the reason for a dense mask, once."""
    log_once("a mask is a boolean tensor [B,1,M,N], not data, since %s", what)


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
    output_attentions: bool | None = False,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention interface: query [B,H,M,D], key and value [B,G,N,D] -> [B,M,H,D], and None.

    s_aux: sinks [H]. position_bias: [1 or B,H,M,N], differentiable. cu_seq_lens_q, cu_seq_lens_k:
    starts and ends of documents in a row, [documents + 1]. Raises GraphError if weights are wanted,
    since they are never made, and for documents with different queries and keys.
    """
    if output_attentions:
        raise GraphError(WEIGHTS)
    if isinstance(attention_mask, MaskDescription):
        mask, tensors = attention_mask.mask, {**attention_mask.tensors}
        if (n := attention_mask.keys) is not None:
            key, value = key[:, :, :n], value[:, :, :n]
            position_bias = None if position_bias is None else position_bias[..., :n]
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and query.shape[2] > 1 and attention_mask is None
        mask, given = read_mask(attention_mask, causal)
        tensors = {**given}
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        documents = number_documents(query, key, cu_seq_lens_q, cu_seq_lens_k)
        mask, tensors = separate_documents(mask, tensors, documents)
    if position_bias is not None:
        tensors["bias"] = position_bias + tensors["bias"] if "bias" in tensors else position_bias
    if s_aux is not None:
        tensors["sinks"] = s_aux
    options = (mask, scaling, None, softcap, False, dropout, False, None, False, ())
    if not is_dynamo_compiling() and (graphs := layer_graphs.get()) is not None:
        each = {"q": query, "k": key, "v": value, **tensors}
        specs = {name: TensorSpec.like(x) for name, x in each.items()}
        graphs[module] = make_graph(specs, named_options(options)), query.device
    # `attention` reads three times as many arguments at each call
    named = name_tensors(tensors) if tensors else {}
    if dropout:
        named = {**named, **draw_seed(query.device)}
    o = attend_as(query, key, value, named, options)
    assert isinstance(o, Tensor)  # without statistics
    return o.transpose(1, 2).contiguous(), None


def name_tensors(tensors: Named) -> Named:
    """Tensors by the names of a graph's inputs, in their order."""
    return {name: tensors[name] for name in EXTRA if name in tensors}


def number_documents(query: Tensor, key: Tensor, q_ends: Tensor, kv_ends: Tensor) -> Kind:
    """The document of each query [B,M] and key [B,N], by cumulative lengths over all rows.

    Raises GraphError if M and N differ: the place of a query in its document is unknown then.
    """
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
    keep = (q[:, :, None] == kv[:, None])[:, None]
    return mask, tensors | {"keep": tensors["keep"] & keep if "keep" in tensors else keep}


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
    named = name_tensors(starts if s_aux is None else {**starts, "sinks": s_aux})
    o = attend_as(
        q, k, v, named, (mask, scaling, None, softcap, False, 0.0, False, longest, False, ())
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


def explain_layers(
    model: torch.nn.Module,
    /,
    target: Target | str | None = None,
    **inputs: Any,  # Any: what the model takes
) -> dict[str, Explanation]:
    """The explanation of each layer's attention, by the layer's name: see `attn_graph.explain`.

    The model is called with `inputs` once, without gradients, on its device. target: another
    machine to explain for; the model's by default. Layers without attention of ours are left out.
    Raises GraphError if none is left.
    """
    token = layer_graphs.set({})
    try:
        with torch.no_grad():
            model(**inputs)
        graphs = layer_graphs.get() or {}
    finally:
        layer_graphs.reset(token)
    if not graphs:
        raise GraphError(no_layers(model))
    explanations = {}
    for name, module in model.named_modules():
        if module in graphs:
            graph, device = graphs[module]
            explanations[name] = explain(graph, target=target or Target.here(device))
    return explanations


def no_layers(model: torch.nn.Module) -> str:
    """The error for a model without layers to explain, with its fix."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return (
        f"explain_layers: no layer of {type(model).__name__} calls {NAME}; its attention is "
        f"{implementation!r}. Call model.set_attn_implementation({NAME!r}) first. Where that is "
        "refused, the model has no attention interface; if it calls PyTorch's "
        "scaled_dot_product_attention, call it in a block of attn_graph.replace_sdpa(report=True)"
    )


AttentionInterface.register(NAME, attend_layer)
AttentionMaskInterface.register(NAME, decode_mask)
AttentionInterface.register(BATCHES, attend_batch)
AttentionMaskInterface.register(BATCHES, lambda *_, **__: None)
