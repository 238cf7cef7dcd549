"""Formulas are masks and modifiers like others, on CPUs and as generated code.

Run with TRITON_INTERPRET=1, as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from attrs import frozen

import attn_graph as ag
from attn_graph import testing
from attn_graph.errors import GraphError
from attn_graph.ir.passes import simplify
from attn_graph.ir.terms.addends import Addend, Factor
from attn_graph.ir.terms.formulas import Formula
from attn_graph.lowering.codegen.device_code import Tracer
from attn_graph.lowering.fa4.dialect import trace_problem
from attn_graph.lowering.problem import sole
from attn_graph.masks.places import Block, Place
from attn_graph.nn.functional import attention
from attn_graph.planner.forms.content import CallContent, read_content, write_call

Step = Callable[[torch.Tensor, Place], torch.Tensor]
Run = Callable[[dict[str, torch.Tensor]], torch.Tensor]

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
S = 70  # positions: more than a tile
X = ag.TensorSpec((2, 3, S, 8), torch.float32)
MOST = 2.0**-18  # of scores up to 2^5, each rounded four times by up to 2^-20, and of weights
SIZES = {"b": 2, "h": 3, "i": S, "j": S}

MASKS = [
    Formula("i // 3 >= j // 3"),
    Formula("abs(2 * i - j) % 4 <= h"),
    Formula("max(i - 20, min(j, 2 * i)) % 7 <= max(h + 1, i - j)"),
    Formula("pages_i == pages_j + b", (("pages_i", "bi"), ("pages_j", "bj"))),
]
MODIFIERS = [
    Addend("real(slope) * (real(j - i) / 32.0 - 0.5)", (("slope", "bh"),)),
    Addend("real(u) * real(w) + real(n)", (("u", "i"), ("w", "j")), (("n", "hj"),)),
    Addend("exp2(-(real(h + 1) * 8.0 / 4.0)) * real(j - i)"),
    Addend("-tanh(real(abs(i - j) % 3))"),
    Addend("max(real(i - j) / 64.0, -0.25) * min(real(slope), 0.5)", (), (("slope", "h"),)),
    Factor("-0.5"),
    Factor("0.5 + real(min(max(i - j, j - i), 3) == 3) * 0.5"),
    Factor("real(n - i) / 64.0", integers=(("n", "hj"),)),
]
compiled = pytest.mark.skipif(CPU.interprets, reason="draws sizes of 0, which triton refuses")


@compiled
@pytest.mark.usefixtures("few_examples")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_formula_holds_what_a_mask_promises(mask: Formula) -> None:
    testing.check_mask(mask)


@compiled
@pytest.mark.usefixtures("few_examples")
@pytest.mark.parametrize("modifier", MODIFIERS, ids=str)
def test_a_term_holds_what_a_modifier_promises(modifier: Addend | Factor) -> None:
    testing.check_modifier(modifier)


def specs_of(needs: dict[str, ag.Data]) -> dict[str, ag.TensorSpec]:
    """A spec for each tensor that is read; real ones in float32."""
    return {
        name: ag.TensorSpec(
            tuple(SIZES[axis] for axis in data.axes),
            torch.float32 if torch.float32 in data.dtypes else torch.int64,
        )
        for name, data in needs.items()
    }


@compiled
@pytest.mark.parametrize("most", [3, 512, 4096])
def test_formulas_and_addends_take_sizes_by_name(most: int) -> None:
    T, N = ag.Dim("T", most=most), ag.Dim("N", most=most)
    q, k = (ag.TensorSpec((2, 3, n, 8), torch.float32) for n in (T, N))
    addend, mask = Addend("-tanh(real(abs(i - j) % 3))"), Formula("i // 3 >= j // 3")
    named = ag.graph(
        lambda q, k, v: ag.scores(q, k).then(addend).mask(mask).softmax()[0].weigh(v), q=q, k=k, v=k
    )
    plan = ag.compile(named, target=CPU)
    for rows, keys in ((3, 2), (0, 1), (1, 0)):
        tensors = [torch.randn(2, 3, n, 8) for n in (rows, keys, keys)]
        due = ag.evaluate(plan.at(T=rows, N=keys).graph, tensors)
        torch.testing.assert_close(plan(*tensors), due[0].float())


@compiled
@pytest.mark.parametrize("lengths", [(3, 0), (1, 1), (4, 7)])
def test_formulas_take_packed_sequences_of_few_rows(lengths: tuple[int, int]) -> None:
    """Their number is a size by name."""
    starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    q, k, v = torch.randn(3, sum(lengths), 2, 8).unbind()
    o = attention(q, k, v, q_starts=starts, kv_starts=starts, mask=MASKS[0])
    assert isinstance(o, torch.Tensor)
    parts = (x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v, o))
    for *given, found in zip(*parts, strict=True):
        due = attention(*given, mask=MASKS[0], backends=("math",))
        torch.testing.assert_close(found, due)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_under_a_formula_is_what_it_says(mask: Formula) -> None:
    specs, whole = specs_of(mask.needs), mask | ag.Window(0, 0)  # by hand an empty row is NaN
    graph = ag.attention(X, X, X, mask=whole, **specs)  # type: ignore[arg-type]  # by name

    def hide(s: torch.Tensor, at: Place) -> torch.Tensor:
        return s.masked_fill(~whole.keep(at), float("-inf"))

    assert largest_error(graph, specs, hide) <= MOST


@pytest.mark.parametrize("modifier", MODIFIERS, ids=str)
def test_attention_with_a_term_and_its_gradients_are_what_they_say(
    modifier: Addend | Factor,
) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, **data: ag.Value) -> ag.Value:
        s = ag.scores(q, k).then(modifier, *(data[name] for name in modifier.needs))
        return s.softmax()[0].weigh(v)

    specs = specs_of(modifier.needs)
    graph = ag.graph(attend, q=X, k=X, v=X, **specs)
    assert largest_error(graph, specs, modifier.change) <= MOST


def largest_error(graph: ag.Graph, specs: dict[str, ag.TensorSpec], step: Step) -> float:
    """How far a plan's output and gradients are off plain attention in float64.

    Of each in shares of its largest number, or of 1 where that is less.
    """
    names = ("q", "k", "v", *specs)
    tensors = dict(zip(names, testing.tensors_for(graph, 0), strict=True))
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    results = differentiate(lambda x: plan(**x), tensors)  # type: ignore[arg-type,return-value]
    exact = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    due = differentiate(lambda x: by_hand(x, step), exact)
    pairs = zip(results, due, strict=True)
    return max(testing.distance(x, ref) / max(1.0, float(ref.abs().max())) for x, ref in pairs)


def differentiate(run: Run, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of all real tensors."""
    real = {
        name: x.detach().requires_grad_() for name, x in tensors.items() if x.is_floating_point()
    }
    o = run({**tensors, **real})
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
    return o.detach(), *torch.autograd.grad(o, [*real.values()], do)


