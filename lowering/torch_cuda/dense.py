"""PyTorch's own fused attention kernels for GPUs, each a backend: flash, efficient and cuDNN.

Limits are from PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and from the checks
in the kernels themselves, as of 2.13. Cases supported only by PyTorch's padding or copies are
refused: tensors are read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, final

import torch
from attrs import Factory, field, frozen

from attn_graph.errors import PlanMismatchError, Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Bias, Modifier
from attn_graph.ir.transforms.gradient_ops import clear_blind_rows
from attn_graph.kernels import fused_cuda
from attn_graph.kernels.fused_cuda import Kernel
from attn_graph.lowering.backend import Backend, Executable
from attn_graph.lowering.libraries.forecast import forecast
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import (
    ALIGNED,
    BSHD,
    Problem,
    cotangent_bytes,
    cotangent_note,
    find_misplaced,
    has_flash_order,
    in_bshd,
    is_misaligned,
    on_boundary,
    relaid_bytes,
    relaid_note,
    select_outputs,
    tidy_strides,
)
from attn_graph.lowering.reasons import (
    different_heads,
    no_elements,
    no_gpu,
    node_reasons,
    other_dtype,
    other_equations,
    other_gradients,
    uneven_heads,
    wide_heads,
)
from attn_graph.lowering.request import Request
from attn_graph.lowering.through_lse import through_lse
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import KernelName
from attn_graph.masks.canonical import CAUSAL
from attn_graph.spec import HALF, MOST_INT32, NAMES, TensorSpec, dense_strides, memory_order

LEAST_SM, MOST_SM = 80, 121  # the range of sdp_utils.cpp, from sm_80 on
MOST_HEADS = 65535  # heads, and batch entries, are counted in axes y and z of CUDA's grid
MOST_SPLITS = 128  # of the keys in the flash kernel, for want of heads and queries
FEW_BLOCKS = 256  # of 64 queries: with as many no GPU of today splits the keys
WRAPS = 2**32  # elements of a bias: github.com/pytorch/pytorch/issues/187227
RIGHT = (9, 15, 1)  # github.com/pytorch/pytorch/issues/169849
TOO_WIDE = range(193, 225)  # head sizes of flash backwards too large for small shared memory
VARIES = "divides sums among programs by the size of the batch"
IMPLIED = ("head_widest", "head_multiple")  # limits of cuDNN: PyTorch's are as strict
ACTIVATED = {"FA3": (90, 99), "FA4": (90, 109)}  # replace PyTorch's flash on these sm
OF_FA4 = ("head_pair", "grouped_heads")  # not limits of PyTorch's own flash kernel
Reasons = Iterator[Reason]
Tensors = Sequence[torch.Tensor]


@final
@frozen
class Variant:
    """One kernel, and its limits.

    kernel: its name in Switches and in words. modifiers: the supported ones. widest: the largest
    head size, if there is one. keeps_order: True if o keeps the memory order of q. reasons:
    limits beyond the common ones of all three.
    """

    kernel: KernelName
    call: Kernel
    reasons: Callable[[Problem, Request], Reasons]
    modifiers: tuple[type[Modifier], ...] = ()
    dtypes: tuple[torch.dtype, ...] = HALF
    widest: int | None = None
    keeps_order: Callable[[TensorSpec], bool] = has_flash_order

    def why_not(self, request: Request) -> Reasons:
        """Every reason once: cuDNN, called by PyTorch, shares some of PyTorch's own."""
        yield from dict.fromkeys(self.against(request))

    def against(self, request: Request) -> Reasons:
        """Every reason against a graph, some perhaps twice."""
        yield from place_reasons(self, request)
        problem = request.facts.problem
        if problem is None:
            yield other_equations(request.graph)
            return
        yield from node_reasons(problem, self.modifiers)
        yield from kernel_size_reasons(self, problem)
        yield from kernel_operand_reasons(operands_by_name(problem))
        yield from self.reasons(problem, request)
        yield from other_gradients(problem, ("bias",) if Bias in self.modifiers else ())

    def lower(self, request: Request) -> Executable:
        """One call of the kernel, or of its backward."""
        problem = request.facts.problem
        assert problem is not None  # why_not said so
        call = TorchKernelRun(self, problem, request.graph)
        if problem.grad is None:
            return Executable(call.forward, 0, call.kept_forward(), tuple(call.notes()))
        return Executable(call.backward, 0, call.kept_backward(), tuple(call.notes()))


