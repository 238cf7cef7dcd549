"""What FlashAttention 4's two functions compute, in PyTorch: masks and modifiers by the text that
its kernels get, tiles by their lists, no look at places past a tile that is listed as full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from attrs import frozen

from attn_graph.lowering.fa4.dialect import in_place

Tensor = torch.Tensor
MOST = 88.7  # of which exp is finite in float32
Value = Any  # a tensor or a number


def elements(t: Tensor, places: Sequence[Value]) -> Tensor:
    """t at places that broadcast."""
    at = [x if isinstance(x, Tensor) else torch.tensor(x) for x in places]
    assert all(int(x.max()) < n for x, n in zip(at, t.shape, strict=True)), "past a tensor's end"
    return t[tuple(torch.broadcast_tensors(*at))]


def choose(c: Tensor, a: Value, b: Value) -> Tensor:
    """`torch.where` of numbers as well."""
    return torch.where(c, torch.as_tensor(a), torch.as_tensor(b))


class Math:
    """cute.math, whose functions take flags."""

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return lambda x, **_: getattr(torch, name)(x)


class Cute:
    """The module that generated code calls."""

    math = Math()


NAMES: dict[str, Any] = {
    "cute": Cute,
    "pick": choose,
    "smaller": lambda a, b: choose(a < b, a, b),
    "larger": lambda a, b: choose(a > b, a, b),
    "magnitude": torch.abs,
    "invert": torch.logical_not,
    "false_everywhere": torch.zeros_like,
    "true_everywhere": torch.ones_like,
    "as_float": lambda x: x.double(),
    "as_long": lambda x: x.long(),
    "floor_div": lambda a, b: a // b,
    "inside": lambda x, count: torch.minimum(x, count - 1).clamp(min=0),
    "between": lambda x, count: x.clamp(0, count - 1),
    "read_int": lambda t, *at: elements(t, at),
    "read_float": lambda t, *at: elements(t, at).double(),
    "read_bool": lambda t, *at: elements(t, at) != 0,
}


def function(text: str) -> Callable[..., Tensor]:
    """The function that a text defines."""
    names = dict(NAMES)
    exec(text, names)
    made: Callable[..., Tensor] = names[text.split("(")[0][4:]]
    return made


def listed(plain: Mapping[str, Any], lists: Sequence[Tensor], M: int, N: int) -> Tensor:
    """Which kind of tile each place lies in, [B or 1,H or 1,M,N]: 0 of none that is visited, 1 of
    a mixed, 2 of a full one."""
    rows, columns = plain["tile"]
    kinds = tile_kinds(lists, -(-M // rows), -(-N // columns), plain["backward"])
    return kinds.repeat_interleave(rows, 2)[:, :, :M].repeat_interleave(columns, 3)[..., :N]


def tile_kinds(lists: Sequence[Tensor], rows: int, columns: int, backward: bool) -> Tensor:
    """The same of each tile. Lists that do not ascend, or whose last axis has another stride than
    1, are errors."""
    kinds = torch.zeros(*lists[0].shape[:2], rows, columns, dtype=torch.long)
    by_line = kinds.mT if backward else kinds
    for kind, (counts, numbers) in enumerate((lists[:2], lists[2:]), start=1):
        assert numbers.stride(-1) == 1
        for at, n in enumerate(counts.flatten().tolist()):
            mine = numbers.flatten(0, 2)[at, :n].tolist()
            assert mine == sorted(set(mine))
            b, h, line = torch.unravel_index(torch.tensor(at), counts.shape)
            assert not by_line[b, h, line, mine].any(), "a tile is listed twice"
            by_line[b, h, line, mine] = kind
    return kinds


def counts(given: Mapping[str, Tensor], M: int, N: int) -> tuple[Tensor, Tensor]:
    """The rows and the keys of each batch entry, [B,1,1,1], or one number for all."""
    pairs = (("seqused_q", M), ("seqused_k", N))
    rows, keys = (
        given[n].view(-1, 1, 1, 1) if n in given else torch.tensor(count) for n, count in pairs
    )
    return rows, keys


def native(options: Mapping[str, Any], i: Tensor, j: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The places that a mask of the package's own keeps."""
    left, right = options.get("window_size_left"), options.get("window_size_right")
    right = 0 if options.get("causal") else right
    i = i + keys - rows
    kept: Tensor = i == i
    if left is not None:
        kept = kept & (j >= i - left)
    if right is not None:
        kept = kept & (j <= i + right)
    return kept