def by_hand(x: dict[str, torch.Tensor], step: Step) -> torch.Tensor:
    """Plain attention with a step on all scores."""
    B, H, M, _ = x["q"].shape
    at = Place.of(Block(range(B), range(H), range(M), H, M, M, x), range(M))
    return step(x["q"] @ x["k"].mT / X.shape[-1] ** 0.5, at).softmax(-1) @ x["v"]


@pytest.mark.parametrize("modifier", MODIFIERS, ids=str)
def test_the_text_of_a_graph_with_formulas_is_all_that_it_takes_to_read_it(
    modifier: Addend | Factor,
) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, **data: ag.Value) -> ag.Value:
        s = ag.scores(q, k).then(modifier, *(data[name] for name in modifier.needs))
        return s.mask(MASKS[0] | MASKS[1]).softmax()[0].weigh(v)

    graph = ag.graph(attend, q=X, k=X, v=X, **specs_of(modifier.needs))
    for each in (graph, simplify(graph), ag.vjp(graph)[1]):
        assert ag.parse(str(each)) == each


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_text_of_a_call_with_a_formula_names_nothing_of_a_user(mask: Formula) -> None:
    options = {"mask": mask & ag.Causal(), "modifiers": (), "backends": (), "avoid": ()}
    content = read_content(write_call((), options))
    assert isinstance(content, CallContent)
    assert content.own == ()
    assert content.restore()["mask"] == mask & ag.Causal()


