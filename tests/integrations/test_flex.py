"""FlexAttention's mods are read as masks and modifiers that do the same, or are errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

import attn_graph as ag
from attn_graph.errors import GraphError
from attn_graph.integrations.flex import from_flex, from_flex_score
from attn_graph.masks.places import Block, Place
from attn_graph.nn.functional import attention
from attn_graph.spec import INF

Mod = Callable[..., Any]  # Any: what FlexAttention calls
B, H, M, N = 2, 3, 7, 9
SIZES = (B, H, M, N)
DATA = {  # what mods capture: numbers of documents, lengths, flags and tables
    "documents": torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3]),
    "pages": torch.tensor([[0, 1, 1, 2, 2, 2, 0, 0, 1], [3, 3, 3, 1, 1, 0, 0, 2, 2]]),
    "lengths": torch.tensor([4, 8]),
    "heads": torch.tensor([1, 5, 3], dtype=torch.int32),
    "flags": torch.tensor([True, False, True, True, False, True, False, False, True]),
    "slopes": torch.tensor([0.5, 0.25, 0.125]),
    "chosen": torch.arange(45).reshape(9, 5) % 7 < 3,
    "table": torch.linspace(-1, 1, 81).reshape(9, 9),
    "ranks": torch.tensor([2, 0, 1, 5]),
    "fade": torch.tensor([0.5, 0.25, 2.0, -1.0, 3.0]),
    "offsets": torch.tensor([3, 1]),
    "shifts": torch.tensor([[0.5, 2.0, 1.5], [3.0, -1.0, 0.0]]),
}
LISTS = {name: DATA[name].tolist() for name in ("offsets", "shifts")}


def mod_of(text: str, arguments: str = "b, h, q, k", data: dict[str, Any] = DATA) -> Mod:
    """The mod of a text, which a failure then shows."""
    names = {"torch": torch, "inf": float("inf"), **DATA, **data}
    mod: Mod = eval(f"lambda {arguments}: {text}", names)
    return mod


def everywhere(data: dict[str, torch.Tensor], sizes: tuple[int, ...] = SIZES) -> Place:
    """All places of these sizes."""
    b, h, m, n = sizes
    return Place.of(Block(range(b), range(h), range(m), h, m, n, data), range(n))


def keeps(mask: ag.Mask, tensors: dict[str, torch.Tensor], N: int = N) -> torch.Tensor:
    """Which places a mask keeps, [B,H,M,N]. The tensors are those that it declares."""
    sizes = (B, H, M, N)
    types = {name: ag.TensorSpec.like(x).type for name, x in tensors.items()}
    full: dict[str, int] = dict(zip("bhij", sizes, strict=True))
    for name, data in mask.needs.items():
        assert not [*data.problems("test", name, types[name], full)]
    return torch.as_tensor(mask.resolved(M, N, ()).keep(everywhere(tensors, sizes))).expand(sizes)


# Masks

READ = {  # a mod, and what it is read as without sizes
    "q >= k": "Causal(align='top_left')",
    "~(q < k)": "Causal(align='top_left')",
    "(q >= k) & (q - k <= 3)": "(Causal(align='top_left') & "
    "Window(left=3, right=None, align='top_left'))",
    "abs(q - k) < 3": "Window(left=2, right=2, align='top_left')",
    "(q - k).abs() >= 3": "~Window(left=2, right=2, align='top_left')",
    "q + 2 >= k": "Window(left=None, right=2, align='top_left')",
    "q == k": "Window(left=0, align='top_left')",
    "(k < 3) | (q >= k)": "(Prefix(length=3) | Causal(align='top_left'))",
    "torch.logical_or(k <= 3, k > 5)": "(Prefix(length=4) | ~Prefix(length=6))",
    "pages[b, q] == pages[b, k]": "SameSegment()",
    "k < lengths[b]": "KeyLengths()",
    "lengths[b] <= q": "~QueryLengths()",
    "flags[k] & (q >= k)": "(Keep() & Causal(align='top_left'))",
    "chosen[q // 2, k // 4] & (q >= k)": "(KeepBlocks(rows=2, keys=4) & Causal(align='top_left'))",
    "chosen[q][k // 128]": "KeepBlocks(rows=1, keys=128)",
    "k >= torch.clamp(q - 4, min=0)": "Window(left=4, right=None, align='top_left')",
    "torch.minimum(q + 2, lengths[b]) > k.float()": "(Window(left=None, right=1, "
    "align='top_left') & KeyLengths())",
    "ranks[documents[q]] <= h": "Formula(text='tensor_i <= h', elements=(('tensor_i', 'i'),))",
    "h % 2 == 0": "Formula(text='h % 2 == 0')",
    "q // 4 >= k // 4": "Formula(text='i // 4 >= j // 4')",
    "documents[q] == documents[k]": "Formula(text='tensor_i == tensor_j', "
    "elements=(('tensor_i', 'i'), ('tensor_j', 'j')))",
}


@pytest.mark.parametrize("text", READ)
def test_a_closed_form_is_read_as_the_mask_of_its_name(text: str) -> None:
    mask, _ = from_flex(mod_of(text))
    assert str(mask) == READ[text]


def test_documents_without_a_batch_axis_are_segments_where_the_batch_is_known() -> None:
    mod = mod_of("documents[q] == documents[k]")
    mask, tensors = from_flex(mod, sizes=SIZES)
    assert mask == ag.SameSegment()
    assert tensors["q_segments"].shape == (B, M)
    assert tensors["kv_segments"].shape == (B, N)
    assert tensors["q_segments"].data_ptr() == DATA["documents"].data_ptr()
    assert torch.equal(keeps(mask, tensors), create_mask(mod, *SIZES, device="cpu"))


def test_masks_that_flex_joins_are_joined() -> None:
    mod = and_masks(or_masks(mod_of("q >= k"), mod_of("k < 2")), noop_mask)
    assert from_flex(mod) == (ag.Causal("top_left") | ag.Prefix(2), {})


integers: SearchStrategy[str] = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["q", "k", "b", "h", "q - k", "k - q"]),
        st.sampled_from(
            ["documents[q]", "documents[k]", "pages[b, q]", "pages[b][k]", "lengths[b]", "heads[h]"]
        ),
        st.sampled_from(
            ["documents[q + 2]", "documents[k - 3]", "pages[b][q - 1]", "pages[1, k]", "offsets[b]"]
        ),
        st.sampled_from(["ranks[documents[k]]", "ranks[k // 3]"]),
        st.builds("({} {} {})".format, integers, st.sampled_from("+-*"), constants),
        st.builds("({} {} {})".format, constants, st.sampled_from("+-*"), integers),
        st.builds("({} {} {})".format, integers, st.sampled_from("+-"), integers),
        st.builds("({} {} {})".format, integers, st.sampled_from(["//", "%"]), st.integers(1, 5)),
        st.builds("abs({})".format, integers),
        st.builds("torch.clamp({}, {}, max={})".format, integers, constants, constants),
        st.builds("torch.{}({}, {})".format, extremes, integers, integers),
        st.builds("({}).{}".format, integers, st.sampled_from(["float()", "to(torch.int64)"])),
        st.builds("(-{})".format, integers),
    )
)
extremes: SearchStrategy[str] = st.sampled_from(["maximum", "minimum"])
constants: SearchStrategy[int] = st.integers(-4, 12)
comparisons: SearchStrategy[str] = st.builds(
    "({} {} {})".format,
    integers,
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    st.one_of(constants, integers),
)
booleans: SearchStrategy[str] = st.deferred(
    lambda: st.one_of(
        comparisons,
        comparisons,
        st.sampled_from(["flags[q]", "flags[k]", "chosen[q // 2, k // 4]", "chosen[q, k // 3]"]),
        st.builds("({} {} {})".format, booleans, st.sampled_from("&|^"), booleans),
        st.builds("torch.logical_and({}, {})".format, booleans, booleans),
        st.builds("torch.where({}, {}, {})".format, booleans, booleans, booleans),
        st.builds("(~{})".format, booleans),
    )
)


@given(booleans, st.booleans())
def test_a_mask_keeps_what_the_mod_keeps(text: str, sized: bool) -> None:
    mod = mod_of(text)
    mask, tensors = from_flex(mod_of(text, data=LISTS), sizes=SIZES if sized else None)
    if not sized:  # what is not cut to a size is cut by the caller
        tensors = {name: cut(x, mask.needs[name]) for name, x in tensors.items()}
    assert torch.equal(keeps(mask, tensors), create_mask(mod, *SIZES, device="cpu"))


@pytest.mark.parametrize("at", ["k - 3", "k - 9", "q + 2", "documents[k]", "q // 2"])
def test_a_table_is_read_as_pytorch_indexes_it(at: str) -> None:
    mod = mod_of(f"documents[{at}] <= h")
    mask, tensors = from_flex(mod, sizes=SIZES)
    assert torch.equal(keeps(mask, tensors), create_mask(mod, *SIZES, device="cpu"))


def cut(x: torch.Tensor, data: ag.Data) -> torch.Tensor:
    """A tensor whose axes are no longer than these places."""
    full = dict(zip("bhij", SIZES, strict=True))
    return x[tuple(map(slice, data.shape(full)))]


@given(booleans)
@settings(max_examples=settings().max_examples // 4)  # two graphs each
def test_a_graph_under_a_mask_that_was_read_is_the_one_under_a_dense_mask(text: str) -> None:
    mod = mod_of(text)
    mask, tensors = from_flex(mod, sizes=SIZES)
    q, k, v = (ag.TensorSpec((B, H, L, 4), torch.float64) for L in (M, N, N))
    specs = {name: ag.TensorSpec.like(x) for name, x in tensors.items()}
    graph = ag.attention(q, k, v, mask=mask, **specs)  # type: ignore[arg-type]  # by name
    assert ag.parse(str(graph)) == graph
    x = dict(zip("qkv", (torch.randn(s.shape, dtype=s.dtype) for s in (q, k, v)), strict=True))
    keep = create_mask(mod, *SIZES, device="cpu")
    dense = ag.attention(q, k, v, keep=ag.TensorSpec.like(keep))
    (o,) = (ag.compile(graph, backends=["math"])(**x, **tensors),)
    torch.testing.assert_close(o, ag.compile(dense, backends=["math"])(**x, keep=keep))


UNREAD = {  # a mod that cannot be read, and what is said of it
    "documents[q + k] == 2": "reads a tensor at i + j, which is not b, h, q_idx or kv_idx, one of",
    "documents[q - 10] == 2": "reads a tensor [9] where it ends",
    "pages[2, q] == 2": "reads a tensor [2, 9] where it ends",
    "fade[q // 2, k // 2] > 2": "reads a tensor [5] at 2 indices",
    "q.to(torch.int8) == 2": "turns i into torch.int8",
    "(q >= k).float() > 0": "turns Causal(align='top_left') into torch.float32",
    "documents == q": "reads a tensor [9] at 0 indices",
    "torch.sin(q) > 0": "computes gt() of sin(real(i)), 0",
    "q // k > 1": "divides by j, which is not a positive number",
    "(q.bitwise_left_shift(1)) > k": "computes bitwise_left_shift() of i, 1",
    "torch.stack([q, k]).amax() > 2": "joins several terms into one",
    "torch.clamp(q, min=2.5) > k": "computes clamp() of i, 2.5",
    "torch.sum(q, dim=0) > k": "calls sum() with dim",
    "pages[q // 4, k // 4] == 2": "reads a tensor of torch.int64 by blocks of queries and of keys;",
    "documents.to(torch.int8)[q] == 2": "reads a tensor of torch.int8",
}


@pytest.mark.parametrize("text", UNREAD)
def test_what_cannot_be_read_is_an_error_that_names_it_and_the_way_out(text: str) -> None:
    way_out = re.escape("say dense=True and sizes=(B, H, M, N)")
    with pytest.raises(GraphError, match=f"{re.escape(UNREAD[text])}.*{way_out}"):
        from_flex(mod_of(text), sizes=SIZES)


def test_only_the_part_that_cannot_be_read_is_made_dense() -> None:
    mod = mod_of("(q >= k) & (documents[k - q] + q == 2) & ~(torch.sin(q) > 0) & flags[k]")
    mask, tensors = from_flex(mod, sizes=SIZES, dense=True)
    leaves = "Causal(align='top_left') & Keep() & ~Keep(name='keep_2') & Keep(name='keep_3')"
    assert str(mask) == f"({leaves})"
    assert torch.equal(keeps(mask, tensors), create_mask(mod, *SIZES, device="cpu"))


def test_a_mod_that_cannot_be_traced_is_made_dense_as_a_whole() -> None:
    class Choice(torch.nn.Module):
        def forward(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q + sum(range(q.dim())) >= k

    choice = Choice()
    mask, tensors = from_flex(choice, sizes=SIZES, dense=True)
    assert mask == ag.Keep()
    due = create_mask(lambda b, h, q, k: choice(b, h, q, k), *SIZES, device="cpu")
    assert torch.equal(keeps(mask, tensors), due)


@pytest.mark.parametrize("sizes", [None, (B, H), (B, H, None, N)])
def test_dense_tensors_need_sizes(sizes: Any) -> None:
    with pytest.raises(GraphError, match=r"say sizes=\(B, H, M, N\)"):
        from_flex(mod_of("torch.sin(q) > 0"), sizes=sizes, dense=True)


def test_a_mod_that_returns_a_number_is_an_error() -> None:
    with pytest.raises(GraphError, match=r"the mod returns i \+ 1, and has to say true or false"):
        from_flex(mod_of("q + 1"))


# Scores

STEPS = {  # a mod, and the modifiers that it is read as
    "30 * torch.tanh(s / 30)": "SoftCap(cap=30.0)",
    "torch.tanh(s * 0.25) * 4.0 + table[q, k]": "SoftCap(cap=4.0) Bias()",
    "s + table[k, q]": "Bias()",
    "s - slopes[h] * abs(q - k)": "Alibi(align='top_left')",
    "s + -slopes[h] * (k - q).abs()": "Alibi(align='top_left')",
    "s + slopes[h] * (k - q)": "Addend(text='real(tensor_h) * real(j - i)', "
    "elements=(('tensor_h', 'h'),))",
    "s + (q - k)": "Addend(text='real(i - j)')",
    "s + (q - k) / 4": "Addend(text='real(i - j) / real(4)')",
    "s - 3 / (k + 1) * 0.5": "Addend(text='-(real(3) / real(j + 1) * 0.5)')",
    "s + torch.exp2(-((h + 1) * 8.0 / 3)) * (k - q)": "Addend("
    "text='exp2(-(real(h + 1) * 8.0 / 3.0)) * real(j - i)')",
    "s - documents[q] * 0.5": "Addend(text='-(real(tensor_i) * 0.5)', "
    "integers=(('tensor_i', 'i'),))",
    "s": "",
    "s.double() * 2": "Factor(text='2.0')",
    "-s": "Factor(text='-1.0')",
    "8 * torch.tanh(s / 2)": "SoftCap(cap=2.0) Factor(text='4.0')",
    "s / slopes[h]": "Factor(text='1.0 / real(tensor_h)', elements=(('tensor_h', 'h'),))",
    "torch.where(q >= k, s, -inf)": "Causal(align='top_left')",
    "torch.where(q < k, -inf, s + table[q, k])": "Bias() Causal(align='top_left')",
    "s.masked_fill(q - k > 3, -inf)": "Window(left=3, right=None, align='top_left')",
    "s + torch.where(q >= k, 0.0, -inf)": "Causal(align='top_left')",
    "torch.where((q >= k) & (pages[b, q] == pages[b, k]), s * 2, torch.tensor(-inf)) + q": "Factor("
    "text='2.0') (Causal(align='top_left') & SameSegment()) Addend(text='real(i)')",
    "torch.where((q // 2 + k // 2) % 2 == 0, s, s * 0.5)": "Factor("
    "text='real((i // 2 + j // 2) % 2 == 0) + 0.5 * (1.0 - real((i // 2 + j // 2) % 2 == 0))')",
    "torch.where(q >= k, s * 2 + h, s * 2)": "Factor(text='2.0') "
    "Addend(text='real(h) * real(j <= i)')",
    "s + fade[k // 2]": "Bias()",
    "s + torch.clamp(q - k, max=2)": "Addend(text='real(min(i - j, 2))')",
}


@contextmanager
def double() -> Iterator[None]:
    """float64 as PyTorch's default, in which a mod then computes."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def each_place(mod: Mod) -> Mod:
    """A score_mod at every place, as FlexAttention evaluates it."""
    for axis in range(4, 0, -1):
        mod = torch.vmap(mod, (0, *(0 if n == axis else None for n in range(1, 5))))
    return mod


