"""Plans and calls within torch.func's transforms: right derivatives, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import frozen
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import attn_graph as ag
from attn_graph.extend import Place
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from tests.support.tracing import Watch, traces

CPU = ag.Target.of("cpu")
X = ag.TensorSpec((2, 4, 5, 8), torch.float64)
Attend = Callable[..., Any]


@frozen
class Odd(ag.Mask):
    """Keys of batch entry b at places of the other parity: it counts batch entries."""

    def keep(self, at: Place) -> Any:  # Any: a tensor, or a number
        return (at.j + at.b) % 2 == 1


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, step by step, which PyTorch differentiates itself."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
    o: torch.Tensor = s.softmax(-1) @ v
    return o


FORMS: dict[str, Attend] = {
    "plan": ag.compile(ag.attention(X, X, X, mask=ag.Causal()), target=CPU),
    "call": lambda q, k, v: attention(q, k, v, mask=ag.Causal()),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def three(*lead: int) -> list[torch.Tensor]:
    return [randn(*lead, *X.shape) for _ in range(3)]


def loss(attend: Attend) -> Attend:
    return lambda *tensors: attend(*tensors).square().sum()


def mapped(attend: Attend) -> Any:
    q, k, v = three(3)
    return vmap(attend)(q, k, v), vmap(attend, (0, None, 0))(q, k[0], v)


def mapped_elsewhere(attend: Attend) -> Any:
    q, k, v = three(3)
    return vmap(attend, (1, None, None), out_dims=2)(q.movedim(0, 1).contiguous(), k[0], v[0])


def gradient(attend: Attend) -> Any:
    return grad(loss(attend), (0, 1, 2))(*three())


def gradient_by_parameters(attend: Attend) -> Any:
    """Of tensors that autograd records outside of the transform as well."""
    leaves = [t.requires_grad_() for t in three()]
    return [g.detach() for g in grad(loss(attend), (0, 2))(*leaves)]


def mapped_gradients(attend: Attend) -> Any:
    return vmap(grad(loss(attend), (0, 1, 2)))(*three(3))


def gradients_of_one_mapped(attend: Attend) -> Any:
    q, k, v = three(3)
    return vmap(grad(loss(attend), (0, 1, 2)), (0, None, None))(q, k[0], v[0])


def jacobian(attend: Attend) -> Any:
    q, k, v = three()
    return jacrev(lambda *t: attend(*t)[0, 0, :2, :2], (0, 1, 2))(q, k, v)


def pulled_back(attend: Attend) -> Any:
    q, k, v = three()
    o, pull, *_ = vjp(attend, q, k, v)
    return o, pull(q)


def outside_of_a_pull(attend: Attend) -> Any:
    """The outer derivative reads o alone: it is not a second one."""
    q, k, v = three()
    return grad(lambda x: vjp(attend, x, k, v)[0].sin().sum())(q)


def compiled_gradient(attend: Attend) -> Any:
    torch._dynamo.reset()
    return torch.compile(grad(loss(attend), (0, 1)), fullgraph=True, backend="aot_eager")(*three())


def compiled_map(attend: Attend) -> Any:
    torch._dynamo.reset()
    return torch.compile(vmap(attend), fullgraph=True, backend="aot_eager")(*three(3))


def second(attend: Attend) -> Any:
    q, k, v = three()
    return grad(lambda x: grad(lambda y: loss(attend)(y, k, v))(x).sum())(q)


def second_by_mode(attend: Attend) -> Any:
    """Under a dispatch mode a call goes through the operator, and autograd records it."""
    leaves = [t.requires_grad_() for t in three()]
    with Watch():  # type: ignore[no-untyped-call]  # torch's own
        o = attend(*leaves)
    (g,) = torch.autograd.grad(o.sin().sum(), leaves[:1], create_graph=True)
    return torch.autograd.grad(g.sum(), leaves)


def forward(attend: Attend) -> Any:
    q, k, v = three()
    return jvp(lambda x: attend(x, k, v), (q,), (q,))


def forward_jacobian(attend: Attend) -> Any:
    q, k, v = three()
    return jacfwd(lambda x: attend(x, k, v))(q)


def forward_over_reverse(attend: Attend) -> Any:
    q, k, v = three()
    return jvp(grad(loss(attend), (0, 1, 2)), (q, k, v), (k, v, q))


def reverse_over_forward(attend: Attend) -> Any:
    def moved(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = tensors
        found: torch.Tensor = jvp(attend, (q, k, v), (k, v, q))[1]
        return found.square().sum()

    return grad(moved, (0, 1, 2))(*three())


def penalty(attend: Attend) -> Any:
    """Double backward by all three at once."""
    slopes = grad(loss(attend), (0, 1, 2))
    return grad(lambda *t: sum(g.sin().sum() for g in slopes(*t)), (0, 1, 2))(*three())


def mapped_tangents(attend: Attend) -> Any:
    return vmap(lambda q, k, v: jvp(attend, (q, k, v), (k, v, q)))(*three(3))


def part_of_a_hessian(attend: Attend) -> Any:
    q, k, v = three()
    return hessian(lambda x: loss(attend)(torch.cat([q[:, :, :4], x], 2), k, v))(q[:, :, 4:])


TRANSFORMS = (
    *(mapped, mapped_elsewhere, gradient, gradient_by_parameters, mapped_gradients),
    *(gradients_of_one_mapped, jacobian, pulled_back, outside_of_a_pull),
    *(pytest.param(x, marks=traces) for x in (compiled_gradient, compiled_map)),
    *(second, second_by_mode, forward, forward_jacobian, forward_over_reverse),
    *(reverse_over_forward, penalty, mapped_tangents, part_of_a_hessian),
)


def compare(transform: Callable[[Attend], Any], attend: Attend, reference: Attend) -> None:
    """A transform of both, on equal tensors, gives the same."""
    results = []
    for each in (attend, reference):
        torch.manual_seed(0)
        results.append(transform(each))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_give_what_they_give_of_the_formula(
    transform: Callable[[Attend], Any], form: str
) -> None:
    if (transform, form) == (mapped_elsewhere, "plan"):  # each q has gaps then, as none declared
        with pytest.raises(ag.PlanMismatchError, match="q: expected"):
            compare(transform, FORMS[form], formula)
    else:
        compare(transform, FORMS[form], formula)


# Calls with more than q, k and v: each tensor mapped or not, and differentiated by or not.

TENSORS: dict[str, Callable[..., torch.Tensor]] = {
    "bias": lambda *n: randn(*n, 2, 4, 5, 5),
    "bias of all entries": lambda *n: randn(*n, 1, 4, 5, 5),
    "alibi": lambda *n: randn(*n, 4).abs(),
    "alibi of each entry": lambda *n: randn(*n, 2, 4).abs(),
    "sinks": lambda *n: randn(*n, 4),
    "keep": lambda *n: torch.rand(*n, 1, 1, 5, 5) < 0.7,
    "kv_lengths": lambda *n: torch.randint(1, 6, (*n, 2)),
    "table": lambda *n: randn(*n, 4, 5),
    "slope": lambda *n: randn(*n, 4),
}
READERS: dict[str, ag.Modifier] = {  # the steps that read some of them
    "table": ag.RelativeBias(5),
    "slope": ag.Addend("real(slope) * real(j - i)", (("slope", "h"),)),
}


def tensors_of(name: str, x: torch.Tensor) -> dict[str, Any]:
    """A tensor as an option of a call, with the step that reads it."""
    role = name.split()[0]
    return {role: x} | ({"modifiers": (READERS[role],)} if role in READERS else {})


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_vmap_is_a_loop_whatever_is_mapped(name: str, is_mapped: bool) -> None:
    q, k, v = three(3)
    x = TENSORS[name](3) if is_mapped else TENSORS[name]()

    def one(q: torch.Tensor, x: torch.Tensor) -> Any:
        o, lse = attention(q, k[0], v[0], align="top_left", stats=True, **tensors_of(name, x))
        return o.sin().sum() + lse[..., :1].sum()

    every = [(q[i], x[i] if is_mapped else x) for i in range(3)]
    dims = (0, 0 if is_mapped else None)
    torch.testing.assert_close(vmap(one, dims)(q, x), torch.stack([one(*a) for a in every]))
    floats = (0, 1) if x.is_floating_point() else (0,)
    due = [torch.stack(g) for g in zip(*(grad(one, floats)(*a) for a in every), strict=True)]
    torch.testing.assert_close(vmap(grad(one, floats), dims)(q, x), tuple(due))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("form", [{}, {"dropout": 0.5}])
def test_vmap_takes_no_entries_and_entries_of_nothing(
    shape: tuple[int, int], name: str, form: dict[str, float]
) -> None:
    entries, B = shape
    x = TENSORS[name]()[:B] if name in ("alibi of each entry", "kv_lengths") else TENSORS[name]()
    x = x[:B] if name == "bias" else x
    seeds = dict.fromkeys(("seed", "offset"), torch.tensor(1)) if form else {}

    def one(q: torch.Tensor) -> Any:
        options: dict[str, Any] = {**tensors_of(name, x), **seeds, **form}  # Any: of many types
        return attention(q, q, q, align="top_left", **options)

    q = randn(entries, B, 4, 5, 8)
    assert vmap(one)(q).shape == q.shape
    assert vmap(grad(lambda q: one(q).sum()))(q).shape == q.shape


def test_a_mask_that_counts_entries_counts_those_of_one_call() -> None:
    q, k, v = three(3)

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, mask=Odd())

    due = torch.stack([one(q[i], k[i], v[i]) for i in range(3)])
    torch.testing.assert_close(vmap(one)(q, k, v), due)


def test_dropout_under_vmap_is_as_randomness_says() -> None:
    q, k, v = three(3)

    def one(q: torch.Tensor) -> Any:
        return attention(q, k[0], v[0], dropout=0.5)

    same = vmap(one, randomness="same")(q[:1].expand_as(q))
    torch.testing.assert_close(same[0], same[1])
    different = vmap(one, randomness="different")(q[:1].expand_as(q))
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(one)(q)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": ag.Formula("j > b")},
        {"mask": ag.Causal() | ag.Formula("(i + b) % 3 == 0")},
        {"modifiers": (ag.Addend("real(b) * real(j)"),)},
        {"modifiers": (ag.Factor("real(b)"), ag.SoftCap(3.0))},
        {"modifiers": (ag.Formula("j > b"),)},
        {"mask": Odd()},
    ],
    ids=str,
)
def test_vmap_counts_the_entries_of_each_call_alone(options: dict[str, Any]) -> None:
    x = randn(3, *X.shape)
    attend: Attend = lambda q: attention(q, q, q, **options)  # noqa: E731
    torch.testing.assert_close(vmap(attend)(x), torch.stack([*map(attend, x)]))


# What is not there


def twice_forward(attend: Attend) -> Any:
    q, k, v = three()
    return jvp(lambda x: jvp(lambda y: attend(y, k, v), (x,), (k,))[1], (q,), (q,))


def thrice(attend: Attend) -> Any:
    q, k, v = three()
    slope = grad(lambda x: loss(attend)(x, k, v))
    return grad(lambda x: jvp(slope, (x,), (k,))[1].sum())(q)


REFUSED: dict[Callable[[Attend], Any], str] = {
    twice_forward: "jvp of a jvp",
    thrice: "third derivatives",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transform", REFUSED)
def test_derivatives_that_are_not_there_raise(
    transform: Callable[[Attend], Any], form: str
) -> None:
    with pytest.raises(ag.GraphError, match=REFUSED[transform]):
        transform(FORMS[form])


def test_tangents_of_what_requires_grad_are_refused_under_a_mode() -> None:
    q, k, v = (t.requires_grad_() for t in three())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, k.detach())
        with Watch(), pytest.raises(ag.GraphError, match="leave the mode"):  # type: ignore[no-untyped-call]  # torch's own
            FORMS["plan"](dual, k, v)
