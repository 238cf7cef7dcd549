"""A whole model's attention by plans, without a change of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Unpack, final
from warnings import warn_explicit

import torch
import torch.nn.functional as F
from attrs import define, field
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attn_graph.errors import (
    TORCH,
    FallbackWarning,
    NoBackendError,
    TensorError,
    binds,
    user_frame,
)
from attn_graph.layers.multihead import multi_head_attention
from attn_graph.layers.recognition import Readings, Recognition
from attn_graph.layers.report import Report, Result, Usage
from attn_graph.machine.ambient import is_traced
from attn_graph.machine.tensors import ROLES
from attn_graph.nn.calls import Options, plain_option
from attn_graph.nn.checkpoints import follow_checkpoint
from attn_graph.nn.functional import (
    TOP_LEFT,
    Kept,
    attend_like_torch,
    plan_like_torch,
    read_mask,
)
from attn_graph.nn.jagged import jagged_problem
from attn_graph.planner.arguments import CHOICE, ChoiceOptions, complete, shows

NEED_WEIGHTS = 15  # its place among the arguments of F.multi_head_attention_forward
VARLEN = "torch_attn::_varlen_attn"  # the operator of torch.nn.attention.varlen
PACKED_ROWS = "it has packed rows; attn_graph.nn.varlen_attn takes the same arguments"
WEIGHTS = (
    "need_weights=True returns the weights, but fused kernels never store them; if nobody reads "
    "them, replace_sdpa(weights=False) gives None in their place"
)
FLEX = "flex_attention stays PyTorch's: attn_graph.integrations.from_flex translates its mods"
DEVICES = ("cpu", "cuda")
ON_FALLBACK = [*CHOICE].index("on_fallback")


@shows(CHOICE)
@contextmanager
@binds(lambda *_, **__: "write with replace_sdpa(): around the call of a model")
def replace_sdpa(
    *,
    recognize_masks: bool = False,
    weights: bool = True,
    report: bool = False,
    **options: Unpack[ChoiceOptions],
) -> Iterator[Report | None]:
    """Within this block, in this thread, plans compute PyTorch's attention.

    This replaces `torch.nn.functional.scaled_dot_product_attention`, under any imported name, and
    `multi_head_attention_forward`, the function behind `torch.nn.MultiheadAttention` and the
    Transformer layers, also in compiled regions that run in the block. torch.utils.checkpoint
    recomputes by plans, in the block or after it; with use_reentrant=True by PyTorch's attention,
    so dropout there raises TensorError. It also works as a decorator.

    Options are those of `attn_graph.compile`. PyTorch still computes calls that no backend
    supports, nested tensors other than jagged ones [B,H,j,D], wrapper subclasses such as DTensor,
    devices other than "cpu" and "cuda", layers that return weights (need_weights=True), and
    `varlen_attn` (call `attn_graph.nn.varlen_attn`), and flex_attention (`from_flex` translates its
    mods), of which on_fallback="warn" says nothing.
    on_fallback applies to these, and to calls that only `math` supports: "ignore"; "warn"; or
    "raise", TensorError or NoBackendError.

    recognize_masks: read dense masks, and run a band, a prefix, documents or a padding at the end
    as masks of positions, segments and lengths; not in compiled regions. The host waits for each
    mask. The block keeps copies of the last few; a mask equal to its copy is not read again.
    weights: with False layers give None in place of weights, need_weights=True or not, and plans
    compute them: for code that leaves the weights unread, as `o, _ = layer(x, x, x)` does.
    report: `as` gives a `Report`, a table of the calls outside compiled regions.

    Meanwhile PyTorch's fused Transformer layers, which would bypass this, are off in the whole
    process. Raises the errors of `attn_graph.nn.functional.scaled_dot_product_attention`.
    """
    choice = tuple(map(plain_option, complete(replace_sdpa, CHOICE, options).values()))
    table = Report() if report else None
    with PASSING_BY.off(), Replacement(choice, recognize_masks, weights, table):
        yield table


@final
@define(eq=False)
class FusedLayers:
    """PyTorch's switch of its fused Transformer layers, off while any block is open."""

    blocks: int = field(default=0, init=False)
    before: bool = field(default=True, init=False)
    lock: threading.Lock = field(factory=threading.Lock, init=False)

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which they are off. The last of several to end restores the switch."""
        switch = torch.backends.mha
        with self.lock:
            if not self.blocks:
                self.before = switch.get_fastpath_enabled()
                switch.set_fastpath_enabled(False)
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if not self.blocks:
                    switch.set_fastpath_enabled(self.before)


PASSING_BY = FusedLayers()


@final
class Arguments(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@final
class Replacement(TorchFunctionMode):
    """The mode behind `replace_sdpa`; `choice` are values for CHOICE."""

    def __init__(
        self, choice: Options, recognizes: bool, weights: bool, report: Report | None
    ) -> None:
        super().__init__()
        self.choice = choice
        self.recognizes = recognizes
        self.weights = weights
        self.readings = Readings()
        self.report = report

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: whatever PyTorch's functions return
        types: Sequence[type],
        args: tuple[Any, ...] = (),  # Any: and take
        kwargs: dict[str, Any] | None = None,  # Any: as above
    ) -> Any:  # Any: as above
        """The two functions by plans, and every other one unchanged."""
        named = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend("scaled_dot_product_attention", Arguments(*args, **named))
        if func is F.multi_head_attention_forward:
            return self.attend_by_heads(args, named)
        if isinstance(func, OpOverloadPacket) and func._qualified_op_name == VARLEN:
            run = partial(func, *args, **named)
            return self.run_left("varlen_attn", PACKED_ROWS, args[:3], run)
        if func is flex_attention:  # in traced code, always: PyTorch compiles it by itself
            if self.choice[ON_FALLBACK] == "raise":
                raise RuntimeError(FLEX)
            if self.report is not None:
                self.report.meets_flex = True  # a count would compile anew at each call
        return func(*args, **named)

    def attend_by_heads(
        self,
        args: tuple[Any, ...],  # Any: positional arguments of PyTorch's function
        named: dict[str, Any],  # Any: and by name
    ) -> tuple[Tensor, Tensor | None]:
        """`F.multi_head_attention_forward` with its attention replaced."""
        name, query = "multi_head_attention_forward", args[0] if args else named["query"]
        if not self.weights and len(args) > NEED_WEIGHTS:
            args = (*args[:NEED_WEIGHTS], False, *args[NEED_WEIGHTS + 1 :])
        elif not self.weights:
            named = {**named, "need_weights": False}
        more = args[NEED_WEIGHTS:]
        needs = more[0] if more else named.get("need_weights", True)
        reason = WEIGHTS if needs else why_left(query, query, query)
        if reason is None:
            return multi_head_attention(
                lambda *given: self.attend(name, Arguments(*given)), *args, **named
            )
        key, value = (args[n] if len(args) > n else named[r] for n, r in enumerate(ROLES[1:], 1))
        run = partial(F.multi_head_attention_forward, *args, **named)
        return self.run_left(name, reason, (query, key, value), run)

    def run_left(
        self, name: str, reason: str, tensors: Sequence[Tensor], run: Callable[[], Result]
    ) -> Result:
        """A call left to PyTorch, by `on_fallback`; a row of the report. tensors: q, k, v."""
        q, k, v = tensors
        self.leave(name, reason)
        if self.report is None or is_symbolic():
            return run()
        usage = Usage.of(name, q, k, v, "", None, (reason,))
        return self.report.time(usage, q.device, run)

    def attend(self, name: str, a: Arguments) -> Tensor:
        """Attention by a plan, or by PyTorch; added to the report, if any.

        name: of PyTorch's function in the call.
        """
        if not torch.compiler.is_compiling():
            follow_checkpoint(self, a.dropout_p)
        reason, kept = why_left(a.query, a.key, a.value), read_mask(a.attn_mask, a.is_causal)
        recognition = None
        if self.recognizes and a.attn_mask is not None and not is_symbolic() and not reason:
            recognition = recognize_for(a, self.readings)
            kept = kept if recognition is None else as_kept(recognition, a)
        run = partial(self.compute, name, a, kept, reason)
        if self.report is None or is_symbolic():
            return run()
        plan = None
        reasons: tuple[str, ...] = (reason,) if reason else ()
        if not reason:
            try:
                plan = plan_like_torch(*self.planned_arguments(a, kept))
            except NoBackendError as error:
                reasons = tuple(f"{who} {each}" for who, all_ in error.refusals for each in all_)
        usage = Usage.of(name, *a[:3], describe_mask(a, recognition), plan, reasons)
        return self.report.time(usage, a.query.device, run)

    def compute(self, name: str, a: Arguments, kept: Kept, reason: str | None) -> Tensor:
        """Attention by a plan, or by PyTorch for a reason or if no backend supports it."""
        if reason is None:
            try:
                return attend_like_torch(*self.planned_arguments(a, kept))
            except NoBackendError:
                if self.choice[ON_FALLBACK] == "raise":
                    raise
                reason = "no backend supports it"
        self.leave(name, reason)
        return F.scaled_dot_product_attention(*a[:6], scale=a.scale, enable_gqa=a.enable_gqa)

    def planned_arguments(self, a: Arguments, kept: Kept) -> tuple[Any, ...]:  # Any: one of each
        return *a[:3], kept, a.dropout_p, a.scale, a.enable_gqa, self.choice

    def leave(self, name: str, reason: str) -> None:
        """Warn or raise that PyTorch computes a call itself, by `on_fallback`."""
        text = f"{name} stays PyTorch's: {reason}"
        if self.choice[ON_FALLBACK] == "raise":
            raise TensorError(f'{text}; and on_fallback is "raise"')
        if self.choice[ON_FALLBACK] == "warn":
            warn_explicit(text, FallbackWarning, *user_frame(TORCH))


def is_symbolic() -> bool:
    """True in a traced or compiled call: its tensors have no values to read."""
    return torch.compiler.is_compiling() or is_traced()


def why_left(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why PyTorch computes attention on these tensors itself; None if plans do."""
    nested = True in (q.is_nested, k.is_nested, v.is_nested)
    if nested and (problem := jagged_problem(q, k, v)):
        return f"nested tensors: {problem}"
    for t in (q, k, v):
        if not nested and is_traceable_wrapper_subclass(t):
            return f"{type(t).__name__} wraps other tensors"
        if t.device.type not in DEVICES:
            return f"tensors on {t.device.type}"
    return None


