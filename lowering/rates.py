"""How fast kernels are: shares of a GPU's peak and a launch's time, and a CPU's own rates."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from attrs import frozen

from attn_graph.machine.target import Target
from attn_graph.spec import HALF, NAMES

FILLS = 2  # programs of four warps that a multiprocessor runs at once
LEAST_TILE = 16  # rows of a matrix product
Shares = tuple[tuple[int, float], ...]  # (head size, share of the peak)
When = Literal["always", "many_keys", "one_query", "few_rows", "never"]


@final
@frozen
class Rate:
    """An entry of rates.toml: some backends on some GPUs. The top of the file has the fields."""

    source: str
    backends: tuple[str, ...]
    sm: tuple[int, ...]
    forward: Shares
    backward: Shares
    splits: When
    packs: When
    tile: int = LEAST_TILE
    one: int | None = None
    fills: int = FILLS
    rereads: bool = False

    def share(self, width: int, *, backward: bool) -> float | None:
        """The share of the peak at a head size; None without kernels of this pass."""
        shares = self.backward if backward else self.forward
        least = [share for size, share in shares if size >= width] or [x for _, x in shares[-1:]]
        return least[0] if least else None


def read_field(value: Any, *, tables: bool) -> Any:  # Any: TOML
    """A field of a rate: lists are tuples, and tables of shares begin with the least head size."""
    if tables:
        return tuple(sorted((int(size), share) for size, share in value.items()))
    return tuple(value) if isinstance(value, list) else value


@final
@frozen(kw_only=True)
class CpuRates:
    """How fast a thread of some CPUs is, in units of rates.toml."""

    native_half: bool
    kernel_row: float
    product_call: float
    look: float
    f32: float
    half: float
    softmax: float
    kernel_softmax: float
    kernel_reads: float
    product_reads: float
    copies: float
    hides: float
    hides_by_tile: float

    @cached_property
    def flops(self) -> Mapping[torch.dtype, float]:
        """Of products, by dtype."""
        double = self.f32 * torch.float32.itemsize / torch.float64.itemsize
        wide = {torch.float32: self.f32, torch.float64: double}
        return {**dict.fromkeys(HALF, self.half), **wide}


@final
@frozen
class Rates:
    """All of rates.toml. gpus: by backend and compute capability. cpus: by native bfloat16. launch:
    seconds."""

    gpus: Mapping[tuple[str, int], Rate]
    cpus: Mapping[bool, CpuRates]
    launch: float
    sources: Mapping[str, str]


@cache
def read_rates() -> Rates:
    """rates.toml."""
    read = tomllib.loads(Path(__file__).with_name("rates.toml").read_text())
    shares = ("forward", "backward")
    rows = [
        Rate(**{name: read_field(x, tables=name in shares) for name, x in fields.items()})
        for fields in read["rate"]
    ]
    gpus = {(name, sm): rate for rate in rows for name in rate.backends for sm in rate.sm}
    cpus = {row.native_half: row for row in (CpuRates(**fields) for fields in read["cpu"])}
    return Rates(gpus, cpus, read["launch"], read["sources"])


def cpu_rates(native_half: bool) -> CpuRates:
    """The row of a CPU with, or without, products in bfloat16."""
    return read_rates().cpus[native_half]


def peak_of(
    target: Target, name: str, dtype: torch.dtype, width: int, *, backward: bool
) -> float | None:
    """Flop/s of a backend's kernels at best in half precision, at a head size.

    None without a known rate of this backend and pass, of this dtype, or of the GPU itself.
    """
    rate, peak = read_rates().gpus.get((name, target.sm)), target.peak(NAMES[dtype])
    share = None if rate is None else rate.share(width, backward=backward)
    return None if share is None or peak is None or dtype not in HALF else peak * share


def least_seconds(
    flops: float, peak: float, moved: float, bandwidth: float, launches: int = 0
) -> float:
    """The roofline: the longer of the time of products and of moving bytes, and the time of
    launches that wait for others."""
    return max(flops / peak, moved / bandwidth) + launches * read_rates().launch
