"""`scaled_dot_product_attention` beside PyTorch's: what it takes, gives, draws and refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_graph as ag
from attn_graph.errors import TensorDtypeError, TensorError, TensorRankError
from attn_graph.nn.functional import scaled_dot_product_attention
from attn_graph.testing import rule

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Call = Callable[..., torch.Tensor]

sdpa: Call = scaled_dot_product_attention
pytorch: Call = F.scaled_dot_product_attention


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def cast(x: Any, dtype: torch.dtype) -> Any:  # Any: an argument of a call
    """A floating tensor in this dtype, as a leaf where it was one; anything else as it is."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(dtype).requires_grad_(x.requires_grad)


def by_pytorch(
    args: Sequence[Any], options: dict[str, Any], do: torch.Tensor, dtype: torch.dtype
) -> list[Any]:
    """PyTorch's plain formula in a dtype: o, and the gradients of what requires them."""
    args = [cast(x, dtype) for x in args]
    options = {name: cast(x, dtype) for name, x in options.items()}
    with sdpa_kernel(SDPBackend.MATH):
        return results(pytorch, args, options, do)


def leaves_of(args: Sequence[Any], options: dict[str, Any]) -> list[torch.Tensor]:
    every = [*args, *options.values()]
    return [x for x in every if isinstance(x, torch.Tensor) and x.requires_grad]


def results(
    call: Call, args: Sequence[Any], options: dict[str, Any], do: torch.Tensor
) -> list[Any]:
    """o, and the gradients of all that requires them."""
    o, leaves = call(*args, **options), leaves_of(args, options)
    gradients = torch.autograd.grad(o, leaves, do.to(o.dtype)) if leaves else ()
    return [o.detach(), *gradients]


def most(x: Any) -> float:
    """The largest finite number of a tensor, without its sign."""
    return float(x.detach().double().nan_to_num(posinf=0, neginf=0).abs().max()) if x.numel() else 0


def term_sizes(args: Sequence[Any], options: dict[str, Any], do: torch.Tensor) -> list[float]:
    """From above, the sum of the sizes of the terms of o and of each gradient.

    A row of p adds up to 1, each weight with the relative error that its score has absolutely, the
    sum of D products. |ds| = p |dp - delta| is at most p 2 E |do| |v|, so a row of ds adds up to
    no more; delta is made of o as it was rounded. A gradient adds that times a neighbour, for all
    rows and all that broadcasts from it.
    """
    q, k, v, c = (most(x) for x in (*args[:3], do))
    D, scale = args[0].shape[-1], abs(float(options.get("scale") or 1.0))
    wrong = 1 + scale * D * q * k
    size = wrong * (c + args[2].shape[-1] * 2 * c * v * max(1.0, scale) * max(1.0, q, k))
    if (dtype := args[0].dtype) in rule.HALF:
        size *= rule.UNIT[dtype] / rule.UNIT[torch.float32]
    shares = [do.shape[:-1].numel() * args[1].shape[-2] / max(1, x.numel()) for x in args[:3]]
    gradient = size * max(1.0, args[0].shape[-2], *shares)
    return [v * wrong, *(gradient for _ in leaves_of(args, options))]


def check(args: Sequence[Any], options: dict[str, Any]) -> torch.Tensor:
    """Compare o and gradients with PyTorch's by the accuracy rule; return o."""
    dtype = args[0].dtype
    low = torch.float32 if dtype == torch.float64 else dtype
    theirs = pytorch(*args, **options)
    do = torch.randn(theirs.shape).to(dtype)
    ours = results(sdpa, args, options, do)
    refs, lows = (by_pytorch(args, options, do, d) for d in (torch.float64, low))
    sizes = term_sizes(args, options, do)
    for n, (x, ref, near, size) in enumerate(zip(ours, refs, lows, sizes, strict=True)):
        terms = torch.full((1,), size, dtype=torch.float64)
        rule.Expectation(f"result {n}", ref, near.double(), terms, n > 0).check(x)
    o: torch.Tensor = ours[0]
    assert o.dtype == theirs.dtype
    return o


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return rand(*shape, dtype=dtype).requires_grad_()


