"""Compiles FlashAttention 4's kernels for a GPU, present or not; offline.py starts it.

It runs in a process of its own: the package reads its target from the environment, once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attn_graph.lowering.codegen.machine_code import read_resources
from attn_graph.lowering.fa4.call import DTYPES, call_package
from attn_graph.lowering.fa4.dialect import as_read
from attn_graph.lowering.problem import tidy_strides
from attn_graph.spec import TensorSpec

CACHES = {  # of the package's functions, for each kernel
    "preprocess": "_bwd_preprocess",
    "forward": "_flash_attn_fwd",
    "backward": "_flash_attn_bwd",
    "postprocess": "_bwd_postprocess_convert",
}


def read_spec(plain: list[Any]) -> TensorSpec:  # Any: JSON
    """A spec written by `plain_spec`."""
    shape, strides, name = plain
    return TensorSpec(tuple(shape), DTYPES[name], tuple(strides))


def fake_tensor(spec: TensorSpec) -> torch.Tensor:
    """A tensor without memory."""
    x = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cuda")
    return tidy_strides(x)


def answer_processors(count: int) -> None:
    """Give the DSL the target's number of multiprocessors: it would ask a driver."""
    from cutlass.utils import HardwareInfo

    HardwareInfo.__init__ = lambda self, device_id=0: None
    HardwareInfo.get_device_multiprocessor_count = lambda self: count


def convert_fakes() -> None:
    """Have the package make semaphores of fakes as it makes all other tensors of them."""
    from flash_attn.cute import cute_dsl_utils, utils

    def convert(x: torch.Tensor, leading_dim: int, alignment: int = 16, **_: object) -> object:
        return cute_dsl_utils.to_cute_tensor(x, assumed_align=4, leading_dim=leading_dim)

    utils.convert_from_dlpack_leading_static = convert


def compile_fakes(plain: dict[str, Any], processors: int) -> None:  # Any: JSON
    """Compile the kernels of a call."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    answer_processors(processors)
    convert_fakes()
    with FakeTensorMode():
        tensors = {name: fake_tensor(read_spec(x)) for name, x in plain["tensors"].items()}
        reads = [as_read(fake_tensor(x), x) for x in map(read_spec, plain["reads"])]
        lists = [torch.empty(x, dtype=torch.int32, device="cuda") for x in plain["lists"]]
        call_package(plain, tensors, reads, lists)


def describe_kernels() -> Iterator[dict[str, Any]]:  # Any: JSON
    """Registers, spills and PTX of each compiled kernel."""
    from flash_attn.cute import interface

    for name, function in CACHES.items():
        for compiled in getattr(interface, function).compile_cache.cache.values():
            registers, spilled, *_ = read_resources(compiled.artifacts.CUBIN)
            yield {
                "kernel": name,
                "registers": registers,
                "spilled": spilled,
                "ptx": compiled.artifacts.PTX,
            }


def main() -> None:
    """Read a request from the standard input; write the answer, or how it was refused."""
    request = json.load(sys.stdin)
    answer: dict[str, Any]  # Any: JSON
    try:
        compile_fakes(request["call"], request["multiprocessors"])
        answer = {"kernels": [*describe_kernels()]}
    except (AssertionError, NotImplementedError, ValueError) as error:  # how the package refuses
        answer = {"refusal": f"{type(error).__name__}: {error}"}
    Path(request["answer"]).write_text(json.dumps(answer))
