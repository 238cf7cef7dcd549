"""FlashAttention 4's compiled kernels without the package: which ones a plan runs, and where they
are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.fa4 import backend as fa4_backend
from attn_graph.lowering.fa4 import run as fa4_run
from attn_graph.lowering.fa4.backend import BACKEND
from attn_graph.lowering.fa4.call import Fa4Call
from attn_graph.lowering.fa4.offline import CompiledKernel, keep_kernels_in, kernel_folder
from attn_graph.lowering.request import Options, Request
from tests.lowering.test_fa4 import B200, H200, JOINED, make, spec
from tests.lowering.test_python_calls import python_calls
from tests.support.kernels import lying_of

FORWARD, BACKWARD = 56, 150  # functions of Python of a call


@pytest.mark.parametrize(("spilled", "backend"), [(1024, "fa4"), (1025, "math")])
def test_kernels_that_spill_much_are_refused_while_lowering(
    spilled: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next backend runs the graph, and the plan says why; planning alone compiles nothing."""
    kernels = [CompiledKernel("preprocess", 40, 0, ""), CompiledKernel("forward", 128, spilled, "")]
    x = spec(1, 2, spilled, 64)  # no plan of before
    graph = ag.attention(x, x, x)
    options: dict[str, Any] = {"target": H200, "backends": ("fa4", "math")}
    assert "fa4 runs this on " in str(ag.explain(graph, **options))
    monkeypatch.setattr(fa4_backend, "compile_for_target", lambda *_: kernels)
    plan = ag.compile(graph, **options)
    assert plan.backend == backend
    assert ("its forward kernel spills 1,025" in str(plan.explain())) is (backend == "math")


@pytest.mark.parametrize(("spilled", "backend"), [(1024, "fa4"), (1025, "math")])
def test_kernels_of_narrow_tiles_run_where_others_spill_much(
    spilled: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_100, and if they spill little."""

    def compile_wide(run: Any, *_: object) -> list[CompiledKernel]:
        wide = 1536 if run.call.problem.grad is None else 0
        return [CompiledKernel("forward", 128, spilled if run.call.narrow else wide, "")]

    monkeypatch.setattr(fa4_backend, "compile_for_target", compile_wide)
    x = spec(1, 2, 1000 + spilled, 64)  # no plan of before
    plan = ag.compile(ag.attention(x, x, x), target=B200, backends=("fa4", "math"))
    assert plan.backend == backend
    assert ("tiles of 128 x 64" in str(plan.explain())) is (backend == "fa4")
    assert ("its forward kernel spills 1,536" in str(plan.explain())) is (backend == "math")


@pytest.mark.parametrize(("sm", "kinds"), [(90, 1), (100, 2)])
def test_plans_of_every_size_ask_for_the_same_kernels(sm: int, kinds: int) -> None:
    """But for the rows of a tile, of which kernels for sm_100 have two sizes."""

    def kernels(M: int, N: int, H: int = 4) -> str:
        mask = ag.Causal("top_left") | ag.Prefix(M // 2)
        return Fa4Call.of(lying_of(make(M, N, H=H, soft_cap=3.0, mask=mask)), sm).kernels

    names = {kernels(*sizes) for sizes in ((300, 300), (500, 700), (5, 300))}
    assert len(names) == kinds
    assert kernels(300, 300, H=2) not in names


@pytest.mark.parametrize(
    "options",
    [
        {"mask": ag.Causal("bottom_right")},
        {"mask": JOINED, "soft_cap": 3.0, "alibi": True},
        {"q_lengths": spec(2, dtype=torch.int32)},
    ],
    ids=["causal", "function, lists", "lengths"],
)
def test_a_call_runs_little_python_beside_the_package(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What depends on the graph alone is worked out once."""
    monkeypatch.setattr(fa4_run, "call_package", lambda *_: ())
    monkeypatch.setattr(fa4_run, "find_misplaced", lambda _: [])
    monkeypatch.setattr("attn_graph.machine.target.VIRTUAL", {H200})
    forward = make(300, 300, **options)
    for graph, most in ((forward, FORWARD), (simplify(ag.vjp(forward)[1]), BACKWARD)):
        made = BACKEND.lower(Request(graph, H200, Options()))
        tensors = [torch.zeros(x.spec.shape, dtype=x.spec.dtype) for x in graph.inputs]
        assert python_calls(made.infer, tensors) <= most


def test_kernels_are_kept_only_where_nobody_else_may_write(tmp_path: Path) -> None:
    """What lies there is loaded and run."""
    store = ag.extend.Store(tmp_path / "store")
    folder = kernel_folder(store)
    assert folder.stat().st_mode & 0o077 == 0
    for path in (folder, store.folder):
        path.chmod(0o777)
        with pytest.raises(PermissionError, match="can be written to by others"):
            kernel_folder(store)
        path.chmod(0o700)
    assert kernel_folder(store) == folder


def test_the_package_is_told_where_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn.cute", raising=False)
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    store = ag.extend.Store(tmp_path / "store")
    with keep_kernels_in(store):
        assert os.environ[name] == str(kernel_folder(store))
    assert name not in os.environ
    monkeypatch.setitem(sys.modules, "flash_attn.cute", sys)
    with keep_kernels_in(store):
        assert name not in os.environ


def test_planning_imports_neither_the_package_nor_its_compiler() -> None:
    told = ag.explain(make(mask=JOINED), target=H200, backends=("fa4",))
    assert "fa4 runs this on " in str(told)
    assert not {"cutlass", "flash_attn", "flash_attn.cute"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("sizes", "invariant", "splits"),
    [
        ((1, 8, 1, 32768), False, 18),  # 148 multiprocessors, 8 programs
        ((1, 8, 65, 32768), False, 9),  # 260 rows of a group: two tiles of 256
        ((4, 8, 1, 32768), False, 4),
        ((1, 8, 1, 512), False, 1),  # four tiles
        ((64, 8, 1, 32768), False, 1),
        ((1, 8, 1, 32768), True, 1),
    ],
)
def test_programs_share_keys_by_the_packages_heuristic(
    sizes: tuple[int, int, int, int], invariant: bool, splits: int
) -> None:
    """On sm_100 alone; their parts are told and count as memory."""
    B, G, M, N = sizes
    q, k = (ag.TensorSpec((B, *n, 128), torch.bfloat16) for n in ((4 * G, M), (G, N)))
    for target, due in ((B200, splits), (H200, 1)):
        request = Request(
            simplify(ag.attention(q, k, k)), target, Options(batch_invariant=invariant)
        )
        call = fa4_backend.describe_fa4(request)
        assert call.plain(True)["options"].get("num_splits", 1) == due
        foreseen = BACKEND.foreseen(request)
        assert any("programs share the keys" in note for note in foreseen.notes) == (due > 1)
        assert foreseen.temporary == (due > 1) * due * 4 * B * 4 * G * M * (128 + 1)
