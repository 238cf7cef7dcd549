"""Packed sequences on a CPU, beside a loop by hand, a padded batch, and nested tensors; and decode
from pages, beside keys in one piece.

Seconds are those of the process, of the fastest run; run it with one thread: `taskset -c 1 python
-m benchmarks.ragged`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_graph as ag
from benchmarks.timing import save

B, H, S, D = 8, 8, 512, 64
RUNS = 9
Tensors = Sequence[torch.Tensor]
Attend = Callable[..., torch.Tensor]


@frozen
class Sequences:
    """Lengths of B sequences that fill a share of B x S, and the packed rows of q, k and v."""

    share: float
    dtype: torch.dtype
    causal: bool = True

    @property
    def lengths(self) -> list[int]:
        """Lengths from half of the mean to one and a half times it, or S."""
        mean = self.share * S
        spread = [mean * (0.5 + n / (B - 1)) for n in range(B)]
        return [min(S, round(n)) for n in spread]

    @property
    def starts(self) -> torch.Tensor:
        """starts [B+1]."""
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0).int()

    def tensors(self) -> Tensors:
        """q, k and v, [T,H,D]."""
        torch.manual_seed(0)
        return torch.randn(3, sum(self.lengths), H, D).to(self.dtype).unbind()


def attend_plan(work: Sequences, tensors: Tensors) -> Attend:
    """Ours."""
    x, starts = ag.TensorSpec.like(tensors[0]), work.starts
    mask = ag.Causal() if work.causal else None
    graph = ag.attention(x, x, x, q_starts=ag.TensorSpec.like(starts), mask=mask)
    plan: Any = ag.compile(graph, target="cpu")
    return lambda q, k, v: plan(q, k, v, starts)


def attend_in_loop(work: Sequences, tensors: Tensors) -> Attend:
    """PyTorch's fused kernel, called for one sequence after another."""

    def attend(*packed: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(work.lengths) for x in packed), strict=True)
        outputs = [fused(*(x.transpose(0, 1)[None] for x in part)) for part in parts]
        return torch.cat([o[0].transpose(0, 1) for o in outputs])

    fused = partial(sdpa, is_causal=work.causal)
    return attend


def attend_padded(work: Sequences, tensors: Tensors) -> Attend:
    """One call for all, padded to S. Padding and packing is not counted: tensors are made so."""
    leaves = [torch.zeros(B, S, H, D, dtype=work.dtype) for _ in "qkv"]
    for b, (start, n) in enumerate(zip(work.starts.tolist(), work.lengths, strict=False)):
        for leaf, x in zip(leaves, tensors, strict=True):
            leaf[b, :n] = x.detach()[start : start + n]
    q, k, v = (x.transpose(1, 2).requires_grad_(tensors[0].requires_grad) for x in leaves)
    return lambda *_: sdpa(q, k, v, is_causal=work.causal)


def attend_nested(work: Sequences, tensors: Tensors) -> Attend:
    """PyTorch's nested tensors, which on CPUs know no causal mask."""
    offsets = work.starts.long()

    def attend(*packed: torch.Tensor) -> torch.Tensor:
        nested = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in packed)
        q, k, v = (x.transpose(1, 2) for x in nested)
        return sdpa(q, k, v).transpose(1, 2).values()

    return attend


