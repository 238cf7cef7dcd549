"""A step of serving: the tensors of all layers with one cache spec, and prepared plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from attrs import Factory, field, frozen
from torch import Tensor

from attn_graph.errors import GraphError

Call = Callable[..., Any]
Cells = tuple[Tensor, Tensor]  # of each new token its page, and its row there
WAY_OUT = "choose another backend, on CPUs by ATTN_GRAPH_VLLM=0"
OfVllm = Any  # its objects: vLLM is not where types are checked
UNREAD = {  # what a step of vLLM may have, by name, and this library's layers do not read
    "mm_req_doc_ranges": "images whose tokens see later ones",
    "rswa_prefix_lens": "windows that keep a prefix of each request",
    "dcp_local_seq_lens": "keys of a sequence on several devices",
}


@final
@frozen(eq=False)
class ServingStep:
    """tokens: new ones, of all sequences. starts [B+1], lengths [B]: of the sequences. table
    [B,count]: their pages; None without a cache. cells: for the new tokens. causal: False if
    queries see later keys. calls: plans with these inputs, made by the first layer of a kind."""

    tokens: int
    starts: Tensor
    lengths: Tensor
    table: Tensor | None
    cells: Cells | None
    causal: bool
    calls: dict[tuple[object, ...], Call] = field(init=False, default=Factory(dict))


@final
@frozen
class Capacity:
    """The most new tokens of a step, and sequences."""

    tokens: int
    sequences: int


def make_step(given: OfVllm, page: int | None) -> ServingStep:
    """The step of vLLM's CommonAttentionMetadata. page: rows of a block; None: there is no cache.

    Reads no tensor on the host. Raises GraphError for inputs not read here.
    """
    for name, meaning in UNREAD.items():
        value = getattr(given, name)
        if any(value.values()) if isinstance(value, dict) else value is not None:
            raise GraphError(f"{name}: {meaning} are not supported; {WAY_OUT}")
    if isinstance(given.causal, Tensor):
        raise GraphError(f"causal: expected one flag, got one for each request; {WAY_OUT}")
    B, T = given.num_reqs, given.num_actual_tokens
    starts, lengths = given.query_start_loc[: B + 1], given.seq_lens[:B]
    if page is None:
        return ServingStep(T, starts, lengths, None, None, False)
    cells = find_cells(given.slot_mapping[:T], page)
    return ServingStep(T, starts, lengths, given.block_table_tensor[:B], cells, bool(given.causal))


def find_cells(slots: Tensor, page: int) -> Cells:
    """The places of tokens. slots [T]: page * P + row; -1 skips a token: it goes to page 0, and
    vLLM gives this page to no sequence. Reads nothing on the host."""
    slots = slots.clamp(min=0)
    return slots.div(page, rounding_mode="floor"), slots.remainder(page)
