"""The commands around the store: list, verify, clear and build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attn_graph as ag
from attn_graph.cli.cache import format_age
from attn_graph.machine.store import MAGIC
from tests.support.command_line import run

CPU = ag.Target.of("cpu")
GRAPH = ag.attention(*(ag.TensorSpec((1, 2, 64, 16), torch.float32),) * 3, mask=ag.Causal())
CALL = {
    "name": "sdpa",
    "dtype": "bf16",
    "inputs": [{"argument": name, "shape": [2, 8, 64, 64]} for name in "qkv"],
}
DEVICE = {"deviceVer": 900, "multiProcessorCount": 132}
KEY = {"call": CALL, "device": DEVICE, "versions": [[9, 20, 0], [1, 28, 0]]}
TUNED = {"graph": str(GRAPH), "target": "cpu", "threads": 2}


@pytest.fixture
def store(tmp_path: Path) -> ag.extend.Store:
    store = ag.extend.Store(tmp_path)
    store.put(f"cudnn {json.dumps(KEY)}", b"plan")
    store.put(f"tune {json.dumps(TUNED)}", b"choice")
    store.put("other " + "x" * 200, b"of a later version")
    store.put("cudnn {}", b"of another version")
    return store


def test_cache_lists_what_each_file_is(store: ag.extend.Store) -> None:
    (store.folder / "foreign.plan").write_bytes(b"hello")
    result = run("cache", "list", "--folder", str(store.folder), "--json")
    told = {each["what"]: each for each in json.loads(result.output)["entries"]}
    q = "q [2, 8, 64, 64], k [2, 8, 64, 64], v [2, 8, 64, 64]"
    assert told.keys() == {
        f"sdpa bf16, {q}, for sm_90, 132 multiprocessors, cuDNN 9.20.0",
        "q f32[1, 2, 64, 16], k f32[1, 2, 64, 16], v f32[1, 2, 64, 16], on cpu, 2 threads",
        "x" * 97 + "...",
        "{}",
        f"foreign.plan: it starts with b'hello', not with {MAGIC!r}",
    }
    assert sorted(each["kind"] for each in told.values()) == [
        "cudnn", "cudnn", "damaged", "other", "tune",
    ]  # fmt: skip
    text = run("cache", "list", "--folder", str(store.folder)).output
    assert "5 files" in text
    assert "sdpa bf16, q [2, 8, 64, 64]" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3.0, "0 s"), (59.9, "59 s"), (7300, "2 h"), (1e6, "11 d")]
)
def test_ages_are_told_roughly(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


HALF = ag.attention(*(ag.TensorSpec((1, 2, 64, 16), torch.float16),) * 3)


def test_graphs_of_a_file_are_prepared_and_who_runs_them_is_told(tmp_path: Path) -> None:
    """In double precision cuDNN runs nothing, and nothing is built."""
    wide = ag.attention(*(ag.TensorSpec((1, 2, 64, 16), torch.float64),) * 3)
    forward, backward = ag.vjp(wide)
    (tmp_path / "graphs").write_text(f"{wide}\n\n{backward}\n{forward}")
    line = ("cache", "build", str(tmp_path / "graphs"), "--target", "h200", "-o")
    result = run(*line, str(tmp_path / "plans"))
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "graph 1: math forward, math backward",
        "graph 2: math gradient",
        "graph 3: math forward, math backward",
        f"0 files, 0 B, in {tmp_path / 'plans'}",
    ]
    result = run(*line, str(tmp_path / "plans"), "--inference")
    assert result.output.splitlines()[0] == "graph 1: math forward"


COMPILED = """
import json, sys
import torch, triton
import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.problem import sole
from attn_graph.lowering.codegen.launches import load_kernel
from attn_graph.lowering.codegen.machine_code import compile_for
from attn_graph.lowering.triton.plan import mock_tensors
from attn_graph.lowering.triton.plan import Flash

graph, hits = ag.parse(sys.stdin.read()), []
triton.knobs.compilation.listener = lambda **seen: hits.append(seen["cache_hit"])
for each in (graph, ag.compile(graph, target="h200", backends=("triton",)).vjp.graph):
    flash = Flash.plan(sole(simplify(each)), ag.Target.of("h200"))
    tensors = mock_tensors(flash)
    tensors |= {name: torch.zeros(64, dtype=dtype) for name, dtype in flash.dtypes().items()}
    for launch in (*flash.launches, *flash.without_lse):
        with compile_for(90):
            load_kernel(launch.kernel).warmup(grid=(1,), **launch.arguments(tensors))
print(json.dumps(hits))
"""


@pytest.mark.skipif(CPU.interprets, reason="with TRITON_INTERPRET=1 Triton compiles nothing")
@pytest.mark.slow
def test_kernels_are_compiled_ahead_for_calls_with_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that launches them finds each in Triton's cache, and compiles none."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    x = ag.TensorSpec((1, 2, 64, 16), torch.bfloat16)
    graph = ag.attention(x, x, x, mask=ag.Causal() | ag.Prefix(5), soft_cap=3.0)
    (tmp_path / "graphs").write_text(f"{graph}")
    command = (sys.executable, "-m", "attn_graph", "cache", "build", str(tmp_path / "graphs"))
    more = ("--target", "h200", "-o", str(tmp_path / "plans"))
    result = subprocess.run((*command, *more), check=True, capture_output=True, text=True)
    assert "graph 1: triton forward, triton backward" in result.stdout
    later = (sys.executable, "-c", COMPILED)
    result = subprocess.run(later, check=True, capture_output=True, text=True, input=str(graph))
    hits = json.loads(result.stdout)
    assert len(hits) == 5  # forward with lse and without, delta, dq, dk with dv
    assert all(hits)


@pytest.mark.parametrize(
    ("text", "more", "told"),
    [
        ("", (), "holds no graph"),
        ("hello", (), "expected"),
        (str(HALF), ("--driver", "thirteen"), "'thirteen' is not a version of CUDA such as 13.0"),
        (str(HALF), ("--target", "h19"), "'h19' is not known"),
    ],
)
def test_what_can_not_be_prepared_is_wrong_usage(
    text: str, more: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    line = ("cache", "build", "-", "--target", "h200", "-o", str(tmp_path), *more)
    result = run(*line, stdin=text)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.split())


def test_cache_verifies_and_clears(store: ag.extend.Store) -> None:
    at = ("--folder", str(store.folder))
    assert run("cache", "verify", *at).exit_code == 0
    store.path("cudnn {}").write_bytes(b"damaged")
    damaged = run("cache", "verify", *at)
    assert damaged.exit_code == 1
    assert f"{store.path('cudnn {}')}: it starts with b'damaged'" in damaged.output
    assert "4 files" in damaged.output
    plain = run("cache", "verify", *at, "--json")
    assert plain.exit_code == 1
    (entry,) = json.loads(plain.output)["damaged"]
    assert entry["path"] == str(store.path("cudnn {}"))
    cleared = json.loads(run("cache", "clear", *at, "--json").output)
    assert cleared == {"folder": str(store.folder), "exists": True, "deleted": 4}
    assert run("cache", "clear", *at).output == f"0 files deleted from {store.folder}\n"
    assert "0 files" in run("cache", "list", *at).output


def test_a_cache_that_nothing_was_ever_kept_in_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ag.extend.Store(tmp_path / "none")
    monkeypatch.setattr(ag.extend, "default_store", lambda: store)
    for name in ("list", "verify", "clear"):
        result = run("cache", name)
        assert result.exit_code == 0
        assert f"{store.folder} (the folder does not exist yet)" in result.output
        assert json.loads(run("cache", name, "--json").output)["exists"] is False