def test_a_formula_skips_what_it_empties() -> None:
    mask = Formula("page_i == page_j", (("page_i", "i"), ("page_j", "j")))
    pages = torch.arange(1024) // 256
    counts = ag.tiles(mask, 1024, 1024, data={"page_i": pages, "page_j": pages})
    assert str(counts) == "64 tiles of 128 x 128: 48 empty, 0 mixed, 16 full"
    rows = ag.extend.Block(range(1), range(1), range(256, 300), 1, 1024, 1024)
    assert Formula("i // 256 == j // 256").span(rows) == ag.extend.Keys.between(256, 512)
    assert Formula("i // 256 == j // 256").surely(rows) == ag.extend.Keys.between(256, 512)
    assert mask.span(rows) == rows.all
    assert Formula("i // 256 == h").span(rows) == rows.all


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("i +", "is not an expression"),
        ("i + j", "is not a comparison of integers"),
        ("i / 2 < j", "is not a comparison of integers"),
        ("i < page", "page is not read; it may name abs, b, h, i, j"),
        ("i // j < 2", "the divisor must be a positive integer"),
        ("i < j < 3", "is not one comparison"),
        ("open(i) < 3", "is not read"),
        ("i(3) < j", "i(3) is not read"),
        ("abs < i", "abs is not read"),
        ("i < (2).bit_length", "is not read"),
    ],
)
def test_a_formula_that_is_none_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(GraphError, match=re.escape(problem)):
        Formula(text)


@pytest.mark.parametrize(
    ("elements", "problem"),
    [
        ([("t", "ji")], "t has axes 'ji'; write them in the order of 'bhij'"),
        ([("t", "ix")], "t has axes 'ix'"),
        ([("i", "j")], "'i' is not a name for a tensor"),
        ([("t", "i"), ("t", "j")], "'t' is not a name for a tensor, or is taken"),
    ],
)
def test_a_tensor_of_a_formula_has_a_name_and_axes_of_its_own(elements: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=re.escape(problem)):
        Formula("t < i", elements)
    with pytest.raises(GraphError, match=re.escape(problem)):
        Addend("real(t)", elements)


LARGE = [
    "i * 1000000000 >= j * 1000000000",
    "i * 3000000000 <= j * 2999999999 + 5000000000",
    "i * i * i * 40000 >= j * 3000000000 + 7",
    "(i - j) * 100000000 % 3000000000 <= 1500000000",
    "abs(j - i) * 46116860184273879 >= 46116860184273879 * 3",
    "i // 3 * 2000000000 - j * 700000000 >= h * 1000000000",
    "m * 100000 >= j * w",
    "abs(m) * 2 >= w + m",
]
LEAST = -(2**31)  # of 32 bits, which hold no negative of it


@pytest.mark.parametrize("text", LARGE)
def test_integers_are_of_64_bits_on_every_backend(text: str) -> None:
    elements = (("m", "bi"), ("w", "j")) if "w" in text else ()
    mask = Formula(text, elements)
    dtypes = {"m": torch.int32, "w": torch.int64}
    x = ag.TensorSpec((2, 3, S, 8), torch.float32)
    specs = {
        name: ag.TensorSpec(tuple(SIZES[axis] for axis in data.axes), dtypes[name])
        for name, data in mask.needs.items()
    }
    graph = ag.attention(x, x, x, mask=mask | ag.Window(0, 0), **specs)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    given = {
        name: torch.randint(LEAST, -LEAST, spec.shape, generator=random).to(spec.dtype)
        for name, spec in specs.items()
    }
    if elements:
        given["m"][:, ::3] = LEAST
    i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]
    b, h = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None]
    known = {"i": i, "j": j, "b": b, "h": h, "abs": abs}
    if elements:
        known |= {"m": given["m"].long()[:, None, :, None], "w": given["w"][None, :]}
    keep = eval(text, {}, known) | (i == j)  # in 64 bits
    q, k, v = torch.randn(3, 2, 3, S, 8, generator=random).unbind()
    s = (q @ k.mT * 8**-0.5).masked_fill(~keep, float("-inf"))
    o = ag.compile(graph, target=CPU, backends=(BACKEND,))(q, k, v, **given)
    torch.testing.assert_close(o, s.softmax(-1) @ v)


@pytest.mark.parametrize(
    "text", ["(i - j) * 100000000 % 3000000000 + abs(m)", "-m - j * 1000000000"]
)
def test_integers_of_an_addend_are_of_64_bits_too(text: str) -> None:
    addend = Addend(f"real({text}) * 1e-9", integers=(("m", "i"),))

    def attend(q: ag.Value, k: ag.Value, v: ag.Value, m: ag.Value) -> ag.Value:
        return ag.scores(q, k).then(addend, m).softmax()[0].weigh(v)

    x, m = ag.TensorSpec((1, 1, S, 8), torch.float32), ag.TensorSpec((S,), torch.int32)
    plan = ag.compile(ag.graph(attend, q=x, k=x, v=x, m=m), target=CPU, backends=(BACKEND,))
    q, k, v = torch.randn(3, *x.shape, generator=torch.Generator().manual_seed(0)).unbind()
    given = torch.full((S,), LEAST, dtype=torch.int32)
    known = {"i": torch.arange(S)[:, None], "j": torch.arange(S), "m": given.long()[:, None]}
    term = eval(text, {}, known | {"abs": abs}) * 1e-9
    torch.testing.assert_close(plan(q, k, v, given), (q @ k.mT * 8**-0.5 + term).softmax(-1) @ v)