def qkv(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """B 2, H 4, M 3, N 5, D and E 8."""
    return [leaf(2, 4, n, 8, dtype=dtype) for n in (3, 5, 5)]


def ranks() -> dict[str, list[torch.Tensor]]:
    return {
        "two axes": [leaf(3, 8), leaf(5, 8), leaf(5, 8)],
        "three": [leaf(4, 3, 8), leaf(4, 5, 8), leaf(4, 5, 8)],
        "five": [leaf(2, 3, 4, 3, 8), leaf(2, 3, 4, 5, 8), leaf(2, 3, 4, 5, 8)],
        "five, broadcast": [leaf(2, 1, 4, 3, 8), leaf(1, 3, 4, 5, 8), leaf(4, 5, 8)],
        "three and four": [leaf(4, 3, 8), leaf(2, 4, 5, 8), leaf(2, 4, 5, 8)],
        "four and three": [leaf(2, 4, 3, 8), leaf(4, 5, 8), leaf(4, 5, 8)],
        "four and two": [leaf(2, 4, 3, 8), leaf(5, 8), leaf(5, 8)],
        "batch of k and v 1": [leaf(2, 4, 3, 8), leaf(1, 4, 5, 8), leaf(1, 4, 5, 8)],
        "heads of k and v 1": [leaf(2, 4, 3, 8), leaf(2, 1, 5, 8), leaf(2, 1, 5, 8)],
        "heads of k alone 1": [leaf(2, 4, 3, 8), leaf(2, 1, 5, 8), leaf(2, 4, 5, 8)],
        "heads of q 1": [leaf(2, 1, 3, 8), leaf(2, 4, 5, 8), leaf(2, 4, 5, 8)],
        "E is not D": [leaf(2, 4, 3, 8), leaf(2, 4, 5, 8), leaf(2, 4, 5, 6)],
        "no query": [leaf(2, 4, 0, 8), leaf(2, 4, 5, 8), leaf(2, 4, 5, 8)],
        "no key": [leaf(2, 4, 3, 8), leaf(2, 4, 0, 8), leaf(2, 4, 0, 8)],
        "no batch": [leaf(0, 4, 3, 8), leaf(0, 4, 5, 8), leaf(0, 4, 5, 8)],
        "D is 0": [leaf(2, 4, 3, 0), leaf(2, 4, 5, 0), leaf(2, 4, 5, 8)],
        "E is 0": [leaf(2, 4, 3, 8), leaf(2, 4, 5, 8), leaf(2, 4, 5, 0)],
    }


@pytest.mark.parametrize("name", ranks())
def test_ranks_and_sizes_are_pytorch_s(name: str) -> None:
    args = ranks()[name]
    theirs = pytorch(*args)
    if name == "D is 0":  # PyTorch's plain formula divides by 0 where its fused one doesn't
        o = sdpa(*args)
        torch.testing.assert_close(o, theirs)
    else:
        o = check(args, {})
    assert o.shape == theirs.shape
    if name == "no key":
        assert not o.any()


def masks(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    flags = torch.rand(3, 5) < 0.6
    return {
        "booleans": flags,
        "a row of False": flags & (torch.arange(3) != 1)[:, None],
        "[H,M,N]": torch.rand(4, 3, 5) < 0.6,
        "[B,1,M,N]": torch.rand(2, 1, 3, 5) < 0.6,
        "[1,N]": torch.rand(1, 5) < 0.6,
        "[M,1]": torch.rand(3, 1) < 0.6,
        "numbers": rand(3, 5, dtype=dtype),
        "float32": rand(4, 3, 5),
        "a row of -inf": rand(3, 5, dtype=dtype).index_fill(0, torch.tensor([2]), -torch.inf),
        "numbers with gradient": leaf(2, 1, 3, 5, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", masks())
def test_masks_are_pytorch_s(name: str, dtype: torch.dtype) -> None:
    o = check(qkv(dtype), {"attn_mask": masks(dtype)[name]})
    if name == "a row of False":
        assert not o[:, :, 1].any()
    if name == "a row of -inf":
        assert not o[:, :, 2].any()


def test_a_mask_of_five_axes_fits_five() -> None:
    args = ranks()["five"]
    for shape in ((2, 3, 4, 3, 5), (3, 1, 3, 5), (2, 1, 1, 1, 5)):
        check(args, {"attn_mask": torch.rand(shape) < 0.6})


@pytest.mark.parametrize("length", [3, 5, 8])
def test_is_causal_counts_from_the_top_left(length: int) -> None:
    q, k, v = qkv()
    q = leaf(2, 4, length, 8)
    o = check((q, k, v), {"is_causal": True})
    assert torch.equal(o[:, :, 0], v[:, :, 0])


def test_is_causal_and_a_mask_are_joined() -> None:
    """As PyTorch's fused kernel joins them in silence, up to 2.13; its plain formula refuses both,
    and in 2.15 each kernel does."""
    args, flags, numbers = qkv(), torch.rand(3, 5) < 0.8, rand(3, 5)
    triangle = torch.ones(3, 5, dtype=torch.bool).tril()
    for mask, joined in ((flags, flags & triangle), (numbers, numbers.where(triangle, -torch.inf))):
        both = sdpa(*args, attn_mask=mask, is_causal=True)
        torch.testing.assert_close(both, check(args, {"attn_mask": joined}))
        try:
            theirs = pytorch(*args, attn_mask=mask, is_causal=True)
        except RuntimeError as error:
            assert "Explicit attn_mask should not be set when is_causal=True" in str(error)  # noqa: PT017  # or it gives the same
        else:
            torch.testing.assert_close(both, theirs)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="Explicit attn_mask"):
        pytorch(*args, attn_mask=flags, is_causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (2, 2), (1, 1), (2, 4), (4, 2), (1, 2)])
def test_enable_gqa_shares_heads(heads: tuple[int, int]) -> None:
    args = leaf(2, 4, 3, 8), leaf(2, heads[0], 5, 8), leaf(2, heads[1], 5, 8)
    check(args, {"enable_gqa": True})
    check([x[0].detach().requires_grad_() for x in args], {"enable_gqa": True})


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 2, torch.tensor(0.25)])
def test_any_finite_scale_is_allowed(scale: Any) -> None:
    check(qkv(), {"scale": scale})


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_strides_of_the_result_are_pytorch_s(dtype: torch.dtype) -> None:
    bshd = [rand(2, 5, 4, 8, dtype=dtype).transpose(1, 2) for _ in range(3)]
    q = rand(1, 4, 5, 8, dtype=dtype).expand(2, 4, 5, 8)
    for args in (bshd, [q, *bshd[1:]], [x[:1, :1] for x in bshd]):
        o, theirs = (f(*args) for f in (sdpa, pytorch))
        long = [axis for axis in range(4) if o.shape[axis] > 1]
        assert [o.stride(axis) for axis in long] == [theirs.stride(axis) for axis in long]
        torch.testing.assert_close(o, theirs, rtol=1e-2, atol=1e-2)