def place_reasons(variant: Variant, request: Request) -> Reasons:
    """Why the kernel does not run on a target."""
    target, options = request.target, request.options
    if not LEAST_SM <= target.sm <= MOST_SM:
        limit = f"runs on sm_{LEAST_SM} to sm_{MOST_SM}"
        yield Reason("architecture_range", limit, f"the target has sm_{target.sm}")
    yield from options.switched_off(variant.kernel)
    yield from options.varying(VARIES)


def kernel_size_reasons(variant: Variant, problem: Problem) -> Reasons:
    """Reasons against dtypes and sizes."""
    p = problem
    yield from other_dtype(p, variant.dtypes)
    yield from no_elements(p)
    if max(p.B, p.H) > MOST_HEADS:
        limit = f"supports up to {MOST_HEADS} batch entries and heads"
        yield Reason("grid", limit, f"B = {p.B}, H = {p.H}")
    if variant.widest is not None:
        yield from wide_heads(p, variant.widest)
    yield from uneven_heads(p, ALIGNED // p.dtype.itemsize)
    if p.low_scale and p.node.mask is None:
        limit = "takes maxima before it scales: needs a scale above 0"
        yield Reason("unmasked_scale", limit, f"it is {p.low_scale}")


def kernel_operand_reasons(operands: Mapping[str, TensorSpec]) -> Reasons:
    """Reasons against strides of operands, by name."""
    for name, spec in operands.items():
        if name in ("q", "k", "v", "bias") and not spec.unit_last:
            limit = "needs stride 1 along the last axis"
            yield Reason(f"stride.{name}", limit, f"{name} is {spec}")
        elif name in ("q", "k", "v", "bias") and is_misaligned(spec):
            limit = f"reads {ALIGNED} bytes at a time"
            yield Reason(f"misaligned.{name}", limit, f"rows of {name} {spec} start in between")


def operands_by_name(problem: Problem) -> dict[str, TensorSpec]:
    """The operands read by the kernel, by name."""
    own, results = problem.specs, {}
    if problem.grad is not None:
        given = problem.grad.split(problem.specs)
        own, results = given.own, {"o": given.o} | ({} if given.do is None else {"do": given.do})
    return dict(zip(problem.node.roles, own, strict=True)) | results


def flash_reasons(problem: Problem, request: Request) -> Reasons:
    """Limits of the flash kernel alone."""
    target, options = request.target, request.options
    p, impl = problem, options.switches.flash_impl
    if impl in ACTIVATED:
        yield from activated_reasons(impl, p, target)
    else:
        yield from replaced_reasons(impl)
    yield from different_heads(p)
    if p.node.mask == CAUSAL and p.M != p.N:
        limit = "aligns a causal mask bottom right: needs M = N for top left"
        yield Reason("top_left", limit, f"M = {p.M}, N = {p.N}", "{limit}, {actual}")
    if p.grad is not None and options.deterministic:
        yield by_switch_alone("flash")
    small = 86 <= target.sm <= 89 or target.sm >= 120
    if p.grad is not None and small and p.D in TOO_WIDE:
        limit = f"has no gradient for D from {TOO_WIDE[0]} to {TOO_WIDE[-1]} on sm_{target.sm}"
        yield Reason("head_gradient", limit, f"D = {p.D}")


def replaced_reasons(impl: str | None) -> Reasons:
    """A reason against an unknown flash kernel in place of PyTorch's own."""
    if impl is not None:
        way_out = "torch.nn.attention.restore_flash_attention_impl() takes it back"
        actual = f"{impl!r} is activated in its place; {way_out}"
        yield Reason("flash_impl", "knows the limits of PyTorch's own flash kernel", actual)


def activated_reasons(impl: str, problem: Problem, target: Target) -> Reasons:
    """Limits of FlashAttention 3 or 4, if PyTorch runs it in place of its own kernel: from
    torch/nn/attention/_fa3.py and _fa4.py, and from the packages."""
    from attn_graph.lowering.libraries.fa4_limits import Fa4Case, limit_reasons

    first, last = ACTIVATED[impl]
    if not first <= target.sm <= last:
        limit = f"runs {impl}, which is activated, on sm_{first} to sm_{last}"
        yield Reason("architecture_range", limit, f"the target has sm_{target.sm}")
    elif impl == "FA4":
        own = limit_reasons(Fa4Case(Lying.dense(problem), target.sm))
        yield from (reason for reason in own if reason.key in OF_FA4)
    if problem.low_scale and problem.node.mask is not None:
        limit = "takes maxima before it scales: needs a scale above 0"
        yield Reason("scale", limit, f"it is {problem.low_scale}")


def by_switch_alone(kernel: str) -> Reason:
    """A reason against deterministic=True, for a gradient made so only by PyTorch's switch."""
    return Reason(
        "deterministic",
        "has a deterministic gradient only while torch.use_deterministic_algorithms is on when it "
        f"runs, process-wide: the {kernel} kernel has no argument for it",
        "deterministic=True",
    )


def efficient_reasons(problem: Problem, request: Request) -> Reasons:
    """Limits of the memory-efficient kernel alone."""
    options = request.options
    p = problem
    if p.dtype == torch.float32 and options.precision != "tf32":
        limit = "computes float32 products on TF32 tensor cores, three each"
        yield Reason("tf32", limit, f'precision is "{options.precision}"')
    if p.G != p.H:
        limit = "needs as many key/value heads as query heads"
        yield Reason("grouped_heads", limit, f"G = {p.G}, H = {p.H}")
    for name, spec in zip("qkv", p.specs, strict=False):
        far = spec.shape[2] * spec.strides[2]
        if far > MOST_INT32:
            limit = f"counts within a head up to {MOST_INT32} elements"
            yield Reason(f"head_offsets.{name}", limit, f"{name} {spec} needs {far}")
    if p.grad is not None and options.deterministic:
        yield by_switch_alone("efficient")
    bias = operands_by_name(p).get("bias")
    if bias is not None:
        yield from bias_reasons(p, bias)


def bias_reasons(problem: Problem, bias: TensorSpec) -> Reasons:
    """The efficient kernel's limits on a bias and on its gradient."""
    p = problem
    if bias.dtype != p.dtype:
        limit = f"adds a bias of dtype {NAMES[p.dtype]}"
        yield Reason("bias_dtype", limit, f"it is {NAMES[bias.dtype]}")
    if bias.shape[3] != p.N:
        yield Reason("bias_keys", f"needs a bias for every key, N = {p.N}", f"it is {bias}")
    if (far := bias.shape[2] * bias.strides[2]) > WRAPS:
        limit = f"reads wrong rows of a bias beyond {WRAPS} elements of a head (pytorch#187227)"
        yield Reason("bias_rows", limit, f"{bias} needs {far}")
    if p.grad is None or not any(p.grad.wants[3:]):
        return
    whole = p.sizes
    if bias.shape != whole:
        limit = f"has the gradient of a bias of shape {list(whole)}"
        yield Reason("bias_gradient_shape", limit, f"it is {bias}")
    if p.grad.with_dlse:
        limit = "has no gradient of a bias through lse"
        yield Reason("bias_gradient_lse", limit, "the graph has")


def cudnn_reasons(problem: Problem, request: Request) -> Reasons:
    """Limits beyond cuDNN's own. cuDNN's depend on its version and come first."""
    from attn_graph.lowering.libraries.cudnn_case import ASSUMED, Case
    from attn_graph.lowering.libraries.cudnn_limits import exceeded_limits  # large, not for CPUs

    target, options = request.target, request.options
    p = problem
    if p.node.modifiers == ():
        loaded = target.cudnn_versions[0] or ASSUMED[0]
        own = ASSUMED[1]  # PyTorch has a frontend of its own inside
        lying = request.facts.once(Lying.of)
        assert lying is not None  # of a problem
        case = Case(lying, target.sm, loaded, own, False)
        against = request.facts.once(exceeded_limits, case)
        yield from (reason for reason in against if reason.key not in IMPLIED)
        if loaded < RIGHT and (p.M % 128 or p.N % 128):
            limit = f"is right for lengths off 128 from cuDNN {'.'.join(map(str, RIGHT))} on"
            actual = f"{'.'.join(map(str, loaded))}, M = {p.M}, N = {p.N}"
            yield Reason("off_128", limit, actual, "{limit}: {actual}")
    if options.deterministic:
        limit = "is not deterministic, as PyTorch calls it itself"
        yield Reason("deterministic", limit, "deterministic=True")
    if p.G != p.H:  # github.com/pytorch/pytorch/issues/193893
        limit = "computes grouped heads wrongly (pytorch#193893), so it needs"
        yield Reason("grouped_heads", f"{limit} G = H", f"G = {p.G}, H = {p.H}")
    if 1 in (p.M, p.N):  # N: sdp_utils.cpp; M: github.com/pytorch/pytorch/issues/138529
        limit = "needs two queries and two keys at least"
        yield Reason("single_position", limit, f"M = {p.M}, N = {p.N}")


@final
@frozen(eq=False)
class TorchKernelRun:
    """Runs a graph."""

    variant: Variant
    problem: Problem
    graph: Graph
    blind: bool = field(  # whether a query may see no key
        init=False, default=Factory(lambda call: call.problem.has_blind_rows, takes_self=True)
    )
    due: tuple[int, ...] = field(  # strides of o
        init=False, default=Factory(lambda call: call.output.strides, takes_self=True)
    )

    def operands(self, tensors: Tensors) -> Tensors:
        """The equation's operands among a call's tensors."""
        return [tensors[i] for i in self.graph.eqns[0].args]

    def fixed(self, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:  # Any: of three types
        """The arguments of both passes of the kernel besides the tensors."""
        p, bias = self.problem, given.get("bias")
        whole = None if bias is None else tidy_strides(bias.expand(p.sizes))
        return {"bias": whole, "causal": p.node.mask is not None, "scale": p.node.scale}

    def forward(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The outputs of the forward kernel, and o and lse for the backward."""
        p = self.problem
        given = dict(zip(p.node.roles, map(tidy_strides, self.operands(tensors)), strict=True))
        check_aligned(given)
        o, lse = self.variant.call.forward(given["q"], given["k"], given["v"], **self.fixed(given))
        if o.stride() != self.due and TensorSpec.like(o) != self.output:
            o = p.new_o(o.device).copy_(o)
        return [o if name == "o" else lse.contiguous() for name in self.graph.result_names], (
            o,
            lse,
        )

    def backward(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The gradients of the backward kernel, in the order of the outputs."""
        node, grad, call = self.problem.node, self.problem.grad, self.variant.call
        assert grad is not None
        read = grad.split([tidy_strides(x) for x in self.operands(tensors)])
        o, lse, dlse = read.o, read.lse, read.dlse
        own = tuple(on_boundary(x) if x.is_floating_point() else x for x in read.own)
        given = dict(zip(node.roles, own, strict=True))
        do = torch.zeros_like(o) if read.do is None else read.do
        if self.blind:
            do = tidy_strides(clear_blind_rows(do, lse))
            dlse = None if dlse is None else clear_blind_rows(dlse, lse)
        o, do = on_boundary(o), on_boundary(do)
        q, k, v = own[:3]
        fixed = self.fixed(given)
        gradients = call.backward(do, q, k, v, o, lse, wants_bias=any(grad.wants[3:]), **fixed)
        if dlse is not None:
            attend = partial(call.forward, **fixed)
            pull = partial(call.backward, wants_bias=False, **fixed)
            dq, dk = through_lse(attend, pull, q, k, lse, dlse, node.scale)
            gradients[0].add_(dq)
            gradients[1].add_(dk)
        wanted = [g for g, w in zip(gradients, grad.wants, strict=False) if w and g is not None]
        return select_outputs(self.graph, wanted), ()

    @property
    def output(self) -> TensorSpec:
        """o as it is handed out: dense, in the memory order of q."""
        shape, strides = self.problem.layout_of_o
        return TensorSpec(shape, self.problem.dtype, strides)

    def copied(self) -> dict[str, TensorSpec]:
        """Tensors copied by PyTorch or by this class: the kernel has another order."""
        p = self.problem
        q = p.specs[0]
        if p.grad is None:
            return {} if self.variant.keeps_order(q) else {"o": self.output}
        read = ((n, x) for n, x in operands_by_name(p).items() if n in ("o", "do"))
        own = TensorSpec(p.o.shape, p.dtype, dense_strides(p.o.shape, BSHD))
        return {n: x for n, x in read if x != own}

    def notes(self) -> Iterator[str]:
        yield f"one call of PyTorch's {self.variant.kernel} kernel"
        if self.problem.grad is not None and self.problem.grad.with_dlse:
            yield "the gradient through lse by one more call of each pass, with k in place of v"
        for name, spec in self.copied().items():
            how = "have no gaps" if memory_order(spec) == BSHD else "lie in another order"
            yield f"{name} {spec} is copied: the kernel's rows {how}"
        yield from cotangent_note(self.problem, "begins off 16 bytes")
        yield from relaid_note(self.problem, self.variant.keeps_order)

    def kept_forward(self) -> int:
        """Bytes allocated by PyTorch beside the outputs, at most."""
        p = self.problem
        rows = p.B * p.H * -(-p.M // 32) * 32
        blocks = p.B * p.H * -(-p.M // 64)
        splits = min(MOST_SPLITS, -(-p.N // 64)) if blocks < FEW_BLOCKS else 1
        parts = splits * rows * (p.E + 1) * 4 if self.variant is FLASH_KERNEL and splits > 1 else 0
        return 4 * rows * 3 + parts + sum(spec.type.bytes for spec in self.copied().values())

    def kept_backward(self) -> int:
        """Bytes allocated by PyTorch beside the gradients, at most: sums in float32, gradients of
        every query head, copies, and o and gradients of k in place of v."""
        p, grad = self.problem, self.problem.grad
        assert grad is not None
        rows, keys = (p.B * p.H * -(-n // 128) * 128 for n in (p.M, p.N))
        sums = 4 * rows * (p.D + 4) + (4 + p.dtype.itemsize) * keys * (p.D + p.E)
        more = sum(prod(x.shape) * x.dtype.itemsize for x in p.specs[:3]) * 3 * grad.with_dlse
        copies = sum(x.type.bytes for x in self.copied().values()) + cotangent_bytes(p)
        copies += relaid_bytes(p, self.variant.keeps_order)
        return sums * (1 + grad.with_dlse) + more + copies


def check_aligned(given: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanMismatchError for tensors off ALIGNED bytes; specs don't say."""
    if texts := find_misplaced((n, x) for n, x in given.items() if x.is_floating_point()):
        raise PlanMismatchError(*texts, way_out="")


FLASH_KERNEL = Variant("flash", fused_cuda.FLASH, flash_reasons, widest=256)
EFFICIENT_KERNEL = Variant(
    "efficient",
    fused_cuda.EFFICIENT,
    efficient_reasons,
    modifiers=(Bias,),
    dtypes=(*HALF, torch.float32),
    keeps_order=in_bshd,
)
CUDNN_KERNEL = Variant("cudnn", fused_cuda.CUDNN, cudnn_reasons, widest=128)
EFFICIENT = Backend(
    "torch_efficient",
    EFFICIENT_KERNEL.why_not,
    EFFICIENT_KERNEL.lower,
    real=True,
    no_device=no_gpu,
)
CUDNN = Backend(
    "torch_cudnn",
    CUDNN_KERNEL.why_not,
    CUDNN_KERNEL.lower,
    real=True,
    price=partial(forecast, name="torch_cudnn"),
    no_device=no_gpu,
)
