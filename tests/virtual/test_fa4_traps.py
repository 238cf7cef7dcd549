"""What FlashAttention 4 4.0.0b36 gets wrong, or takes in one form alone: ours steps around each.

A test that fails says that the version installed has mended it; what steps around it may go then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.lowering.fa4.backend import PACKAGE
from attn_graph.lowering.fa4.call import Fa4Call
from attn_graph.testing.gpu import VirtualGpu, virtual_gpu
from attn_graph.testing.gpu.dsl import find_package
from tests.support import fa4_cases, virtual_cases
from tests.support.fa4_cases import CASES, Case
from tests.support.virtual_cases import CAUSAL, attention, machine

pytestmark = [
    pytest.mark.skipif(find_package() is None, reason="flash-attn-4 is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the package, when it is imported
    pytest.mark.slow,
]
BF16 = torch.bfloat16


def alibi(M: int) -> ag.Graph:
    """Grouped heads, with slopes of each."""
    return attention(M, G=1, alibi=True, mask=CAUSAL, dtype=BF16)


def gpu(sm: int) -> Any:  # Any: a context of a virtual GPU
    """A virtual GPU for which plans of ours take the package."""
    return virtual_gpu(evolve(machine(sm), libraries=((PACKAGE, "4.0.0b36"),)))


def run(device: VirtualGpu, graph: ag.Graph) -> int:
    """Both passes of our plan. Raises AssertionError."""
    outcome = virtual_cases.execute(device, graph, backend="fa4")
    assert outcome.programs, outcome.refusal
    return outcome.programs


@pytest.mark.parametrize("sm", [90, 100])
def test_our_score_functions_of_grouped_heads_are_right(sm: int) -> None:
    with gpu(sm) as device:
        assert run(device, alibi(70))


def test_the_gradient_for_sm_90_says_score_functions_other_heads_and_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fa4Call, "shared", 1)
    with gpu(90) as device, pytest.raises(AssertionError):
        run(device, alibi(71))  # no plan of before


def test_a_mask_function_beside_a_causal_mask_has_wrong_gradients() -> None:
    """The forward drops the causal mask, the backward applies both."""
    both = Case(
        M=70,
        N=70,
        H=1,
        mask=ag.Prefix(1000),
        functions={"mask_mod": "keep_all"},
        options={"causal": True},
    )
    with virtual_gpu("h100") as device:
        fa4_cases.execute(device, both, backward=False)
        with pytest.raises(AssertionError):
            fa4_cases.execute(device, both, backward=True)


Lists = tuple[torch.Tensor, ...]  # counts and numbers of mixed tiles, then of full ones
FAULTY: dict[str, Callable[..., Lists]] = {
    "descending": lambda count, order, *full: (count, order.flip(-1).contiguous(), *full),
    "one tile too few": lambda count, *rest: ((count - 1).clamp(min=0), *rest),
    "mixed tiles as full": lambda count, order, *_: (count * 0, order, count, order),
    "the first tile again": lambda count, order, *full: (count + 1, order * 0, *full),
    "full tiles left out": lambda count, order, full, numbers: (count, order, full * 0, numbers),
    "the lists of other rows": lambda *lists: tuple(x.flip(2).contiguous() for x in lists),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_list_of_tiles_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descending one too: kernels for sm_90 compare the tile listed last with the keys alone."""
    make = fa4_cases.tile_lists

    def make_faulty(case: Case, tile: tuple[int, int], by_keys: bool) -> Any:
        made = make(case, tile, by_keys)
        return type(made)(*FAULTY[name](*made[:4]), block_size=tile)

    monkeypatch.setattr(fa4_cases, "tile_lists", make_faulty)
    case = evolve(CASES["mask function, lists"], M=300, N=300, H=1)
    with virtual_gpu("h100") as device, pytest.raises(AssertionError):
        fa4_cases.execute(device, case, backward=False)


def test_functions_of_equal_text_are_one_kernel() -> None:
    """The package tells functions apart by their source and closure: by what we hash instead."""
    from attn_graph.lowering.fa4.functions import package_functions

    text = "def keep(b, h, i, j, M, N, data, numbers):\n    return {}\n"
    texts = [{"keep": text.format(x)} for x in ("j <= i", "j <= i", "j < i")]
    made: list[Any] = [package_functions(x, 1)["mask_mod"] for x in texts]
    assert made[0].__cute_hash__ == made[1].__cute_hash__ != made[2].__cute_hash__