def test_the_arguments_are_pytorch_s() -> None:
    q, k, v = qkv()
    flags = torch.ones(3, 5, dtype=torch.bool)
    o = sdpa(q, k, v, flags, 0.0, False, scale=0.5, enable_gqa=True)
    assert o.shape == (2, 4, 3, 8)
    assert torch.equal(sdpa(query=q, key=k, value=v, scale=0.5), o)
    with pytest.raises(TypeError):
        sdpa(q, k, v, None, 0.0, False, 0.5)
    with pytest.raises(TypeError, match="query is a list"):
        sdpa(q.tolist(), k, v)


def test_meta_tensors_have_results() -> None:
    q, k, v = (x.detach().to("meta") for x in qkv())
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(3, 5, device="meta")}):
        o = sdpa(q, k, v, **options)
        assert (o.shape, o.device.type) == ((2, 4, 3, 8), "meta")


def test_autocast_casts_every_float_of_one_precision() -> None:
    args, mask = qkv(), rand(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        o = sdpa(*args, attn_mask=mask)
        theirs = pytorch(*args, attn_mask=mask)
        double = sdpa(*(x.double() for x in args))
        mixed = sdpa(args[0].half(), args[1].bfloat16(), args[2])
    assert (o.dtype, mixed.dtype, double.dtype) == (theirs.dtype, theirs.dtype, torch.float64)
    torch.testing.assert_close(o, theirs)


# Dropout


def test_dropout_of_everything_leaves_zeros_and_no_gradient() -> None:
    args = qkv()
    do = torch.full((2, 4, 3, 8), torch.inf)
    o, *gradients = results(sdpa, args, {"dropout_p": 1.0}, do)
    assert not any(x.any() for x in (o, *gradients))


def test_manual_seed_rules_dropout() -> None:
    args = [torch.ones(2, 4, 64, 8) for _ in range(3)]

    def draw() -> torch.Tensor:
        return sdpa(*args, dropout_p=0.25)

    torch.manual_seed(1)
    one, two = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), one)
    assert torch.equal(draw(), two)
    assert not torch.equal(one, two)
    assert abs(float(one.mean()) - 1) < 0.05
    state = torch.get_rng_state()
    sdpa(*args)
    sdpa(*args, dropout_p=1.0)  # drops all: nothing is drawn, as PyTorch draws nothing
    assert torch.equal(torch.get_rng_state(), state)


# What is refused


def with_mask(mask: torch.Tensor) -> Callable[[], object]:
    return lambda: sdpa(*qkv(), attn_mask=mask)