def scores(
    plain: Mapping[str, Any], given: Mapping[str, Tensor], reads: Sequence[Tensor],
    lists: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """The scores after modifiers and mask."""
    q, k = given["q"].transpose(1, 2), given["k"].transpose(1, 2)
    B, H, M, N = *q.shape[:3], k.shape[2]
    s = q @ k.repeat_interleave(H // k.shape[1], 1).mT * plain["options"]["softmax_scale"]
    b, h, i, j = (torch.arange(n).view([-1] + [1] * (3 - a)) for a, n in enumerate((B, H, M, N)))
    rows, keys = counts(given, M, N)
    rest, texts = (rows, keys, reads, plain["numbers"]), plain["texts"]
    if "change" in texts:
        told = h, i
        if (r := plain["shared"]) > 1:  # as the kernels for sm_90 say places in a gradient
            told = h * r + i % r, i // r
        s = function(texts["change"])(s, b, *in_place(*told, r), j, *rest)
    keep = native(plain["options"], i, j, rows, keys)
    if "keep" in texts:
        assert not {"causal", "window_size_left"} & {n for n, x in plain["options"].items() if x}
        keep = function(texts["keep"])(b, h, i, j, *rest)
    keep = (keep & (i < rows) & (j < keys)).expand(B, H, M, N)
    if lists:
        kinds = listed(plain, lists, M, N)
        keep = (kinds == 2) | ((kinds == 1) & keep)
    hidden: Tensor = torch.where(keep, s, -inf)
    return hidden


def attend(
    plain: Mapping[str, Any], given: Mapping[str, Tensor], reads: Sequence[Tensor],
    lists: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o [B,M,H,E], lse [B,H,M] and the largest score of each row."""
    s, sinks = scores(plain, given, reads, lists), given.get("learnable_sink")
    every = s if sinks is None else torch.cat(
        [s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1
    )  # fmt: skip
    blind = (every == -inf).all(-1)
    lse = every.masked_fill(blind[..., None], 0.0).logsumexp(-1)
    p = (s - lse[..., None]).exp().masked_fill(blind[..., None], 0.0)
    v = given["v"].transpose(1, 2)
    o = p @ v.repeat_interleave(p.shape[1] // v.shape[1], 1)
    return o.transpose(1, 2), lse.masked_fill(blind, -inf), s.amax(-1)


def spread(x: Tensor, starts: Tensor, most: int) -> Tensor:
    """Packed x [T,...] as [B,most,...]: what lies behind each start, its own or not; 0 past T."""
    at = starts[:-1, None].long() + torch.arange(most)
    rows = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return rows[at.clamp(max=len(x))]


def gather(pool: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """The rows [B,N,G,D] that a table names of a pool [n,P,G,D], 0 past a length; entries of the
    table past it are not read."""
    table, P = given["page_table"], pool.shape[1]
    assert table.dtype == torch.int32
    N = table.shape[1] * P
    _, keys = counts(given, 0, N)
    there = (torch.arange(N) < keys.view(-1, 1)).expand(len(table), N)
    pages = torch.where(there, table.long().repeat_interleave(P, 1), 0)
    rows = pool[pages, torch.arange(N) % P]
    return torch.where(there[..., None, None], rows, 0.0)


def write(room: Tensor, x: Tensor, lengths: Tensor | None, starts: Tensor | None) -> None:
    """Put x [B,L,...] where the package would: rows past a length it leaves as they are."""
    for b in range(len(x)):
        stop = x.shape[1] if lengths is None else int(lengths[b])
        to = room[b] if starts is None else room[int(starts[b]) :]
        to[:stop] = x[b, :stop]


@frozen
class Sequences:
    """Where rows and keys lie. starts, lengths: by side; most: of a sequence, by side."""

    starts: dict[str, Tensor]
    lengths: dict[str, Tensor]
    most: dict[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Sequences:
        """By the arguments of a call."""
        starts = {s: tensors[f"cu_seqlens_{s}"] for s in "qk" if f"cu_seqlens_{s}" in tensors}
        lengths = {s: x.diff() for s, x in starts.items()}
        lengths |= {s: tensors[f"seqused_{s}"] for s in "qk" if f"seqused_{s}" in tensors}
        most = {s: options[f"max_seqlen_{s}"] for s in starts}
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in starts.values())
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lengths.values())
        return cls(starts, lengths, most)

    def pad(self, name: str, x: Tensor) -> Tensor:
        """A tensor of the call as [B,L,...]; statistics as [B,H,L]."""
        side = "k" if name in ("k", "v") else "q"
        if side not in self.starts or name == "learnable_sink":
            return x
        if x.ndim == 2:
            return spread(x.mT, self.starts[side], self.most[side]).mT
        return spread(x, self.starts[side], self.most[side])

    def write(self, name: str, room: Tensor, x: Tensor) -> None:
        """Put a result [B,L,...] into a tensor of the call."""
        side = "k" if name in ("dk", "dv") else "q"
        write(room, x, self.lengths.get(side), self.starts.get(side))


def call_model(
    plain: Mapping[str, Any], tensors: Mapping[str, Tensor], reads: Sequence[Tensor],
    lists: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """In place of `call_package`."""
    for name, x in tensors.items():
        whole = x.stride(-1) == 1 and all(s * x.itemsize % 16 == 0 for s in x.stride()[:-1])
        assert whole or x.ndim < 3 or name in ("lse", "dlse"), f"{name} would be copied"
    names = [n for n in ("q", "k", "v", "learnable_sink") if n in tensors]
    leaves = {n: tensors[n].detach().double().requires_grad_() for n in names}
    sequences = Sequences.of(tensors, plain["options"])
    assert not (lists and (sequences.starts or "page_table" in tensors))
    ends = {f"seqused_{s}": x for s, x in sequences.lengths.items()}
    with torch.enable_grad():
        padded = {n: sequences.pad(n, x) for n, x in leaves.items()}
        if "page_table" in tensors:
            paged = ends | {"page_table": tensors["page_table"]}
            padded |= {n: gather(padded[n], paged) for n in "kv"}
        o, lse, top = attend(plain, padded | ends, reads, lists)
    if not plain["backward"]:
        if "learnable_sink" in leaves:  # the package adds exp(sink - top), which may be inf
            apart = leaves["learnable_sink"][:, None] - top
            lse = torch.where(top.isfinite() & (apart > MOST), inf, lse)
        sequences.write("out", tensors["out"], o.detach())
        if "lse" in tensors:
            sequences.write("lse", tensors["lse"].mT, lse.detach().mT)
        return ()
    dlse = tensors.get("dlse", torch.zeros_like(tensors["lse"])).double()
    dout = sequences.pad("dout", tensors["dout"].double())
    dlse = sequences.pad("dlse", dlse)
    rows, _ = counts(ends, dlse.shape[2], 0)
    there = torch.arange(dlse.shape[2]) < rows.squeeze(-1)  # no other row's dlse is read
    given = dict.fromkeys((o, lse)), (dout, torch.where(there, dlse, 0.0))
    wanted = [padded[n] for n in names]
    made = torch.autograd.grad([*given[0]], wanted, given[1])
    for name, x in zip("qkv", made, strict=False):
        sequences.write(f"d{name}", tensors[f"d{name}"], x)
    return tuple(x.to(tensors[n].dtype) for n, x in zip(names, made, strict=True))
