"""What importing the library does, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

import pytest

from attn_graph.nn.tracing import KEEPS_CONSTANTS

# Without NumPy PyTorch warns at the first call that reads arguments of certain kinds. Its own
# import has one in some versions, which is left out here: then the next one is seen.
WITHOUT_NUMPY = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader

class Quiet(SourceFileLoader):
    def get_code(self, name):
        text = self.get_data(self.path).decode().replace('torch.device("cpu")', "None")
        return compile(text, self.path, "exec")

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "torch._subclasses.functional_tensor":
            spec = PathFinder.find_spec(name, path)
            spec.loader = Quiet(name, spec.origin)
            return spec

sys.meta_path.insert(0, Finder)
try:
    import torch
except Warning:
    sys.exit(7)
import attn_graph
assert "numpy" not in sys.modules
"""


IMPORTING = """
import sys
import torch  # what torch imports is its own affair
{torch_too}

heavy = []

def watch(event, args):
    if event == "import" and args[0].partition(".")[0] in ("click", "cudnn", "rich", "triton"):
        heavy.append(args[0])

sys.addaudithook(watch)
import attn_graph
from attn_graph.machine import gpus, torch_switches

assert not heavy, heavy
assert sys.modules.keys().isdisjoint(("hypothesis", "attn_graph.printing.html"))
assert not gpus.devices.cache_info().currsize, "the table of GPUs is read"
assert not [*torch_switches.read_switches().changed()], "of an untouched PyTorch"

from attn_graph.ir.transforms.tracing import trace_along

trace_along(torch.sin, torch.zeros(1), torch.ones(1))
"""


def test_importing_the_library_does_nothing_that_it_can_do_without() -> None:
    """Where torch.compile takes no constants of ours, a part of PyTorch is told so. Nothing is
    logged or warned of: PyTorch's own import warns without NumPy, so the library depends on it. Nor
    by derivatives of own steps: PyTorch scripts functions at the first tangent, and warns of its
    own torch.jit.script."""
    torch_too = "" if KEEPS_CONSTANTS else "from torch._dynamo import trace_rules"
    code = [sys.executable, "-W", "error", "-c", IMPORTING.format(torch_too=torch_too)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert any(need.startswith("numpy") for need in requires("attn-graph") or ())


def test_the_library_is_imported_without_a_warning_where_numpy_is_absent() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_NUMPY], capture_output=True, text=True
    )
    if done.returncode == 7:
        pytest.skip("this PyTorch warns by itself")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ENDING = """
import torch
import attn_graph as ag
from attn_graph.nn.functional import attention, scaled_dot_product_attention

x, cpu = torch.ones(1, 2, 8, 4), ag.Target.of("cpu")
spec, leaf = ag.TensorSpec.like(x), x.clone().requires_grad_()
plain, capped = (ag.attention(spec, spec, spec, soft_cap=cap) for cap in (None, 3.0))
fused, own = (ag.compile(plain, target=cpu, backends=(b,)) for b in ("torch_sdpa", "math"))
known = ag.compile(plain, target=cpu)
known(x, x, x)
attention(x, x, x, scale=0.5)
calls = {
    "known function": lambda: attention(x, x, x, scale=0.5),
    "known plan": lambda: known(x, x, x),
    "function": lambda: attention(x, x, x),
    "masked": lambda: attention(x, x, x, mask=ag.Causal(), alibi=True),
    "PyTorch's form": lambda: scaled_dot_product_attention(x, x, x, is_causal=True),
    "torch_sdpa": lambda: fused(x, x, x),
    "math": lambda: own(x, x, x),
    "out": lambda: own(x, x, x, out=torch.empty_like(x)),
    "recorded": lambda: known(leaf, leaf, leaf),
    "compile": lambda: ag.compile(capped, target=cpu),
    "graph": lambda: ag.attention(spec, spec, spec, scale=2.0),
    "vjp": lambda: ag.vjp(capped),
    "explain": lambda: ag.explain(capped, target=cpu),
    "plan.explain": known.explain,
    "plan.memory": known.memory,
    "plan.cost": known.cost,
    "plan.vjp": lambda: known.vjp,
    "plan.verify": lambda: known.verify(x, x, x),
}


class Last:
    def __del__(self):
        for name, call in calls.items():
            try:
                result = call()
                print(f"{name}: {[*result.shape]}", flush=True)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:23]}", flush=True)


last = Last()
"""


def test_a_first_call_while_python_shuts_down_says_so() -> None:
    """Nothing can be imported then, and PyTorch can't make every tensor. Known calls still run."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, check=False
    )
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(told) == 18, done.stderr
    known = [told.pop(name) for name in ("known function", "known plan")]
    assert known == ["[1, 2, 8, 4]"] * 2
    assert set(told.values()) == {"PlanTargetError: Python is shutting down"}, told
