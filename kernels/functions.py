"""Functions called by the generated functions of masks and modifiers."""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from attn_graph.kernels.common import LOG2E


@triton.jit
def floor_div(a, b):
    """Python's a // b; Triton's rounds towards 0."""
    q = a // b
    r = a - q * b
    return q - ((r != 0) & ((r < 0) != (b < 0))).to(tl.int32)


@triton.jit
def tanh(x):
    """tanh to about 2 ulp in float32, after Cephes' tanhf.

    Near 0 it is a polynomial, since 1 - 2 e / (1 + e) cancels there.
    """
    x2 = tl.minimum(x * x, 1.0)
    near = -5.70498872745e-3
    near = near * x2 + 2.06390887954e-2
    near = near * x2 - 5.37397155531e-2
    near = near * x2 + 1.33314422036e-1
    near = near * x2 - 3.33332819422e-1
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = 1 - 2 * e / (1 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * x2 * near, tl.where(x < 0, -far, far))


@triton.jit
def fast_tanh(x):
    """The hardware's tanh, in one instruction: at most 2^-11 of the result off (PTX ISA). On GPUs
    of others, which have none, the precise one."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - Triton compiles one branch
        return tanh(x)
