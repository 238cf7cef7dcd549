"""Rules of synchronisation that the text of compiled kernels can be held to, read line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

import attn_graph as ag
from attn_graph.lowering.codegen.machine_code import compile_launch
from attn_graph.lowering.triton.plan import Flash, compile_launches, mock_tensors
from tests.support.kernels import problem_of
from tests.support.virtual_cases import CASES, machine

STORE, FENCE = r"\t(?:@%p\d+ )?(?:st\.shared|stmatrix)", r"fence\.proxy\.async"
PRODUCT = r"\b(?:wgmma\.mma_async|tcgen05\.mma)"


def unfenced_products(text: str) -> Iterator[int]:
    """Lines with a product, which reads by the asynchronous proxy, and stores of threads before it
    that nothing has made visible there."""
    stored = False
    for n, line in enumerate(text.splitlines(), 1):
        if re.search(STORE, line):
            stored = True
        elif re.search(FENCE, line):
            stored = False
        elif stored and re.search(PRODUCT, line):
            yield n


def kernels_of(name: str, sm: int) -> dict[str, str]:
    """The PTX of both passes of a case, by kernel."""
    forward = CASES[name]()
    graphs = forward, ag.vjp(forward, ["q", "k", "v"])[1]
    plans = [ag.compile(g, target=machine(sm), backends=("triton",)) for g in graphs]
    parts = [part for plan in plans for part in plan.text().split(".visible .entry ")[1:]]
    return {part.split("(")[0]: part for part in parts}


@pytest.mark.parametrize("sm", [90, 100])
def test_products_read_stores_of_threads_behind_a_fence(sm: int) -> None:
    kernels = kernels_of("bf16", sm)
    for name in ("forward", "query_gradient", "key_gradient"):
        assert re.search(PRODUCT, kernels[name])
        assert [*unfenced_products(kernels[name])] == [], name
    fenceless = [re.sub(FENCE, "//", text) for text in kernels.values()]
    unfenced = [line for text in fenceless for line in unfenced_products(text)]
    assert sm == 90 or unfenced  # sm_90 multiplies from registers


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_a_kernel_has_the_shared_memory_that_it_asks_for(sm: int) -> None:
    problem = problem_of(ag.vjp(CASES["head dim 128"]())[1])
    flash = Flash.plan(problem, machine(sm))
    tensors, most = mock_tensors(flash), flash.target.shared_memory
    assert most is not None
    assert all(compile_launch(x, tensors, sm).metadata.shared <= most for x in flash.launches)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "anew"), [("full", False), ("soft cap", True)])
def test_products_that_the_assembler_begins_anew_are_counted(name: str, anew: bool) -> None:
    """It does where a register of theirs is set late, and says so: C7519."""
    problem = problem_of(ag.vjp(CASES[name](), ["q", "k", "v"])[1])
    codes = {x.kernel: x for x in compile_launches(Flash.plan(problem, machine(90)))}
    assert (codes["key_gradient"].renewed > 0) == anew
    assert ("begun anew" in str(codes["key_gradient"])) == anew


def test_more_programs_than_a_grid_has_are_refused() -> None:
    x = ag.TensorSpec((2**20, 2**6, 2**12, 16), torch.float16)
    with pytest.raises(ag.NoBackendError, match="programs"):
        ag.compile(ag.attention(x, x, x), target="h200", backends=("triton",))
