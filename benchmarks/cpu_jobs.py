"""The jobs of `benchmarks/cpu.py` as data: what is computed, on which sizes, and the goal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import accumulate
from operator import and_
from typing import Any

import torch
from attrs import evolve, frozen

import attn_graph as ag

Sizes = tuple[int, int, int, int]
Operands = dict[str, torch.Tensor]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BEST = "best"  # beside the best peer, where a goal names none
LEAST = 0.97  # of the best peer's speed, where a row has no goal of its own
SHAPES: tuple[Sizes, ...] = (
    (4, 12, 1024, 64),
    (1, 8, 4096, 64),
    (1, 8, 2048, 128),
    (8, 12, 256, 64),
)
MIDDLE: tuple[Sizes, ...] = ((4, 12, 512, 64), (8, 12, 384, 64))  # of which the kernel hides half
SHORT: tuple[Sizes, ...] = ((64, 4, 64, 32), (16, 12, 128, 64), (8, 12, 256, 64), (2, 16, 197, 64))
DECODE = (  # B, H, G, N, D of one query for each sequence
    (1, 32, 8, 1024, 128),
    (1, 32, 8, 8192, 128),
    (1, 32, 1, 2048, 128),
    (1, 16, 16, 8192, 128),
    (8, 12, 12, 1024, 64),
)
DOCUMENTS = (700, 40, 512, 133, 350, 90, 620, 257, 64, 480, 175, 675)  # positions, of 4096


@frozen
class Job:
    """One attention on random tensors, with the goal of our speed beside a peer's."""

    title: str
    dtype: torch.dtype
    sizes: Sizes  # B, H, M, D
    key_heads: int | None = None  # G, by default H
    keys: int | None = None  # N, by default M
    value_size: int | None = None  # E, by default D
    causal: bool = False
    prefix: int = 0  # the first keys, which all queries see
    left: int | None = None  # how many positions before its own a query sees
    documents: tuple[int, ...] = ()  # lengths, one after the other, the same in each sequence
    lengths: tuple[int, ...] = ()  # keys of each sequence
    keep: bool = False  # a random mask [B,1,M,N]
    block: int = 0  # queries and keys of a block; a random table keeps one of ten
    alibi: bool = False
    bias: bool = False  # [1,H,M,N], with a gradient
    reach: int = 0  # distances in a trained table [H, 2 reach + 1], which others gather to a bias
    soft_cap: float | None = None
    strided: bool = False  # q's last axis is not contiguous
    expanded: bool = False  # the cotangent is that of `o.sum()`, one number for all
    backward: bool = False
    goal: float = LEAST
    beside: str = BEST

    @property
    def G(self) -> int:
        """Heads of k and v."""
        return self.key_heads or self.sizes[1]

    @property
    def r(self) -> int:
        """Query heads of each key head."""
        return self.sizes[1] // self.G

    @property
    def N(self) -> int:
        """Keys."""
        return self.keys or self.sizes[2]

    @property
    def before(self) -> int:
        """Keys before the position of the first query: the last query is at the last key."""
        return self.N - self.sizes[2]

    @property
    def E(self) -> int:
        """Head size of v."""
        return self.value_size or self.sizes[3]

    @property
    def name(self) -> str:
        """What its rows are called."""
        return f"{str(self.dtype)[6:]} {self.title} {self.sizes}"

    @property
    def is_masked(self) -> bool:
        """Whether some places may be hidden."""
        return bool(
            self.causal
            or self.left is not None
            or self.documents
            or self.lengths
            or self.keep
            or self.block
        )

    @property
    def is_plain(self) -> bool:
        """Whether nothing happens between the scores and the softmax."""
        return not (self.is_masked or self.alibi or self.is_biased or self.soft_cap)

    @property
    def is_biased(self) -> bool:
        """Whether others add a bias, with a gradient, to the scores."""
        return self.bias or self.reach > 0

    @property
    def is_foldable(self) -> bool:
        """Whether query heads that share a key head may be taken for rows of one head."""
        rows_differ = self.causal or self.left is not None or self.documents or self.keep
        return not (rows_differ or self.block or self.alibi or self.is_biased)


def plain_jobs() -> Iterator[Job]:
    """What PyTorch's kernel takes as it is: ours must not be slower."""
    for sizes in SHAPES:
        for causal in (False, True):
            job = Job("causal" if causal else "full", F32, sizes, causal=causal)
            yield job
            yield evolve(job, backward=True, goal=0.95)
    for sizes in MIDDLE:
        job = Job("causal", F32, sizes, causal=True)
        yield job
        yield evolve(job, backward=True)