def changed(n: int, change: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Any:
    args = qkv()
    args[n] = change(args[n].detach())
    return lambda: sdpa(*args, **options)


def all_as(dtype: torch.dtype) -> Callable[[], object]:
    return lambda: sdpa(*(x.detach().to(dtype) for x in qkv()))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "one axis": (changed(0, lambda x: x[0, 0, 0]), TensorError, "1 axes and needs 2"),
    "one axis of a mask": (with_mask(torch.ones(5)), TensorRankError, "two axes"),
    "no axis of a mask": (with_mask(torch.ones(())), TensorRankError, "two axes"),
    "a mask that enlarges": (with_mask(torch.ones(3, 4, 3, 5)), TensorError, "not broadcast"),
    "a mask of five axes": (with_mask(torch.ones(1, 2, 4, 3, 5)), TensorError, "not broadcast"),
    "a mask of another size": (with_mask(torch.ones(3, 6)), TensorError, "not broadcast"),
    "integers as a mask": (
        with_mask(torch.ones(3, 5).int()),
        TensorError,
        "bool or torch.float32",
    ),
    "a wider mask": (
        with_mask(torch.ones(3, 5).double()),
        TensorError,
        "bool or torch.float32",
    ),
    "a bfloat16 mask": (
        with_mask(torch.ones(3, 5).bfloat16()),
        TensorError,
        "bool or torch.float32",
    ),
    "heads 4 over 2": (
        lambda: sdpa(rand(2, 4, 3, 8), *[rand(2, 2, 5, 8)] * 2),
        TensorError,
        "enable_gqa=True",
    ),
    "heads 4 over 3": (
        lambda: sdpa(rand(2, 4, 3, 8), *[rand(2, 3, 5, 8)] * 2, enable_gqa=True),
        TensorError,
        "no divisors",
    ),
    "groups of two axes": (
        lambda: sdpa(*[rand(3, 8)] * 3, enable_gqa=True),
        TensorRankError,
        "needs 3",
    ),
    "batches 2 and 3": (changed(1, lambda x: rand(3, 4, 5, 8)), TensorError, "not broadcast"),
    "k and v of other lengths": (changed(2, lambda x: x[:, :, 1:]), TensorError, "disagree"),
    "q and k of other head sizes": (changed(1, lambda x: x[..., 1:]), TensorError, "disagree"),
    "mixed dtypes": (changed(1, torch.Tensor.half), TensorError, "k is torch.float16, and q"),
    "devices": (changed(1, lambda x: x.to("meta")), TensorError, "k: expected .* on cpu"),
    "integers": (all_as(torch.int32), TensorError, "q, k and v are torch.int32"),
    "complex numbers": (all_as(torch.complex64), TensorDtypeError, "complex64"),
    "float8": (all_as(torch.float8_e4m3fn), TensorDtypeError, "float8"),
    "nested tensors": (
        lambda: sdpa(
            *[torch.nested.as_nested_tensor([rand(4, 3, 8)] * 2, layout=torch.jagged)] * 3
        ),
        TensorError,
        r"is nested with 4 axes and .*x.values\(\)",
    ),
    "dropout above 1": (changed(0, abs, dropout_p=1.5), TensorError, "between 0 and 1"),
    "dropout below 0": (changed(0, abs, dropout_p=-0.5), TensorError, "between 0 and 1"),
    "an infinite scale": (changed(0, abs, scale=torch.inf), TensorError, "finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_raises_as_in_pytorch_and_as_here(name: str) -> None:
    call, kind, text = REFUSED[name]
    for _ in range(2):
        with pytest.raises(kind, match=text) as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, ag.GraphError)


def test_errors_are_caught_as_pytorch_s_are() -> None:
    assert issubclass(TensorRankError, IndexError)
    assert issubclass(TensorDtypeError, NotImplementedError)


def test_its_parameters_are_those_of_pytorch() -> None:
    due = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    ours = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert [(x.name, x.kind is x.KEYWORD_ONLY) for x in ours] == [
        (x.name, x.kwarg_only) for x in due
    ]
    defaults = {x.name: x.default for x in ours if x.default is not x.empty}
    assert defaults == {x.name: x.default_value for x in due if x.has_default_value()}


# PyTorch's own samples


def samples(dtype: torch.dtype) -> list[Any]:
    pytest.importorskip("expecttest")  # PyTorch's testing code imports it
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    every = info.sample_inputs("cpu", dtype, requires_grad=True)
    return [s for s in every if not s.kwargs.get("dropout_p")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch's testing imports
@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_s_own_samples_pass(dtype: torch.dtype) -> None:
    every = samples(dtype)
    assert len(every) >= 13
    for sample in every:
        check([sample.input, *sample.args], sample.kwargs)
