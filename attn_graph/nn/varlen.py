"""PyTorch's `varlen_attn`, attention of packed sequences, by plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_graph.errors import (
    GraphError,
    PlanMismatchError,
    TensorDtypeError,
    TensorError,
    TensorRankError,
    as_tensor_error,
    binds,
    show,
)
from attn_graph.masks import Causal, Mask, Window
from attn_graph.nn.calls import Outputs
from attn_graph.nn.functional import attention, pytorchs_code
from attn_graph.nn.packed_sizes import round_size
from attn_graph.spec import INTEGERS, accumulator, layout_problem
from attn_graph.spec.dims import is_flag, to_index

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

UNBOUNDED = -1  # of a window
STARTS = ("cu_seq_q", "cu_seq_k")
FORMS = dict.fromkeys(STARTS, "[B + 1]") | {"seqused_k": "[B]", "block_table": "[B,count]"}


@binds(pytorchs_code)
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Outputs:
    """A replacement for `torch.nn.attention.varlen.varlen_attn`, on CPUs and GPUs.

    query [T,H,D], key [S,G,D], value [S,G,E] -> [T,H,E]: sequence b is the rows from cu_seq_q[b] to
    cu_seq_q[b + 1]; its keys begin at cu_seq_k[b] and end at cu_seq_k[b + 1], or after seqused_k[b]
    keys. max_q, max_k: the length of the longest sequence; on CPUs a sequence longer than the next
    power of two is an error. window_size: (left, right), -1 for no bound, aligned bottom right in
    each sequence: (-1, 0) is causal. enable_gqa: key and value have fewer heads.
    return_aux=AuxRequest(lse=True) also returns lse [H,T], with heads first like PyTorch's
    operator.

    block_table [B,count]: key and value are pools of pages [n,P,G,D], P of any size, and seqused_k
    counts the keys; cu_seq_k is then not read, and may be None. num_splits=1: no bit of a sequence
    depends on its neighbours, as with compile(batch_invariant=True), which CPUs do not support; any
    other number is an error.

    Beyond PyTorch: any dtype, value of another head size, gradients with seqused_k and block_table
    and through lse. Rows outside sequences are not read, and are 0 in results; a row without a key
    has an lse of -inf. Plans have named sizes: new lengths, batches and tables share a plan until a
    size passes a power of two.

    Raises TensorError, a RuntimeError and a ValueError, for arguments that make no sense together;
    NoBackendError if no backend supports them.
    """
    return attend_rows(
        None, query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k), return_aux, scale,
        window_size, enable_gqa, seqused_k, block_table, num_splits,
    )  # fmt: skip


@binds(pytorchs_code)
def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Outputs:
    """`varlen_attn`, with its rows written to `out`, as `torch.nn.attention.varlen` has it. Without
    gradients; lse is a new tensor."""
    return attend_rows(
        out, query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k), return_aux, scale,
        window_size, enable_gqa, seqused_k, block_table, num_splits,
    )  # fmt: skip


def attend_rows(
    out: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    starts: tuple[Tensor, Tensor | None], most: tuple[int, int], return_aux: AuxRequest | None,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor | None,
    block_table: Tensor | None, num_splits: int | None,
) -> Outputs:  # fmt: skip
    """`varlen_attn`, or `varlen_attn_out`."""
    cu_seq_q, cu_seq_k = starts
    paged = block_table is not None
    require_layout(query, key, value, paged)
    require_heads(query.shape[1], key.shape[-2], enable_gqa)
    require_keys(cu_seq_k, seqused_k, paged)
    require_counts(cu_seq_q, cu_seq_k=cu_seq_k, seqused_k=seqused_k, block_table=block_table)
    longest = round_longest("max_q", most[0]), round_longest("max_k", most[1])
    mask, lse, invariant = make_window(window_size), wants_lse(return_aux), is_whole(num_splits)
    rooms: Tensor | tuple[Tensor, Tensor] | None = out
    if lse and out is not None:
        rooms = out, query.new_empty(query.shape[1::-1], dtype=accumulator(query.dtype))
    try:
        return attention(
            query,
            key,
            value,
            scale=scale,
            mask=mask,
            kv_lengths=seqused_k,
            q_starts=cu_seq_q,
            kv_starts=None if paged or cu_seq_k is cu_seq_q else cu_seq_k,
            pages=block_table,
            max_lengths=(longest[0], None if paged else longest[1]),
            stats=lse,
            batch_invariant=invariant,
            out=rooms,
        )
    except TensorError:
        raise
    except (GraphError, PlanMismatchError) as error:
        raise as_tensor_error(error) from error


def require_layout(query: Tensor, key: Tensor, value: Tensor, paged: bool) -> None:
    """Raise TensorError for tensors of other axes."""
    pool = "a pool of pages [n,P,G,D]" if paged else "[S,G,D]"
    due = {"query": (query, 3, "[T,H,D]")}
    due |= {"key": (key, 3 + paged, pool), "value": (value, 3 + paged, pool)}
    for name, (t, rank, form) in due.items():
        if not isinstance(t, Tensor):
            raise TensorError(f"varlen_attn: {name} is a {type(t).__name__}, not a tensor")
        if problem := layout_problem(t):
            raise TensorError(f"varlen_attn: {name} {problem}")
        if t.ndim != rank:
            beside = "with" if paged else "without"
            raise TensorRankError(
                f"varlen_attn: {name} {[*t.shape]} has {t.ndim} axes, and {beside} block_table "
                f"it is {form}"
            )

    if key.shape[:-1] != value.shape[:-1]:
        raise TensorError(
            f"varlen_attn: key {[*key.shape]} and value {[*value.shape]} disagree; all but their "
            "last sizes must be equal"
        )


def require_heads(H: int, G: int, grouped: bool) -> None:
    """Raise TensorError for numbers of heads that do not fit."""
    if H != G and not grouped:
        raise TensorError(
            f"varlen_attn: query has {H} heads and key {G}; pass enable_gqa=True to share heads"
        )
    if grouped and (not G or H % G):
        raise TensorError(
            f"varlen_attn: query has {H} heads, not a multiple of key's {G}; repeat key's "
            "and value's heads"
        )


def require_keys(cu_seq_k: Tensor | None, seqused_k: Tensor | None, paged: bool) -> None:
    """Raise TensorError without the bounds of each sequence's keys."""
    if cu_seq_k is None and not paged:
        raise TensorError(
            "varlen_attn: cu_seq_k is None without block_table; pass the starts of keys"
        )
    if paged and seqused_k is None:
        raise TensorError(
            "varlen_attn: block_table needs seqused_k; pass the number of keys of each sequence"
        )