def half_jobs() -> Iterator[Job]:
    """The same in float16 and bfloat16."""
    for dtype in (F16, BF16):
        for sizes in SHAPES:
            for causal in (False, True):
                yield Job("causal" if causal else "full", dtype, sizes, causal=causal)
    slow = "bf16" not in ag.Target.of("cpu").native
    for dtype in (F16, BF16):
        job = Job("causal", dtype, (1, 8, 1024, 128), causal=True, backward=True)
        yield evolve(job, goal=8.0, beside="sdpa") if dtype == BF16 and slow else job
        yield evolve(job, title="causal, sum() as loss", expanded=True)


def window_jobs() -> Iterator[Job]:
    """Masks that PyTorch takes only as a dense tensor."""
    for left, goal in ((64, 12.0), (255, 7.5)):
        job = Job(f"causal & window {left}", F32, (1, 4, 4096, 64), causal=True, left=left)
        yield from both_passes(job, goal, "sdpa")
    job = Job("segments of 256", F32, (1, 4, 4096, 64), documents=(256,) * 16)
    yield from both_passes(job, 6.0, "sdpa")


def odd_jobs() -> Iterator[Job]:
    """What PyTorch's fused kernel does not take."""
    job = Job("causal D=128, E=64", F32, (4, 12, 1024, 128), value_size=64, causal=True)
    yield from both_passes(job, 2.6, "sdpa")
    title = "causal, q strided along its last axis"
    yield Job(title, F32, SHAPES[0], causal=True, strided=True, goal=4.0, beside="sdpa")
    job = Job("causal soft cap", F32, SHAPES[0], causal=True, soft_cap=30.0)
    for backward in (False, True):
        yield evolve(job, goal=3.0, beside="formula", backward=backward)


def decode_jobs() -> Iterator[Job]:
    """One query a sequence: reading keys and values is all there is."""
    for B, H, G, N, D in DECODE:
        over = f"{H} heads over {G}" if G < H else f"{H} heads"
        for dtype in (F32, BF16, F16):
            yield Job(f"decode, {over}, {N} keys", dtype, (B, H, 1, D), key_heads=G, keys=N)
    title = "decode, 32 heads over 8, 32768 keys"
    yield Job(title, F16, (1, 32, 1, 128), key_heads=8, keys=32768)
    lengths = (128, 100, 77, 64, 50, 33, 17, 5)
    cache = (2048, 1900, 1500, 1200, 1000, 800, 600, 300)
    for dtype in (F32, BF16):
        yield Job("decode, key lengths of 128", dtype, (8, 8, 1, 64), keys=128, lengths=lengths)
        job = Job("decode, key lengths of 2048", dtype, (8, 32, 1, 64), key_heads=8, keys=2048)
        yield evolve(job, lengths=cache)
        job = Job("decode, a tenth of 8192 keys", dtype, (1, 32, 1, 128), key_heads=8, keys=8192)
        yield evolve(job, lengths=(819,))
        job = evolve(job, title="decode of 4 queries, causal, 512 keys", sizes=(8, 32, 4, 64))
        yield evolve(job, keys=512, causal=True)


def short_jobs() -> Iterator[Job]:
    """Many short sequences, without those that other groups have, and as a batch is padded."""
    have = {(job.name, job.backward) for group in (plain_jobs, half_jobs) for job in group()}
    for sizes in SHORT:
        for dtype in (F32, BF16):
            for backward in (False, True):
                job = Job("full", dtype, sizes, backward=backward)
                if (job.name, job.backward) not in have:
                    yield job
    for dtype in (F32, BF16):
        job = Job("random mask", dtype, (32, 12, 128, 64))
        yield from both_passes(evolve(job, keep=True))
        yield from both_passes(
            evolve(job, title="key lengths of 128", lengths=(*range(4, 132, 4),))
        )


def mixed_jobs() -> Iterator[Job]:
    """Masks and modifiers that leave tiles neither full nor empty."""
    job = Job("causal", F32, SHAPES[0], causal=True)
    yield from both_passes(evolve(job, title="causal ALiBi", sizes=(4, 8, 1024, 64), alibi=True))
    yield from both_passes(evolve(job, title="causal | prefix 300", prefix=300))
    yield from both_passes(Job("random mask", F32, (2, 12, 1024, 64), keep=True))
    lengths = (1024, 700, 512, 300)
    yield from both_passes(evolve(job, title="causal & key lengths", lengths=lengths))
    yield evolve(job, title="causal soft cap", dtype=BF16, soft_cap=30.0)
    yield Job("bias with a gradient", F32, (8, 16, 197, 64), bias=True, backward=True)
    table = Job("table of distances", F32, (2, 8, 1024, 64), reach=128)
    yield from (table, evolve(table, backward=True, goal=1.2))


