"""Rows appended to pages by the compiled kernel, executed: as PyTorch's operations write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_graph.nn import append_to_pages, appending
from attn_graph.testing.gpu import virtual_gpu
from tests.support.virtual_cases import machine

HALF, BYTES = torch.float16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TABLE = torch.tensor([[3, 0], [5, 1], [-9, -9]], dtype=torch.int32)


def write(kind: torch.dtype, slots: bool, interleaved: bool) -> list[torch.Tensor]:
    """The pools, and q, after six rows of two sequences and one of none."""
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(7, h, 32, generator=random).to(HALF) for h in (4, 2, 2))
    if kind != HALF:
        k[0, 0, 8], v[0, 0, 0] = 0.085, 0.085  # 1.0625 * 0.08: a tie
    cos, sin = torch.rand(2, 9, 4, generator=random)
    cache = torch.zeros(6, 4, 2, 64).to(kind)
    pools = cache[..., :32], cache[..., 32:]
    more: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved, "q": q}
    if kind != HALF:
        more |= {"k_scale": torch.full((1, 1, 2, 1), 0.08), "v_scale": 0.08}
    if slots:
        at = torch.tensor([3, 13, 20, 7, 0, -1, 23])
        turned = append_to_pages(
            k, v, *pools, slot_mapping=at, positions=torch.arange(7).flip(0), **more
        )
    else:
        starts, lengths = torch.tensor([0, 4, 4, 6]), torch.tensor([5, 1, 0])
        lengths[1:] = torch.tensor([0, 8])
        table = TABLE.clone()
        table[2] = TABLE[1]
        turned = append_to_pages(k, v, *pools, table, lengths, q_starts=starts, **more)
    assert turned is not None
    return [cache.view(torch.int16 if kind == HALF else torch.uint8), turned]


@pytest.mark.parametrize(
    ("sm", "kind", "slots"),
    [
        (90, HALF, True), (80, BYTES, False), (90, E4M3, True), (80, E5M2, False),
        (80, E4M3, False),
        *(
            pytest.param(sm, kind, slots, marks=pytest.mark.slow)
            for sm in (80, 89, 90, 100, 120)
            for kind in (HALF, BYTES, E5M2, E4M3)
            for slots in (True, False)
        ),
    ],
)  # fmt: skip
def test_the_compiled_kernel_writes_what_operations_write(
    sm: int, kind: torch.dtype, slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = write(kind, slots, sm == 90)
    from attn_graph.kernels.appending import launch

    monkeypatch.setattr(appending, "write_on_host", launch)
    with virtual_gpu(machine(sm)) as device:
        out = write(kind, slots, sm == 90)
    assert device.kernels["append_rows"] == 7
    for name, x, y in zip(("cache", "q"), out, due, strict=True):
        if kind == HALF or name == "q":  # products and sums may be one operation on a GPU
            torch.testing.assert_close(x.view(HALF), y.view(HALF), rtol=2.0**-10, atol=2.0**-12)
        else:
            assert x.int().sub(y.int()).abs().max() <= 1
            assert x[..., 40:].equal(y[..., 40:])
