"""Other runtimes than PyTorch, which `benchmarks/cpu.py` compares ours with where installed.

`pip install -c constraints.txt --group peers`. They compute forwards alone. Operands lie as each
likes them best, and are bound to it before anything is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from benchmarks.cpu_jobs import F16, F32, Job, Operands
from benchmarks.cpu_peers import Attend, Peer, dense_addend, is_just_causal, visible_places

Tensors = Mapping[str, torch.Tensor]
IR_VERSION, OPSETS = 11, {"": 23, "com.microsoft": 1}
ELEMENTS = {F32: 1, F16: 10, torch.int32: 6}  # the numbers that ONNX has for dtypes
ONNX, JAX = ("onnx", "onnxruntime"), ("jax",)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """[B,H,M,D] -> [B,M,H D]."""
    return x.transpose(1, 2).flatten(2).contiguous()


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B,M,H D] -> [B,H,M,D]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def bind_operator(
    kind: str, inputs: Tensors, outputs: Tensors, **attributes: Any
) -> Callable[[], object]:
    """One of onnxruntime's own operators on tensors, as a call that writes `outputs`; an input
    without elements is left out."""
    helper, given = import_module("onnx.helper"), {n: x for n, x in inputs.items() if x.numel()}
    names = [name if name in given else "" for name in inputs]
    node = helper.make_node(kind, names, [*outputs], domain="com.microsoft", **attributes)
    described = [
        [helper.make_tensor_value_info(n, ELEMENTS[x.dtype], x.shape) for n, x in each.items()]
        for each in (given, outputs)
    ]
    opsets = [helper.make_opsetid(*pair) for pair in OPSETS.items()]
    graph = helper.make_graph([node], kind, *described)
    session = open_session(
        helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
    )
    binding = session.io_binding()
    for bind, tensors in ((binding.bind_input, given), (binding.bind_output, outputs)):
        for name, x in tensors.items():
            bind(name, "cpu", 0, ELEMENTS[x.dtype], tuple(x.shape), x.data_ptr())
    return partial(session.run_with_iobinding, binding)


def open_session(model: bytes) -> Any:
    """What runs a model on as many threads as PyTorch has. They sleep once a run ends: waiting
    actively they would slow down whatever comes next."""
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def make_multi_head(job: Job, x: Operands) -> Attend:
    """Of as many key heads as query heads."""
    (B, H, M, _), causal = job.sizes, is_just_causal(job)
    inputs = {name: merge_heads(x[name]) for name in "qkv"}
    if (job.is_masked or job.alibi) and not causal:
        none, addend = torch.empty(0), dense_addend(job, x) + torch.zeros(1, 1, M, job.N)
        inputs |= {"bias": none, "padding": none, "addend": addend}
    o = torch.empty(B, M, H * job.E)
    run = bind_operator(
        "MultiHeadAttention", inputs, {"o": o}, num_heads=H, unidirectional=int(causal)
    )
    return partial(run_into, run, inputs, split_heads(o, H))


def make_grouped(job: Job, x: Operands) -> Attend:
    """Of keys in a cache, to which it adds those of the queries' own positions."""
    (B, H, M, D), N = job.sizes, job.N
    counts = torch.tensor(job.lengths or [N] * B, dtype=torch.int32)
    newest = {name: newest_rows(x[name], counts, M) for name in "kv"}
    inputs = {name: merge_heads(each) for name, each in ({"q": x["q"]} | newest).items()}
    inputs |= {"past_k": x["k"].clone(), "past_v": x["v"].clone()}
    inputs |= {"before": counts - 1, "longest": counts.amax()}
    o = torch.empty(B, M, H * D, dtype=job.dtype)
    outputs = {"o": o, "all_k": inputs["past_k"], "all_v": inputs["past_v"]}
    attributes = {"num_heads": H, "kv_num_heads": job.G, "softcap": job.soft_cap or 0.0}
    if job.left is not None:
        attributes["local_window_size"] = job.left + 1
    run = bind_operator("GroupQueryAttention", inputs, outputs, **attributes)
    return partial(run_into, run, inputs, split_heads(o, H))


def newest_rows(x: torch.Tensor, counts: torch.Tensor, M: int) -> torch.Tensor:
    """The last M of so many keys or values of each sequence [B,G,N,D] -> [B,G,M,D]."""
    return torch.stack([rows[:, n - M : n] for rows, n in zip(x, counts.tolist(), strict=True)])


def run_into(
    run: Callable[[], object], bound: Tensors, o: torch.Tensor, x: Operands
) -> torch.Tensor:
    """One call. bound: what it reads, which lives as long as this."""
    run()
    return o


def make_jax(job: Job, x: Operands) -> Attend:
    """JAX's own function, compiled by XLA: of dense masks."""
    jax = import_module("jax")
    own = {name: jax.dlpack.from_dlpack(x[name].transpose(1, 2).contiguous()) for name in "qkv"}
    causal, masks = is_just_causal(job), {}
    if job.alibi:
        masks["bias"] = jax.dlpack.from_dlpack(dense_addend(job, x).contiguous())
    elif (seen := visible_places(job, x)) is not None and not causal:
        masks["mask"] = jax.numpy.asarray(seen.expand(1, 1, -1, -1) if seen.ndim == 2 else seen)
    call = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal))

    def attend(_: Operands) -> torch.Tensor:
        o = call(own["q"], own["k"], own["v"], **masks).block_until_ready()
        return from_dlpack(o).transpose(1, 2)

    return attend


def fits_multi_head(job: Job) -> bool:
    """In float32, of heads that share no keys."""
    others = job.is_biased or job.soft_cap or job.lengths or job.r > 1 or job.dtype != F32
    return is_possible(job, ONNX) and not others


def fits_grouped(job: Job) -> bool:
    """Causal, from the first key or of one query; o of q's head size."""
    _, _, M, D = job.sizes
    others = job.is_biased or job.documents or job.keep or job.alibi or job.prefix or job.E != D
    causal = M == 1 or (job.causal and M == job.N and not job.lengths)
    suits = causal and not others and job.dtype in (F32, F16)
    return suits and is_possible(job, ONNX)


def fits_jax(job: Job) -> bool:
    """On all cores, which XLA takes whatever number of threads PyTorch has; o of q's head size, and
    not in float16, which its products on CPUs are not in."""
    cores = torch.get_num_threads() == len(os.sched_getaffinity(0))
    others = job.soft_cap or job.is_biased or job.sizes[3] != job.E or job.dtype == F16
    return is_possible(job, JAX) and cores and not others


def is_possible(job: Job, modules: tuple[str, ...]) -> bool:
    """Whether it is a forward, and these modules are there."""
    return not job.backward and all(map(find_spec, modules))


def versions() -> Iterator[tuple[str, str]]:
    """What is installed of the runtimes."""
    return ((name, metadata.version(name)) for name in (*ONNX, *JAX) if find_spec(name))


RUNTIMES = {
    "onnxruntime, multi-head": Peer(fits_multi_head, make_multi_head),
    "onnxruntime, grouped": Peer(fits_grouped, make_grouped),
    "jax": Peer(fits_jax, make_jax),
}