def document_jobs() -> Iterator[Job]:
    """Documents of 40 to 700 positions in one sequence."""
    for causal in (False, True):
        title = f"{'causal' if causal else 'full'} in documents of 40 to 700"
        job = Job(title, F32, (1, 8, 4096, 64), causal=causal, documents=DOCUMENTS)
        yield from both_passes(job)


def selected_jobs() -> Iterator[Job]:
    """Blocks of 64 keys, of which each block of 64 queries sees one of ten."""
    job = Job("one of ten blocks of 64", F32, (1, 4, 16384, 64), key_heads=1, block=64)
    yield from both_passes(job, goal=5.0, beside="sdpa")


def both_passes(job: Job, goal: float = LEAST, beside: str = BEST) -> Iterator[Job]:
    """The job forward, with this goal, and forward and backward, with the usual one."""
    yield evolve(job, goal=goal, beside=beside)
    yield evolve(job, backward=True)


GROUPS = {
    "plain": plain_jobs,
    "half": half_jobs,
    "window": window_jobs,
    "odd": odd_jobs,
    "decode": decode_jobs,
    "short": short_jobs,
    "mixed": mixed_jobs,
    "documents": document_jobs,
    "selected": selected_jobs,
}


def shrink_job(job: Job) -> Job:
    """The same job on few positions, heads and features: to try it, not to time it."""
    B, _, M, D = job.sizes
    G, N = min(job.G, 2), 24
    return evolve(
        job,
        sizes=(min(B, 2), job.r * G, M if M < job.N else N, 8),
        key_heads=G,
        keys=N,
        value_size=8 if job.E == D else 4,
        prefix=job.prefix and 9,
        left=None if job.left is None else 5,
        documents=job.documents and (7, 1, 16),
        lengths=job.lengths and (N, 5)[: min(B, 2)],
        block=job.block and 5,
    )


def make_operands(job: Job) -> Operands:
    """q, k and v, and what else the graph reads, by name; floats are to have a gradient."""
    torch.manual_seed(0)
    (B, H, M, D), G, N = job.sizes, job.G, job.N
    shapes: dict[str, tuple[int, ...]] = {
        "q": (B, H, M, D),
        "k": (B, G, N, D),
        "v": (B, G, N, job.E),
    }
    if job.bias:
        shapes["bias"] = (1, H, M, N)
    if job.reach:
        shapes["table"] = (H, 2 * job.reach + 1)
    x = {name: torch.randn(shape, dtype=job.dtype) for name, shape in shapes.items()}
    if job.strided:
        x["q"] = x["q"].mT.contiguous().mT
    if job.keep:
        x["keep"] = (torch.rand(B, 1, M, N) < 0.5) | (torch.arange(N) == 0)  # no row is empty
    if job.block:
        side = -(-M // job.block), -(-N // job.block)
        x["keep_blocks"] = (torch.rand(B, 1, *side) < 0.1) | torch.eye(*side, dtype=torch.bool)
    if job.lengths:
        x["kv_lengths"] = torch.tensor(job.lengths)
    if job.documents:
        number = torch.arange(len(job.documents)).repeat_interleave(torch.tensor(job.documents))
        x["q_segments"] = x["kv_segments"] = number.repeat(B, 1)
    return {n: t.requires_grad_(job.backward and t.is_floating_point()) for n, t in x.items()}


def make_graph(job: Job, operands: Operands) -> ag.Graph:
    """Our graph of the job."""
    specs: dict[str, Any] = {name: ag.TensorSpec.like(t) for name, t in operands.items()}
    if job.documents:
        specs["segments"] = specs.pop("q_segments"), specs.pop("kv_segments")
    q, k, v = (specs.pop(name) for name in "qkv")
    specs["alibi"] = True if job.alibi else None
    if job.reach:
        specs["modifiers"] = (ag.RelativeBias(2 * job.reach + 1, "top_left"),)
    return ag.attention(q, k, v, mask=make_mask(job), soft_cap=job.soft_cap, **specs)


def make_mask(job: Job) -> ag.Mask | None:
    """What hides places, without lengths, documents and dense masks."""
    causal = ag.Causal() | ag.Prefix(job.prefix) if job.prefix else ag.Causal()
    parts = [causal] * job.causal + [ag.Window(job.left)] * (job.left is not None)
    parts += [ag.KeepBlocks(job.block, job.block)] if job.block else []
    mask = reduce(and_, parts) if parts else None
    return mask if mask is None or not job.before else mask.aligned("bottom_right")


def document_ends(job: Job) -> list[tuple[int, int]]:
    """Where each document begins and ends."""
    ends = [*accumulate(job.documents)]
    return [*zip([0, *ends], ends, strict=False)]
