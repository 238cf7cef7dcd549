"""A layer of vLLM on virtual GPUs: a prompt in chunks, then answers, from vLLM's default layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_graph.integrations.vllm.layers import Kind, ServedLayer
from attn_graph.integrations.vllm.steps import Capacity, ServingStep, find_cells
from attn_graph.testing.gpu import virtual_gpu
from attn_graph.testing.rule import Expectation
from tests.integrations.test_vllm_layers import ONES, attend

I32 = torch.int32
PAGE, WIDTH = 16, 3
KIND = Kind(4, 2, 16, 0.25, window=19)


def step_of(before: list[int], new: list[int], table: Tensor) -> ServingStep:
    places = [
        int(table[b, i // PAGE]) * PAGE + i % PAGE
        for b, (old, n) in enumerate(zip(before, new, strict=True))
        for i in range(old, old + n)
    ]
    starts = torch.tensor([0, *new], dtype=I32).cumsum(0, dtype=I32)
    lengths = torch.tensor(before, dtype=I32) + starts.diff()
    cells = find_cells(torch.tensor(places), PAGE)
    return ServingStep(sum(new), starts, lengths, table, cells, True)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_a_layer_serves_prompts_and_answers(gpu: str) -> None:
    torch.manual_seed(0)
    H, G, D = KIND.H, KIND.G, KIND.D
    cache = torch.zeros(1 + 2 * WIDTH, PAGE, G, 2 * D, dtype=torch.bfloat16).transpose(1, 2)
    table = torch.tensor([[5, 2, 6], [1, 4, 3]], dtype=I32)
    layer, before = ServedLayer(KIND, Capacity(32, 2)), [0, 0]
    rows: list[list[Tensor]] = [[], []]
    for new in ([20, 9], [4, 1], [1, 1]):
        step = step_of(before, new, table)
        x = torch.randn(sum(new), H + 2 * G, D).bfloat16()
        q, k, v = x.split([H, G, G], 1)
        out = torch.empty(q.shape, dtype=q.dtype)
        layer.append(step, k, v, cache, ONES)
        with virtual_gpu(gpu):
            layer.attend(step, q, k, v, cache, out, ONES)
        (plan,) = layer.plans.values()
        assert plan.backend == "triton"
        first = 0
        for b, n in enumerate(new):
            own = slice(first, first := first + n)
            rows[b].append(x[own, H:])
            keys, values = torch.cat(rows[b]).split([G, G], 1)
            due, low = (
                attend(KIND, True, torch.zeros(H), *map(to, (q[own], keys, values)))
                for to in (Tensor.double, Tensor.bfloat16)
            )
            Expectation("o", due, low, values.double().abs()).check(out[own])
            before[b] += n