@frozen
class Cache:
    """Keys of B sequences of N rows in pages of so many, in any order. heads: of q, and of k."""

    page: int
    dtype: torch.dtype
    keys: int = 2048
    heads: tuple[int, int] = (32, 8)
    size: int = 128

    @property
    def table(self) -> torch.Tensor:
        """pages [B,N / P]: all pages of the pool."""
        torch.manual_seed(0)
        return torch.randperm(B * self.keys // self.page).view(B, -1).int()

    def tensors(self) -> Tensors:
        """q [B,H,1,D], k and v [n,P,G,D]."""
        torch.manual_seed(0)
        H, G = self.heads
        pool = torch.randn(2, B * self.keys // self.page, self.page, G, self.size).to(self.dtype)
        return torch.randn(B, H, 1, self.size).to(self.dtype), *pool.unbind()


def decode_pages(cache: Cache, tensors: Tensors) -> Attend:
    """Ours, from pages."""
    table, lengths = cache.table, torch.full((B,), cache.keys, dtype=torch.int32)
    specs = [ag.TensorSpec.like(x) for x in (*tensors, table, lengths)]
    graph = ag.attention(*specs[:3], pages=specs[3], kv_lengths=specs[4])
    plan: Any = ag.compile(graph, target="cpu")
    return lambda q, k, v: plan(q, k, v, pages=table, kv_lengths=lengths)


def decode_dense(cache: Cache, tensors: Tensors) -> Attend:
    """Ours, from keys that lie in one piece, [B,N,G,D]."""
    q, *pools = tensors
    keys = [x[cache.table.long()].flatten(1, 2).transpose(1, 2) for x in pools]
    graph = ag.attention(*(ag.TensorSpec.like(x) for x in (q, *keys)))
    plan: Any = ag.compile(graph, target="cpu")
    return lambda q, *_: plan(q, *keys)


def measure_decode(cache: Cache) -> dict[str, Any]:
    """A row of seconds."""
    tensors = cache.tensors()
    ways = {"ours": decode_pages, "dense": decode_dense}
    jobs: dict[str, Callable[[], object]] = {
        n: partial(run_pass, way(cache, tensors), tensors, False) for n, way in ways.items()
    }
    with torch.no_grad():
        times = least_seconds(jobs)
    name = f"{str(cache.dtype).removeprefix('torch.')}, decode, pages of {cache.page}"
    return {"job": name, "share": 1.0, "backward": False, "seconds": times}


def run_pass(attend: Attend, tensors: Tensors, backward: bool) -> object:
    """One call, with its gradients."""
    o = attend(*tensors)
    return o.backward(torch.ones_like(o)) if backward else o


def least_seconds(jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of each job the seconds of the process in the fastest of RUNS, all taking turns.

    Each is called once before its turn, else its caches would be those of its neighbour.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(RUNS):
        for name, job in jobs.items():
            job()
            start = time.process_time()
            job()
            times[name].append(time.process_time() - start)
    return {name: min(each) for name, each in times.items()}


def measure(work: Sequences, *, backward: bool) -> dict[str, Any]:
    """A row of seconds."""
    tensors = [x.requires_grad_(backward) for x in work.tensors()]
    ways = {"ours": attend_plan, "loop": attend_in_loop, "padded": attend_padded}
    if not work.causal and not backward:
        ways["nested"] = attend_nested
    with torch.set_grad_enabled(backward):
        jobs: dict[str, Callable[[], object]] = {
            n: partial(run_pass, way(work, tensors), tensors, backward) for n, way in ways.items()
        }
        times = least_seconds(jobs)
    name = f"{str(work.dtype).removeprefix('torch.')}, {'causal' if work.causal else 'full'}"
    return {"job": name, "share": work.share, "backward": backward, "seconds": times}


def format_row(row: dict[str, Any]) -> str:
    """Milliseconds of ours, and how many times that the others take."""
    times, side = row["seconds"], "forward and backward" if row["backward"] else "forward"
    others = (f"{n} {t / times['ours']:.2f}" for n, t in times.items() if n != "ours")
    what = f"{row['job']}, {side}, {row['share']:.0%} full"
    return f"{what}: {1e3 * times['ours']:.1f} ms; times that: {', '.join(others)}"


def main() -> None:
    """Measure all, print and save."""
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for share in (0.7, 0.2):
            for causal, backward in ((True, False), (True, True), (False, False)):
                rows.append(measure(Sequences(share, dtype, causal), backward=backward))
                print(format_row(rows[-1]), flush=True)
        for page in (1, 16, 128):
            rows.append(measure_decode(Cache(page, dtype)))
            print(format_row(rows[-1]), flush=True)
    print(save("ragged", rows))


if __name__ == "__main__":
    main()