@final
@frozen
class Own(ag.Mask):
    """A mask of a user's."""

    text: str

    def keep(self, at: Place) -> Any:  # Any: as `Mask.keep`
        return eval(self.text, {}, {"i": at.i, "j": at.j})


def test_integers_of_a_mask_of_ones_own_are_of_64_bits() -> None:
    text = "(i * 3000000000 >= j * 3000000000) & ((i // 9 | j) * 100000000 >= 3) | (i == j)"
    x = ag.TensorSpec((1, 1, S, 8), torch.float32)
    plan = ag.compile(ag.attention(x, x, x, mask=Own(text)), target=CPU, backends=(BACKEND,))
    q, k, v = torch.randn(3, *x.shape, generator=torch.Generator().manual_seed(0)).unbind()
    keep = eval(text, {}, {"i": torch.arange(S)[:, None], "j": torch.arange(S)})
    s = (q @ k.mT * 8**-0.5).masked_fill(~keep, float("-inf"))
    torch.testing.assert_close(plan(q, k, v), s.softmax(-1) @ v)


def texts_of(graph: ag.Graph) -> list[str]:
    """A mask's function in Triton's language, and in that of FlashAttention 4's kernels."""
    problem = sole(ag.vjp(graph)[0])
    assert problem is not None
    return [Tracer.of(problem).trace().keep, trace_problem(problem, with_mask=True).texts["keep"]]


def is_wide(text: str) -> bool:
    return "tl.int64" in text or "as_long" in text


@pytest.mark.parametrize(
    ("text", "most"), [("i * j >= 7", 46340), ("(i // 1000 | j) * 3 >= 7", 2**29 - 1)]
)
def test_integers_beyond_32_bits_are_widened_and_no_others(text: str, most: int) -> None:
    """most: of rows for which 32 bits are enough."""
    for rows in (most, most + 1):
        x = ag.TensorSpec((1, 1, rows, 8), torch.float32)
        for each in texts_of(ag.attention(x, x, x, mask=Own(text))):
            assert is_wide(each) == (rows > most)


@pytest.mark.parametrize("text", ["abs(m) >= j", "-m >= j", "m >= j"])
def test_the_least_number_of_32_bits_has_its_negative_in_64(text: str) -> None:
    m = ag.TensorSpec((S,), torch.int32)
    graph = ag.attention(X, X, X, mask=Formula(text, (("m", "i"),)), m=m)
    for each in texts_of(graph):
        assert is_wide(each) == (text != "m >= j")


def test_a_formula_that_goes_beyond_64_bits_is_refused() -> None:
    far = "abs(j - i) * 4611686018427387904"
    addend = Addend(f"real({far}) * 0.5")
    with pytest.raises(GraphError, match=re.escape(f"{far} may be beyond 64 bits")):
        ag.attention(X, X, X, mask=Formula(f"{far} >= 0"))
    with pytest.raises(GraphError, match=re.escape(f"{far} may be beyond 64 bits")):
        ag.graph(lambda q, k: ag.scores(q, k).then(addend), q=X, k=X)


@pytest.mark.parametrize("text", ["j <= 9223372036854775808", "i * (4611686018427387904 * 2) > j"])
def test_a_constant_beyond_64_bits_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match="beyond 9223372036854775807"):
        Formula(text)
    with pytest.raises(GraphError, match="beyond 9223372036854775807"):
        Addend(f"real({text.replace('<=', '+').replace('>', '+')})")


def test_a_factors_tensors_have_no_derivative_and_say_so() -> None:
    factor, t = Factor("real(t)", (("t", "h"),)), ag.TensorSpec((2,), torch.float32)
    x = ag.TensorSpec((1, 2, 5, 8), torch.float32)
    graph = ag.attention(x, x, x, modifiers=(factor,), t=t)
    assert len(ag.vjp(graph)[1].outputs) == 3
    with pytest.raises(ag.GraphError, match=r"vjp: no derivative by t: .* in `trains`"):
        ag.vjp(graph, wants=("t",))
    q, leaf = torch.randn(1, 2, 5, 8), torch.randn(2, requires_grad=True)
    o = ag.compile(graph)(q, q, q, t=leaf)
    with pytest.raises(ag.GraphError, match="no derivative by t"):
        torch.autograd.backward(o, torch.ones(x.shape))