def require_counts(cu_seq_q: Tensor, **others: Tensor | None) -> None:
    """Raise TensorError for counts of another batch than cu_seq_q, or not of integers."""
    for name, t in {"cu_seq_q": cu_seq_q, **others}.items():
        if t is None and name != STARTS[0]:
            continue
        if not isinstance(t, Tensor):
            raise TensorError(
                f"varlen_attn: {name} is a {type(t).__name__}, not a tensor {FORMS[name]} of "
                "int32 or int64"
            )
        if t.dtype not in INTEGERS:
            raise TensorDtypeError(
                f"varlen_attn: {name} is {t.dtype}; it has to be {' or '.join(map(str, INTEGERS))}"
            )
        axes, count = 1 + (name == "block_table"), len(cu_seq_q) - (name not in STARTS)
        if t.ndim != axes or len(t) != count:
            raise TensorError(
                f"varlen_attn: cu_seq_q {[*cu_seq_q.shape]} is of {len(cu_seq_q) - 1} sequences, "
                f"and {name} is {[*t.shape]}; it has to be {FORMS[name]}"
            )


def round_longest(name: str, longest: int) -> int:
    """The most rows of a sequence, rounded up. Raises TensorError unless it is a size."""
    if not isinstance(longest, int | torch.SymInt) or isinstance(longest, bool) or longest < 0:
        raise TensorError(
            f"varlen_attn: {name} is {show(longest)}; pass the length of the longest sequence"
        )
    return round_size(longest)


def make_window(window: tuple[int, int]) -> Mask | None:
    """The mask of window_size. Raises TensorError unless it is a pair of bounds."""
    match window:
        case (-1, -1):
            return None
        case (-1, 0):
            return Causal("bottom_right")
        case (int(left), int(right)) if min(*window) >= UNBOUNDED and not any(map(is_flag, window)):
            first, last = (None if n == UNBOUNDED else n for n in (left, right))
            return Window(first, last, "bottom_right")
    raise TensorError(
        f"varlen_attn: window_size {show(window)} is not a pair of bounds (left, right), each at "
        "least 0, or -1 for no bound"
    )


def wants_lse(aux: AuxRequest | None) -> bool:
    """True if lse is returned. Raises TensorError for other requested results."""
    if aux is not None and not isinstance(getattr(aux, "_fields", None), tuple):
        raise TensorError(
            f"varlen_attn: return_aux is a {type(aux).__name__}; pass AuxRequest(lse=True), of "
            "torch.nn.attention.varlen"
        )
    wanted = [] if aux is None else [name for name in aux._fields if getattr(aux, name)]
    if more := [name for name in wanted if name != "lse"]:
        raise TensorError(
            f"varlen_attn: return_aux supports lse, not {more[0]}; pass stats={(*wanted,)} to "
            "attn_graph.nn.functional.attention"
        )
    return bool(wanted)


def is_whole(splits: int | None) -> bool:
    """True if no sequence's bits may depend on others. Raises TensorError for other numbers."""
    if splits is not None and to_index(splits) != 1:
        raise TensorError(
            f"varlen_attn: num_splits is {show(splits)}, but the plan decides how keys are "
            "divided; pass None, or 1 for bits that do not depend on the batch"
        )
    return splits == 1
