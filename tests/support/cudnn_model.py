"""What cuDNN's documentation says that its attention computes, on a CPU in float64.

It stands where cuDNN would run a plan: it is given tensors by number and knows of them only what
the call says, addresses and strides. So all that leads to cuDNN is tested without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from attrs import frozen

from attn_graph.lowering.cudnn.graph import CudnnCall, Slot
from attn_graph.testing import formula

Tensor = torch.Tensor
INF, NAN = float("inf"), float("nan")
ADDED = ("dSink_token", "amax_o")  # to what lies there before


@final
@frozen
class Model:
    """Runs a call on what lies where the call says."""

    call: CudnnCall

    def __call__(
        self, pack: Mapping[int, Tensor], workspace: Tensor | None, device: torch.device
    ) -> None:
        slots = {x.argument: (x, pack[n]) for n, x in enumerate(self.call.slots, start=1)}
        outputs = {x.argument for x in self.call.outputs}
        views = {name: lying(x, t) for name, (x, t) in slots.items() if not x.offsets}
        given = {name: x.double() for name, x in views.items() if name not in outputs}
        packed = {name: pair for name, pair in slots.items() if pair[0].offsets}
        for name in packed.keys() - outputs:
            given[name] = padded(*packed[name], views).double()
        for name in ("k", "v"):
            if (table := views.get(f"paged_attention_{name}_table")) is not None:
                given[name] = gathered(given[name], table)
        compute = backward if self.call.name == "sdpa_backward" else forward
        computed = compute(
            self.options, given | {"kind": torch.empty(0, dtype=self.call.inputs[0].dtype)}
        )
        for name in outputs & views.keys():
            before = views[name] if name in ADDED else 0
            views[name].copy_(before + computed[name])
        for name in outputs & packed.keys():
            write_rows(*packed[name], views, computed[name])

    @property
    def options(self) -> dict[str, float | bool | str | None]:
        return self.call.set_options


def lying(x: Slot, t: Tensor) -> Tensor:
    """The memory of a tensor as the call says that it lies."""
    assert t.dtype == x.dtype
    return t.as_strided(x.shape, x.strides)


def padded(x: Slot, t: Tensor, views: Mapping[str, Tensor]) -> Tensor:
    """A packed tensor [B,H,M,D], as tiles read it: past the end of a sequence lie other rows, of
    whatever sequence, and zeros past the end of the memory."""
    starts, (B, H, M, D) = views[x.offsets].flatten().tolist(), x.shape
    whole = torch.zeros(x.shape, dtype=t.dtype)
    room = t.untyped_storage().nbytes() // t.itemsize - t.storage_offset()
    for b in range(B):
        most = room - starts[b] - (H - 1) * x.strides[1] - (D - 1) * x.strides[3]
        n = max(0, min(M, (most + x.strides[2] - 1) // x.strides[2]))
        place = (H, n, D), x.strides[1:], t.storage_offset() + starts[b]
        whole[b, :, :n] = t.as_strided(*place)
    return whole


def gathered(pool: Tensor, table: Tensor) -> Tensor:
    """A pool [n,G,P,D] in the order of a table [B,1,pages,1]: [B,G,pages * P,D]. Every entry of the
    table is read."""
    return pool[table[:, 0, :, 0].long()].transpose(1, 2).flatten(2, 3)


def write_rows(x: Slot, t: Tensor, views: Mapping[str, Tensor], rows: Tensor) -> None:
    """Write the rows of each sequence, and no others."""
    starts, side = views[x.offsets].flatten().tolist(), x.offsets.partition("_")[0]
    for b, n in enumerate(views[f"seq_len_{side}"].flatten().tolist()):
        shape = x.shape[1], n, x.shape[3]
        t.as_strided(shape, x.strides[1:], t.storage_offset() + starts[b]).copy_(rows[b, :, :n])


Options = Mapping[str, float | bool | str | None]
Named = Mapping[str, Tensor]


def scores(options: Options, given: Named) -> Tensor:
    """s [B,H,M,N] with all that is added, -inf where masked."""
    q = given["q"]
    k = formula.per_head(given["k"], q.shape[1])
    scale = options["attn_scale"]
    assert isinstance(scale, float)
    for name in ("descale_q", "descale_k"):
        q = q * given.get(name, torch.ones(()))
    s = capped(options, scale * (q @ k.mT)) + given.get("bias", torch.zeros(()))
    i, j = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])
    if options.get("use_alibi_mask"):
        slopes = torch.tensor(formula.alibi_slopes(s.shape[1]), dtype=s.dtype)
        s = s + slopes[:, None, None] * (j - i)
    return s.masked_fill(~kept(options, given, i, j), -INF)


def capped(options: Options, s: Tensor) -> Tensor:
    cap = options.get("soft_cap")
    return cap * torch.tanh(s / cap) if isinstance(cap, float) else s


def slope(options: Options, given: Named) -> Tensor:
    """What the soft cap leaves of a gradient by the scores."""
    cap, scale = options.get("soft_cap"), options["attn_scale"]
    if not isinstance(cap, float):
        return torch.ones(())
    assert isinstance(scale, float)
    s = scale * (given["q"] @ formula.per_head(given["k"], given["q"].shape[1]).mT)
    return 1 - torch.tanh(s / cap) ** 2


def kept(options: Options, given: Named, i: Tensor, j: Tensor) -> Tensor:
    """Where both lengths and the band keep a place: [B or 1,1,M,N]."""
    M, N = len(i), len(j)
    assert ("seq_len_q" in given) == bool(options.get("use_padding_mask"))
    rows = given.get("seq_len_q", torch.full((1, 1, 1, 1), M))
    columns = given.get("seq_len_kv", torch.full((1, 1, 1, 1), N))
    keep = (i < rows) & (j < columns)
    right_end = options.get("diagonal_alignment") == "bottom_right"
    at = i + (columns - rows if right_end else torch.zeros(()))
    left, right = (options.get(f"diagonal_band_{side}_bound") for side in ("left", "right"))
    if isinstance(left, int):
        keep = keep & (j > at - left)
    if isinstance(right, int):
        keep = keep & (j <= at + right)
    return keep


def forward(options: Options, given: Named) -> dict[str, Tensor]:
    s = scores(options, given)
    sink = given.get("sink_token", torch.full((1, 1, 1, 1), -INF, dtype=s.dtype))
    lse = torch.logaddexp(s.logsumexp(-1, keepdim=True), sink.expand(*s.shape[:3], 1))
    lse = torch.where(s.isneginf().all(-1, keepdim=True) & sink.isneginf(), -INF, lse)
    rows = given.get("seq_len_q", torch.full((1, 1, 1, 1), s.shape[2]))
    lse = lse.masked_fill(torch.arange(s.shape[2])[:, None] >= rows, -INF)  # with sinks too
    p = torch.exp(s - lse.masked_fill(lse == -INF, INF))
    v = formula.per_head(given["v"], s.shape[1])
    o = p @ v if "scale_s" not in given else weighed(s, lse, v, given)
    made = {"o": o.masked_fill(keyless(given), NAN), "stats": lse.masked_fill(keyless(given), NAN)}
    made["score_max"] = torch.maximum(s.amax(-1, keepdim=True), sink)
    return made | narrowed(o, given) if "scale_o" in given else made


def weighed(s: Tensor, lse: Tensor, v: Tensor, given: Named) -> Tensor:
    """o by weights in the 8 bits of q, as a kernel has them: exp(s - max), not divided by a sum."""
    most = s.amax(-1, keepdim=True).masked_fill(s.isneginf().all(-1, keepdim=True), 0)
    kind, end = given["kind"].dtype, torch.finfo(given["kind"].dtype).max
    weights = (torch.exp(s - most) * given["scale_s"]).clamp(max=end).to(kind).double()
    shares = torch.exp(most - lse.masked_fill(lse == -INF, INF))
    return weights @ v * shares * given["descale_s"] * given["descale_v"]


def narrowed(o: Tensor, given: Named) -> dict[str, Tensor]:
    """o times its scale, ended where its 8 bits end, and the largest before."""
    scaled, end = o * given["scale_o"], torch.finfo(given["kind"].dtype).max
    ended = scaled.clamp(-end, end) if bool((given["scale_o"] != 1).any()) else scaled
    return {"o": ended, "amax_o": o.abs().amax().reshape(1, 1, 1, 1)}


def keyless(given: Named) -> Tensor:
    """Which entries have queries and no keys, where keys are packed or paged: [B,1,1,1].

    cuDNN below 9.25 gives NaN there: github.com/NVIDIA/cudnn-frontend/issues/943.
    """
    if not any(name.startswith(("kv_starts", "paged")) for name in given):
        return torch.zeros((), dtype=torch.bool)
    return (given["seq_len_q"] > 0) & (given["seq_len_kv"] == 0)


def backward(options: Options, given: Named) -> dict[str, Tensor]:
    s, lse = scores(options, given), given["stats"]
    ended = torch.arange(s.shape[2])[:, None] >= given.get("seq_len_q", torch.tensor(s.shape[2]))
    finite = lse.masked_fill((lse == -INF) | ended, INF)
    p = torch.exp(s - finite)
    q, do, G = given["q"], given["dO"], given["k"].shape[1]
    k, v = (formula.per_head(given[name], q.shape[1]) for name in "kv")
    delta = (do * given["o"]).sum(-1, keepdim=True)
    ds = p * (do @ v.mT - delta)
    scale = options["attn_scale"]
    assert isinstance(scale, float)
    inner = scale * slope(options, given) * ds
    found = {
        "dQ": inner @ k,
        "dK": per_group(inner.mT @ q, G),
        "dV": per_group(p.mT @ do, G),
    }
    if "bias" in given:
        found["dBias"] = ds.sum_to_size(given["bias"].shape)
    if "sink_token" in given:
        share = torch.exp(given["sink_token"] - finite)
        found["dSink_token"] = -(share * delta).sum((0, 2), keepdim=True)
    return found


def per_group(x: Tensor, G: int) -> Tensor:
    """[B,H,N,D] -> [B,G,N,D]: the sum over the heads that share keys."""
    B, H, *rest = x.shape
    return x.view(B, G, H // G, *rest).sum(2)