def check_steps(text: str) -> list[str]:
    """The steps that a score_mod is read as, which change scores as FlexAttention does."""
    mod = mod_of(text, "s, b, h, q, k")
    with double():
        steps, tensors = from_flex_score(mod_of(text, "s, b, h, q, k", LISTS), sizes=SIZES)
        s = torch.randn(SIZES)
        due = each_place(mod)(s, *map(torch.arange, SIZES))
        for step in steps:
            if isinstance(step, ag.Mask):
                own = {name: tensors[name] for name in step.needs}
                s = s.masked_fill(~keeps(step, own), -INF)
            else:
                s = step.resolved(M, N).change(s.clone(), everywhere(tensors))
        torch.testing.assert_close(s, due.expand(SIZES))
    return [*map(str, steps)]


@pytest.mark.parametrize("text", STEPS)
def test_a_score_mod_is_read_as_steps_that_do_the_same(text: str) -> None:
    assert " ".join(check_steps(text)) == STEPS[text]


terms = st.one_of(
    st.sampled_from(["table[q, k]", "slopes[h] * abs(q - k)", "fade[k // 2]", "shifts[b][h]"]),
    st.sampled_from(["slopes[h] * (k - q)", "table[h, k - 2] / 3", "1.5", "0.25 * offsets[b]"]),
    st.builds("torch.where({}, 0.5, -inf)".format, booleans),
    integers,
)
factors = st.sampled_from(["2", "-0.5", "slopes[h]", "shifts[b][h]", "(1 / (k + 1))", "h"])
step_texts: SearchStrategy[str] = st.deferred(
    lambda: st.one_of(
        st.just("s"),
        st.builds("({} {} {})".format, step_texts, st.sampled_from("+-"), terms),
        st.builds("({} * {})".format, step_texts, factors),
        st.builds("({} * {})".format, factors, step_texts),
        st.builds("({} / {})".format, step_texts, st.sampled_from([4, "(1 + slopes[h])"])),
        st.builds("(torch.tanh({} / 2) * {})".format, step_texts, st.sampled_from([2, -3])),
        st.builds("torch.where({}, {}, -inf)".format, booleans, step_texts),
        st.builds("torch.where({}, {}, {})".format, booleans, step_texts, step_texts),
        st.builds("{}.masked_fill({}, -inf)".format, step_texts, booleans),
        st.builds("{}.to({}.dtype)".format, step_texts, step_texts),
    )
)


