"""Attention as PyTorch modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack, final

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from attn_graph.errors import TensorError, binds, show
from attn_graph.ir.modifiers import Modifier
from attn_graph.layers.multihead import Attend, multi_head_attention
from attn_graph.masks import Align, Mask
from attn_graph.nn.calls import Outputs
from attn_graph.nn.functional import TOP_LEFT, attention, scaled_dot_product_attention
from attn_graph.nn.jagged import (
    jagged_problem,
    lengths_of,
    offsets_of,
    row_places,
    rows_without_holes,
)
from attn_graph.planner.arguments import CHOICE, ChoiceOptions, complete, shows
from attn_graph.printing.text import show_value
from attn_graph.spec import layout_problem

PADDED = (
    "is nested; pass torch.nested.to_padded_tensor(x, 0.0), and key_padding_mask, True past the "
    "length of each sequence"
)


def options_code(*_: object, **__: object) -> str:
    """What to write in place of other arguments of Attention, or of its call."""
    return "write layer = Attention(mask=Causal()), and layer(q, k, v), with tensors by name"


def pytorchs_module(*_: object, **__: object) -> str:
    """What to write in place of other arguments of MultiheadAttention, or of its call."""
    return "its arguments are PyTorch's; pass attn_mask= and is_causal= to the call"


@final
class Attention(torch.nn.Module):
    """`attn_graph.nn.functional.attention` with fixed options; it has no parameters.

    `forward(q, k, v, **tensors)` takes that function's tensors, and those of the mask and of
    modifiers. dropout applies in training only.
    """

    @binds(options_code)
    @shows(CHOICE)
    def __init__(
        self,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        align: Align | None = None,
        soft_cap: float | None = None,
        alibi: bool = False,
        dropout: float = 0.0,
        stats: bool | Sequence[str] = False,
        max_lengths: tuple[int | None, int | None] | None = None,
        finite_pages: bool = False,
        all_rows: bool = False,
        modifiers: Sequence[Modifier | Mask] = (),
        **choice: Unpack[ChoiceOptions],
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {  # Any: a value for each
            "mask": mask, "scale": scale, "align": align, "soft_cap": soft_cap,
            "alibi": None if alibi is False else alibi, "dropout": dropout, "stats": stats,
            "max_lengths": max_lengths, "finite_pages": finite_pages,
            "all_rows": all_rows, "modifiers": modifiers,
            **complete(Attention, CHOICE, choice),
        }  # fmt: skip

    @binds(options_code)
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **tensors: Any) -> Outputs:  # Any: or two
        """q [B,H,M,D], k [B,G,N,D], v [B,G,N,E] -> o [B,H,M,E], and the statistics."""
        options = self.options if self.training else {**self.options, "dropout": 0.0}
        return attention(q, k, v, **(options | tensors))

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        usual = (None, False, 0.0, (), "ignore")
        return ", ".join(f"{n}={show_value(x)}" for n, x in self.options.items() if x not in usual)


@final
class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, parameter for parameter, with attention by plans.

    It loads state dicts of PyTorch's module, and its arguments mean the same. Pass
    need_weights=False: with need_weights=True, PyTorch's default, the call stays PyTorch's own,
    since no fused kernel has the weights [B,H,M,N]. Jagged tensors [B,lengths,E] run too. Dropout
    drops other places than PyTorch, by seeds from the default generator. In eval mode without
    gradient PyTorch's Transformer layers fuse a whole layer and bypass the module;
    `attn_graph.replace_sdpa` covers those.
    """

    __init__ = binds(pytorchs_module)(torch.nn.MultiheadAttention.__init__)

    @binds(pytorchs_module)
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, laid out like query, and the weights or None. Arguments as PyTorch's.

        Jagged tensors [B,lengths,E], which PyTorch's module refuses, take is_causal=True without a
        mask. Raises AssertionError, RuntimeError and TensorError as PyTorch's module and function
        do, and TensorError for sparse tensors.
        """
        if any(x.is_nested and x.layout == torch.jagged for x in (query, key, value)):
            self.require_jagged(query, key, value, need_weights, key_padding_mask, attn_mask)
            places = row_places(query, key, axis=1)
            q = rows_without_holes(query)
            k = q if key is query else rows_without_holes(key)
            v = k if value is key else rows_without_holes(value)
            attend = partial(attend_jagged_rows, places, TOP_LEFT if is_causal else None)
            o = self.project(attend, q, k, v)
            return nested_tensor_from_jagged(o, offsets_of(query), lengths_of(query)), None
        nested = any(x.is_nested and x.layout == torch.strided for x in (query, key, value))
        if not nested:  # PyTorch supports those if it fuses the layer
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            require_dense(query=query, key=key, value=value, **masks)
        if need_weights or nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        turned = self.batch_first and query.ndim == 3
        if turned:  # one tensor stays one tensor
            q = query.transpose(0, 1)
            k = q if key is query else key.transpose(0, 1)
            query, key, value = q, k, k if value is key else value.transpose(0, 1)
        o = self.project(
            scaled_dot_product_attention, query, key, value, key_padding_mask, attn_mask, is_causal
        )
        return (o.transpose(0, 1) if turned else o), None

    def project(
        self,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The output of `attend` between the projections. query [M,B,E], or without B."""
        o, _ = multi_head_attention(
            attend,
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            use_separate_proj_weight=not self._qkv_same_embed_dim,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            is_causal=is_causal,
        )
        return o

    def require_jagged(
        self, query: Tensor, key: Tensor, value: Tensor, weights: bool, *masks: Tensor | None
    ) -> None:
        """Raise TensorError for what does not fit jagged tensors."""
        problem = jagged_problem(query, key, value, axis=1)
        if not problem and (weights or not self.batch_first):
            wrong = "need_weights=True" if weights else "batch_first=False"
            problem = f"{wrong} does not fit nested tensors; pass the other value"
        if not problem and masks != (None, None):
            problem = (
                "a mask tensor does not fit nested tensors, which have lengths of their own; leave "
                "it out, and pass is_causal=True for a causal mask"
            )
        if not problem and (self.bias_k is not None or self.add_zero_attn):
            problem = "add_bias_kv and add_zero_attn do not fit nested tensors; build without them"
        if problem:
            raise TensorError(f"MultiheadAttention: {problem}")


def attend_jagged_rows(
    places: Mapping[str, Tensor],
    mask: Mask | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _: Tensor | None,
    dropout: float,
    is_causal: bool,
) -> Tensor:
    """Attention of the packed rows of jagged tensors: q [1,H,T,D] -> o [1,H,T,E].

    mask: stands in for those of `Attend`, which are none.
    """
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    given: dict[str, Any] = {"mask": mask, "dropout": dropout, **places}  # Any: as of `attention`
    o = attention(*rows, **given)
    assert isinstance(o, Tensor)
    return o.transpose(0, 1)[None]


def require_dense(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if not (x is None or isinstance(x, Tensor)):
            raise TensorError(
                f"MultiheadAttention: {name} is {show(x)}, not a tensor; write is_causal=True, "
                "attn_mask=tensor or key_padding_mask=tensor"
            )
        if isinstance(x, Tensor) and (problem := layout_problem(x)):
            told = PADDED if x.is_nested else problem
            raise TensorError(f"MultiheadAttention: {name} {told}")