def recognize_for(a: Arguments, readings: Readings) -> Recognition | None:
    """The dense mask of a call as data; None if it is not, or if batches differ."""
    q, k, v, mask = a[:4]
    assert mask is not None
    if not q.ndim == k.ndim == v.ndim == 4 or not len(q) == len(k) == len(v):
        return None
    M, N = q.shape[2], k.shape[2]
    if mask.ndim < 2 or mask.shape[-1] != N or (mask.shape[-2] != 1 and mask.shape[-2] != M):
        return None
    return readings.recognize(mask.expand(*mask.shape[:-2], M, N))


def as_kept(recognition: Recognition, a: Arguments) -> Kept:
    """The mask of positions, lengths and documents, with is_causal."""
    masks = [m for m in (recognition.mask, TOP_LEFT if a.is_causal else None) if m is not None]
    mask = masks[0] & masks[1] if len(masks) == 2 else next(iter(masks), None)
    documents, lengths = recognition.segments, recognition.kv_lengths
    known = {"kv_lengths": lengths, "q_segments": documents, "kv_segments": documents}
    B = len(a.query)
    return mask, {
        name: x if len(x) == B else x.expand(B, *x.shape[1:])
        for name, x in known.items()
        if x is not None
    }


def describe_mask(a: Arguments, recognition: Recognition | None) -> str:
    """The mask of a call in words, and its recognised equivalent."""
    parts = ["is_causal"] if a.is_causal else []
    if a.attn_mask is not None:
        dense = f"{'keep' if a.attn_mask.dtype == torch.bool else 'bias'} {[*a.attn_mask.shape]}"
        parts += [f"{dense}, recognised as {recognition}" if recognition else dense]
    return " and ".join(parts) or "none"