@given(step_texts)
def test_steps_change_scores_as_the_mod_does(text: str) -> None:
    """But for scores that are hidden and then shown again, and for others at some places by a whole
    tensor or by what is no product or sum: these are refused."""
    event = ""
    try:
        check_steps(text)
    except GraphError as error:
        event = str(error)
    refused = "after it hides some by -inf|at some places only|takes other scores where"
    assert re.search(f"^$|{refused}|computes sub\\(\\) of the scores, -inf", event)


REFUSED = {
    "torch.where(q >= k, s, torch.finfo(torch.float32).min)": "puts -3.4",
    "torch.where(q >= k, s, -1e9)": "puts -1000000000.0 in place of some scores; a finite",
    "torch.where(q < k, torch.finfo(s.dtype).min, s)": "write -float('inf'), which is a mask",
    "torch.where(q >= k, s, torch.tanh(s))": "has SoftCap(cap=1.0) at some places only",
    "torch.where(chosen[q, k], s, s * 2)": "takes other scores where Keep() is true",
    "torch.tanh(torch.where(q >= k, s, -inf))": "computes tanh() of the scores after it hides some",
    "torch.where(q >= k, s, -inf) * -2": "multiplies the scores by -2 after it hides some by -inf",
    "s * torch.nn.Parameter(slopes)[h]": "real(tensor_h), of a tensor with a gradient, which no "
    "modifier gives; multiply q by it instead",
    "s * inf": "multiplies the scores by inf",
    "s.clamp(-5, 5)": "cap * torch.tanh(score / cap) is a soft cap",
    "s.to(torch.bfloat16)": "turns the scores into torch.bfloat16",
    "torch.sin(s)": "computes sin() of the scores",
    "s + s": "no modifier computes add() of the scores, the scores",
    "q + k": "returns i + j and no score",
    "s + float('inf')": "adds inf",
    "s + table[q - k, k]": "reads a tensor at i - j",
    "s + torch.exp(table[q, k])": "is not linear in tensor_ij",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_score_mod_that_is_no_modifier_is_an_error(text: str) -> None:
    with pytest.raises(GraphError, match=f"{re.escape(REFUSED[text])}.*modifier of your own"):
        from_flex_score(mod_of(text, "s, b, h, q, k"), sizes=SIZES)


def test_a_term_with_a_gradient_is_an_error_or_a_dense_bias_with_the_same_gradient() -> None:
    table = torch.nn.Parameter(torch.randn(2 * N))

    def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - table[q - k + N] * 0.5

    with pytest.raises(GraphError, match="reads a tensor at i - j"):
        from_flex_score(relative, sizes=SIZES)
    modifiers, tensors = from_flex_score(relative, sizes=SIZES, dense=True)
    assert [type(each).__name__ for each in modifiers] == ["Bias"]
    tensors["bias"].sum().backward()
    counts = torch.zeros(2 * N)
    for i in range(M):
        for j in range(N):
            counts[i - j + N] -= 0.5 * B * H
    torch.testing.assert_close(table.grad, counts)


def test_captured_tensors_keep_their_gradient() -> None:
    bias = torch.nn.Parameter(torch.randn(M, N))
    modifiers, tensors = from_flex_score(lambda s, b, h, q, k: s + bias[q, k] + bias[q, k] * 2)
    assert [getattr(step, "trains", None) for step in modifiers] == [("bias",), ("tensor_ij",)]
    for tensor in tensors.values():
        assert tensor.data_ptr() == bias.data_ptr()
        assert tensor.requires_grad


def test_a_table_longer_than_the_positions_names_both_edits_and_each_works() -> None:
    documents, x = torch.arange(100) // 10, torch.randn(1, 2, 64, 8)

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return documents[i] == documents[j]

    attend: Any = attention
    mask, tensors = ag.from_flex(mod)
    words = (
        r"tensor_i has 100 queries .* and q has 64; pass tensor_i\[:64\]; from_flex cuts .* sizes="
    )
    with pytest.raises(ag.GraphError, match=words):
        attend(x, x, x, mask=mask, **tensors)
    due = attend(x, x, x, mask=mask, **{name: t[:64] for name, t in tensors.items()})
    cut, short = ag.from_flex(mod, sizes=(None, None, 64, 64))
    o = attend(x, x, x, mask=cut, **short)
    assert o.equal(due)
