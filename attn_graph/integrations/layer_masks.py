"""Masks of transformers' layers as data, which are tensors to all but layers of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from attn_graph.errors import GraphError
from attn_graph.integrations.conditions import Condition, UnreadableMaskError, is_readable_now
from attn_graph.integrations.mask_functions import Frame, MaskFunction, read_mask_function
from attn_graph.machine.ambient import is_traced, neutral_state
from attn_graph.masks import Mask
from attn_graph.nn.calls import SEGMENTS
from attn_graph.nn.ops import example_of
from attn_graph.spec import INF

Tensors = dict[str, Tensor]
logger = logging.getLogger(__name__)
SAID: set[str] = set()  # reasons that were logged


class MaskDescription(Tensor):
    """A layer's mask, or none, and its tensors by the names of a graph's inputs.

    To all but layers of ours it is transformers' mask for eager attention: a tensor [B,1,M,N] with
    0 at keys that a query sees and the least number of its dtype elsewhere. A model that computes
    with it gets this tensor, made anew each time, with a line in the log.

    arguments: `eager_mask`'s. keys: the number up to the last query's token, if a layer need read
    no others. padding: its only tensor, `keep`, as numbers to add to scores, made once for all
    layers; None if each layer had better read the booleans.
    """

    mask: Mask | None
    tensors: Tensors
    arguments: Mapping[str, Any]  # Any: those of transformers
    keys: int | None
    padding: Tensor | None = None
    sized = True  # its own sizes are right; else those of the tensor are

    @classmethod
    def of(
        cls,
        mask: Mask | None,
        tensors: Tensors,
        arguments: Mapping[str, Any],  # Any: those of transformers
        keys: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> MaskDescription:
        """A mask's description, in memory one NaN. device: that of `arguments` if None."""
        B, M, N = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
        device = torch.device(arguments["device"] if device is None else device)
        dtype = arguments["dtype"]
        if torch.compiler.is_dynamo_compiling() or not is_traced():
            unread = torch.full((), torch.nan, dtype=dtype, device=device)
            made = unread.expand(B, 1, M, N).as_subclass(MaskDescription)
        else:  # by torch.export, whose tensors have no subclass
            made = describe_example((B, 1, M, N), dtype, device)
        made.mask, made.tensors, made.arguments, made.keys = mask, tensors, arguments, keys
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # of PyTorch's internals
        return f"MaskDescription(mask={self.mask}, tensors={[*self.tensors]}, keys={self.keys})"

    def contiguous(
        self, memory_format: torch.memory_format = torch.contiguous_format
    ) -> MaskDescription:
        """Itself."""
        return self

    def detach(self) -> MaskDescription:
        """Itself."""
        return self

    def to(  # type: ignore[override]  # without its overloads
        self,
        device: Any = None,  # Any: of `Tensor.to`
        *args: Any,  # Any: the same
        **kwargs: Any,  # Any: the same
    ) -> Any:  # Any: a description or a tensor
        """The description with its tensors on a device, for a model spread over several; for
        another dtype the tensor."""
        if args or "dtype" in kwargs or not isinstance(device, torch.device | str | int):
            return super().to(device, *args, **kwargs)
        moved = {name: x.to(device) for name, x in self.tensors.items()}
        return MaskDescription.of(self.mask, moved, self.arguments, self.keys, device)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],  # Any: whatever PyTorch's functions take and give
        types: Sequence[type],
        args: Sequence[Any] = (),  # Any: the same
        kwargs: Mapping[str, Any] | None = None,  # Any: the same
    ) -> Any:  # Any: the same
        kwargs = kwargs or {}
        if func in LOOKS and (func not in SIZES or args[0].sized):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (func in WRITES and isinstance(args[0], cls)) or isinstance(kwargs.get("out"), cls):
            raise GraphError(
                f"attention_mask: a model writes into a layer's mask, by {func.__name__}, which "
                "leaves no trace in it; write into a copy, attention_mask.clone()"
            )
        dense = tree_map_only(cls, dense_mask, (tuple(args), kwargs))
        return func(*dense[0], **dense[1])


@neutral_state()
def describe_example(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | int
) -> MaskDescription:
    """A description outside of a trace, of examples of its sizes."""
    unread = torch.full((), torch.nan, dtype=dtype, device=device)
    made = unread.expand([example_of(n) or 1 for n in shape]).as_subclass(MaskDescription)
    made.sized = False
    return made


LOOKS = {  # that need no element
    *(getattr(Tensor, x).__get__ for x in ("shape", "dtype", "device", "ndim", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.__len__),
}
SIZES = {Tensor.shape.__get__, Tensor.size, Tensor.__len__}  # type: ignore[attr-defined]  # of torch
WRITES = {Tensor.__setitem__}  # with all that PyTorch names so
WRITES |= {getattr(Tensor, x) for x in dir(Tensor) if x[0] != "_" and x.endswith("_")}


def decode_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,  # Any: indices and flags
    attention_mask: Tensor | None = None,
    use_vmap: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    **others: object,
) -> MaskDescription:
    """The mask interface: a mask function and padding [B, tokens] as data.

    An unreadable mask function becomes `keep`, [B,1,M,N], with one line in the log.
    use_vmap: set by transformers for functions of others. allow_is_causal_skip: True if the mask
    function is causal within each window or chunk of local_size tokens.
    """
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "use_vmap": use_vmap, "device": device,
        "dtype": dtype,
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
        return MaskDescription.of(None, {"keep": boolean_mask(arguments)}, arguments)
    tensors: Tensors = {}
    if condition.segments is not None:
        tensors |= zip(SEGMENTS, condition.segments, strict=True)
    if condition.lengths:
        tensors["kv_lengths"] = frame.lengths()
    if attention_mask is not None:
        tensors |= read_padding(attention_mask, frame)
    keys = None if kv_length == frame.N else frame.N
    described = MaskDescription.of(condition.mask, tensors, arguments, keys)
    if condition.mask is None and tensors.keys() == {"keep"}:
        described.padding = add_padding(tensors["keep"], q_length, dtype)
    return described


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


def add_padding(keep: Tensor, M: int, dtype: torch.dtype) -> Tensor | None:
    """`MaskDescription.padding`: while decoding on CPUs, whose kernel adds such numbers. In half
    precision it is slower than products, which read booleans."""
    if M > 1 or dtype not in (torch.float32, torch.float64) or not is_readable_now(keep, M):
        return None
    return torch.where(keep, 0.0, -INF).to(dtype)


def boolean_mask(arguments: Mapping[str, Any]) -> Tensor:  # Any: those of transformers
    """The boolean tensor [B,1,M,N] of transformers for SDPA."""
    mask: Tensor | None = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert mask is not None  # as where it may be skipped
    return mask


def dense_mask(described: MaskDescription) -> Tensor:
    """The tensor [B,1,M,N] of transformers for eager attention: 0, or the least number."""
    say_once("a model computes with the mask of a layer itself")
    mask: Tensor = eager_mask(**described.arguments)
    return mask.to(described.device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # of torch
def say_once(what: str) -> None:
    """Log the reason for a dense mask, once."""
    if what not in SAID:
        SAID.add(what)
        logger.warning("a mask is a tensor [B,1,M,N], not data, since %s", what)
