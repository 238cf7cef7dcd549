"""A layer's attention: its graph, its plans, its part in a step. Imports nothing of vLLM."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from attn_graph.compiler import compile as compile_graph
from attn_graph.integrations.vllm.steps import Call, Capacity, ServingStep
from attn_graph.ir.builder import attention
from attn_graph.ir.graph import Graph
from attn_graph.masks import Causal, Mask, Window
from attn_graph.nn.appending import write_rows
from attn_graph.plan import Plan
from attn_graph.spec import TensorSpec
from attn_graph.spec.dims import Dim

SEQUENCES, TOKENS = "sequences", "tokens"  # sizes of a step, by name
FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}  # by vLLM's names
Slopes = tuple[float, ...] | None
Scales = tuple[Tensor, Tensor]  # one number each, of k and of v


@final
@frozen
class Kind:
    """What layers with one plan have in common.

    H, G, D: heads of queries, of keys, and their size. window: the keys seen by a query, its own
    among them; None for all. encodes: True if there is no cache, and queries see later keys.
    """

    H: int
    G: int
    D: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: Slopes = None
    sinks: bool = False
    encodes: bool = False
    kv_cache_dtype: str = "auto"

    def mask(self, causal: bool) -> Mask | None:
        """The mask. Without `causal` a window reaches as far to both sides."""
        back = None if self.window is None else self.window - 1
        if not causal:
            return None if back is None else Window(back, back, "bottom_right")
        return Causal("bottom_right") if back is None else Window(back, 0, "bottom_right")

    def graph(
        self, causal: bool, room: Capacity, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None
    ) -> Graph:
        """The attention of a step, for any numbers of tokens and sequences up to `room`. q
        [T,H,D]; k and v: pools, or packed [T,G,D] without a table."""
        B, T = Dim(SEQUENCES, room.sequences), Dim(TOKENS, room.tokens)
        sized = [TensorSpec((T, *x.shape[1:]), x.dtype, x.stride()) for x in (q, k, v)]
        ints, options = torch.int32, dict[str, Any]()
        if table is None:
            options["kv_starts"] = TensorSpec((B + 1,), ints)
            options["max_lengths"] = (room.tokens, room.tokens)
        else:
            sized[1:] = TensorSpec.like(k), TensorSpec.like(v)
            options["pages"] = TensorSpec((B, table.shape[1]), ints)
            options["kv_lengths"] = TensorSpec((B,), ints)
            options["max_lengths"] = (room.tokens, None)
        if self.slopes is not None:
            options.update(alibi=TensorSpec((self.H,), torch.float32), align="bottom_right")
        if self.sinks:
            options["sinks"] = TensorSpec((self.H,), q.dtype)
        if self.kv_cache_dtype in FLOAT8:
            one = TensorSpec((1, 1, 1, 1), torch.float32)
            options.update(k_scale=one, v_scale=one)
        starts = TensorSpec((B + 1,), ints)
        return attention(
            *sized, mask=self.mask(causal), scale=self.scale, soft_cap=self.soft_cap,
            q_starts=starts, **options,
        )  # fmt: skip


@final
@define(eq=False)
class ServedLayer:
    """One layer, in all steps. sinks [H]: one more logit of each head. plans: by all a call
    depends on apart from sizes. cache, pools: the last cache, and its k and v."""

    kind: Kind
    room: Capacity
    sinks: Tensor | None = None
    plans: dict[tuple[object, ...], Plan] = field(init=False, factory=dict)
    cache: Tensor | None = field(init=False, default=None)
    pools: tuple[Tensor, Tensor] = field(init=False)

    def split(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """`split_cache`, remembered."""
        if self.cache is not cache:
            self.cache, self.pools = cache, split_cache(cache, self.kind.kv_cache_dtype)
        return self.pools

    def append(
        self, step: ServingStep, k: Tensor, v: Tensor, cache: Tensor, scales: Scales
    ) -> None:
        """Write the keys and values of a step's tokens, the first of k and v [T,G,D]."""
        assert step.cells is not None
        for pool, x, scale in zip(self.split(cache), (k, v), scales, strict=True):
            write_rows(pool, step.cells, x[: step.tokens], scale)

    def attend(
        self, step: ServingStep, q: Tensor, k: Tensor, v: Tensor, cache: Tensor | None, out: Tensor,
        scales: Scales,
    ) -> None:  # fmt: skip
        """Write o to the first rows of out [T,H,D]. cache: to be read; None: k and v
        [T,G,D] are."""
        n = step.tokens
        q, out = q[:n], out[:n]
        pair = (k[:n], v[:n]) if cache is None else self.split(cache)
        plan = self.plans.get((step.causal, q.stride()))
        if plan is None:
            plan = self.plan(step, q, *pair)
        call = step.calls.get((plan, self.kind.slopes))
        if call is None:
            call = self.prepare(step, plan)
        more = () if self.sinks is None else (self.sinks,)
        if self.kind.kv_cache_dtype in FLOAT8:
            more = *more, *(x.view(1, 1, 1, 1) for x in scales)
        call(q, *pair, *more, out=out)

    def plan(self, step: ServingStep, q: Tensor, k: Tensor, v: Tensor) -> Plan:
        graph = self.kind.graph(step.causal, self.room, q, k, v, step.table)
        plan = self.plans[step.causal, q.stride()] = compile_graph(graph)
        return plan

    def prepare(self, step: ServingStep, plan: Plan) -> Call:
        """The plan with a step's tensors, for all layers with it and the same slopes."""
        given = {"q_starts": step.starts}
        if step.table is None:
            given["kv_starts"] = step.starts
        else:
            given.update(pages=step.table, kv_lengths=step.lengths)
        if self.kind.slopes is not None:
            given["alibi"] = torch.tensor(self.kind.slopes, device=step.starts.device)
        call = step.calls[plan, self.kind.slopes] = plan.prepare(**given)
        return call


def split_cache(cache: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor]:
    """k and v [n,P,G,D], views of a cache [n,G,P,2D] in any memory order: K, then V in each row.
    Where a head's rows lie beside each other, all of K is before all of V: CPUs read these at once.
    """
    if kv_cache_dtype in FLOAT8:
        cache = cache.view(FLOAT8[kv_cache_dtype])
    D = cache.shape[-1] // 2
    if cache.stride(2) == cache.shape[-1]:
        k, v = cache.flatten(2).unflatten(2, (2, cache.shape[2], D)).unbind(2)
    else:
        k, v = cache.split(D, -1)
    return k.transpose(1, 2), v.transpose(1, 2)
