"""What FlashAttention 4 4.0.0b36 gets wrong, or takes in one form alone: ours steps around each.

A test that fails says that the version installed has mended it; what steps around it may go then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.lowering.fa4 import dialect
from attn_graph.lowering.fa4.backend import PACKAGE
from attn_graph.lowering.fa4.call import Fa4Call
from attn_graph.lowering.problem import facts_of
from attn_graph.testing.gpu import Fault, VirtualGpu, virtual_gpu
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
INSIDE = r"inside\((.*), .\)"  # as generated code keeps a place within a tensor


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


def test_mask_functions_are_asked_for_places_past_the_last_query_on_sm_90(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In all key tiles but that visited first; ours read the last one there."""
    usual = dialect.place_text
    graph = attention(71, 300, keep=ag.TensorSpec((1, 1, 71, 300), torch.bool), dtype=BF16)
    monkeypatch.setattr(dialect, "place_text", lambda *x: re.sub(INSIDE, r"\1", usual(*x)))
    with gpu(90) as device, pytest.raises(Fault):
        run(device, graph)
    ag.clear_cache()
    facts_of.cache_clear()


@pytest.mark.parametrize("sm", [pytest.param(90, marks=pytest.mark.slow), 100])
def test_a_table_of_blocks_is_not_read_past_its_end(sm: int) -> None:
    """Mask functions run on all rows of a tile, whose blocks may lie past the last."""
    graph = attention(
        7, 128, mask=ag.KeepBlocks(3, 128), dtype=BF16,
        keep_blocks=ag.TensorSpec((1, 1, 3, 1), torch.bool),
    )  # fmt: skip
    with gpu(sm) as device:
        run(device, graph)
        assert device.programs


REFUSED_LAUNCH = """
import torch
from attn_graph.testing.gpu import dsl, virtual_gpu

with virtual_gpu("h100"):
    from flash_attn.cute import interface

    refuse = dsl.SERVE(lambda *_: 1)
    dsl.load_runtime().serve(refuse, 232448)
    x = torch.randn(1, 16, 1, 64).bfloat16()
    try:
        interface._flash_attn_fwd(x, x, x)
    except Exception as error:
        print("raised", error)
"""


def test_a_launch_that_the_runtime_refuses_without_an_error_of_its_own_ends_the_process() -> None:
    """So ours notes launches, and executes them when the package's host code is through."""
    made = subprocess.run(
        (sys.executable, "-c", REFUSED_LAUNCH),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert made.returncode < 0, made.stderr[-2000:]
    assert "raised" not in made.stdout


def test_functions_of_equal_text_are_one_kernel() -> None:
    """The package tells functions apart by their source and closure: by what we hash instead."""
    from attn_graph.lowering.fa4.functions import package_functions

    text = "def keep(b, h, i, j, M, N, data, numbers):\n    return {}\n"
    texts = [{"keep": text.format(x)} for x in ("j <= i", "j <= i", "j < i")]
    made: list[Any] = [package_functions(x, 1)["mask_mod"] for x in texts]
    assert made[0].__cute_hash__ == made[1].__cute_hash__ != made[2].__cute_hash__
