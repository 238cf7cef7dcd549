"""A process that is forked while another thread imports plans as any other does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Whatever is imported after the library, but for PyTorch's own parts, has to be behind the gate.
# Compiling for a CPU imports nothing after the first plan.
COMPILING = """
import os, sys
import torch
import attn_graph as ag
from attrs import evolve
from attn_graph.machine.imports import GATE

for case in sys.argv[1:]:  # a child each, which has imported what this process has
    child = os.fork()
    if not child:
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, case
else:
    sys.exit()
name, libraries = case.split()
bare, cpu, late, planned = libraries == "bare", name == "cpu", [], False

def watch(event, args):
    root = args[0].partition(".")[0] if event == "import" else "torch"
    ours = root in ("attn_graph", "cudnn", "platformdirs", "rich", "triton")
    again = cpu and planned and root not in ("torch", "sympy")
    if again or ours and not GATE._is_owned():
        late.append(args[0])

sys.addaudithook(watch)
target = ag.Target.of(name)
if bare:
    kept = tuple(x for x in target.libraries if "torch" in x[0])
    target = evolve(target, libraries=kept)

def compile(*inputs, **options):
    graph = ag.attention(*inputs, **options)
    for each in (graph, ag.vjp(graph)[1]):
        ag.compile(each, target=target, backends=within, store=False)

def spec(*shape, dtype=torch.bfloat16):
    return ag.TensorSpec(shape, dtype)

def number(*shape):
    return spec(*shape, dtype=torch.int32)

within = None if cpu else ("math", "torch_flash") if bare else ("triton", "torch_flash")
x, row, packed = spec(1, 4, 600, 64), spec(1, 4, 1, 64), spec(30, 4, 64)
plain = spec(1, 4, 600, 64, dtype=torch.float32)
causal = ag.Causal("bottom_right")
compile(x, x, x)
ag.extend.default_store()
planned = True
for q, x in ((x, x), (row, x), (plain, plain))[: 2 + cpu]:
    compile(q, x, x)
    compile(q, x, x, mask=causal & ag.Window(9) | ag.Prefix(2), alibi=True, align="bottom_right")
    compile(q, x, x, mask=causal, soft_cap=3.0, sinks=spec(4, dtype=x.dtype))
    compile(q, x, x, kv_lengths=number(1), dropout=0.1)
    compile(q, x, x, keep=spec(1, 1, q.shape[2], 600, dtype=torch.bool))
    if not cpu:
        ag.explain(ag.attention(q, x, x), target=target)
compile(packed, packed, packed, q_starts=number(3), kv_starts=number(3), mask=causal)
pool = spec(5, 8, 4, 64)
compile(row, pool, pool, pages=number(1, 5), kv_lengths=number(1))
if not bare:
    n = ag.Dim("n", most=64)
    compile(spec(1, 4, n, 64), spec(1, 4, n, 64), spec(1, 4, n, 64), mask=ag.Causal())
if cpu:
    ag.parse(str(ag.attention(x, x, x, mask=ag.Causal())))
print(case, *late)
"""
CASES = [*(f"{name} all" for name in ("cpu", "h100", "b200", "l40s")), "b200 bare", "a100 bare"]
forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@forking
def test_what_planning_imports_is_behind_the_gate() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILING, *CASES],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == CASES  # and no module


# A thread plans; while it imports the module, this one forks. Without the gate it forks at once,
# and the child waits for a lock that nobody holds. The child imports and runs nothing of PyTorch's.
# PyTorch looks up an operator at its first call, without the interpreter's lock, and a fork at that
# moment leaves a lock of its own held in the child.
FORKING = """
import os, signal, sys, threading
import torch
import attn_graph as ag
from attn_graph.planner.arguments import resolve_target

x = ag.TensorSpec((1, 4, 600, 64), torch.bfloat16)
importing, forked = threading.Event(), threading.Event()

def watch(event, args):
    if event == "import" and args[0] == sys.argv[1]:
        importing.set()
        forked.wait(0.3)

def plan():
    ag.compile(ag.attention(x, x, x), target="l40s", backends=("triton",), store=False)

sys.addaudithook(watch)
thread = threading.Thread(target=plan)
thread.start()
assert importing.wait(60)
child = os.fork()
forked.set()
if not child:
    signal.alarm(30)
    resolve_target("l40s")
    os._exit(0)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@forking
@pytest.mark.parametrize(
    "module",
    ["attn_graph.lowering.libraries.cudnn_case", "attn_graph.lowering.triton.programs"],
)
def test_a_child_forked_within_another_threads_first_plan_can_import(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, module],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0"], "")
