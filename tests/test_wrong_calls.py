"""Calls as users of other libraries write them, and calls with a tensor in the wrong place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.masked import masked_tensor

import attn_graph as ag
from attn_graph.extend import Place, Store
from attn_graph.ir.arguments import EXTRA
from attn_graph.ir.inputs import scale_fault
from attn_graph.ir.storage.scaling import scales_fit
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from attn_graph.planner.arguments import DEFAULTS
from attn_graph.printing.words import LIBRARIES, SAID, nearest, use
from attn_graph.printing.words import OPTIONS as OPTION_WORDS
from tests.support.sources import ROOT
from tests.support.wrong_calls import WRONG as GATHERED

SPEC = ag.TensorSpec((2, 4, 8, 16), torch.float32)
POOL = ag.TensorSpec((5, 4, 8, 16), torch.float32)
Q, FLAGS, ROWS = torch.randn(2, 4, 8, 16), torch.ones(8, 8).bool(), torch.zeros(2, 8).int()
TABLE, LENGTHS = ag.TensorSpec((2, 3), torch.int32), ag.TensorSpec((2,), torch.int32)


class Unfrozen(ag.Mask):
    """A mask whose author left out @frozen."""

    width = 3

    def keep(self, at: object) -> torch.Tensor:
        raise NotImplementedError


class Undecorated(ag.Mask):
    """A mask whose author left out @frozen, with a field."""

    step: int


class OwnInit(ag.Mask):
    """A mask whose author wrote __init__ as of an ordinary class."""

    def __init__(self, step: int) -> None:
        self.step = step


@dataclass(frozen=True)
class Dataclass(ag.Mask):
    """A mask by dataclasses."""

    step: int

    def keep(self, at: Place) -> Any:  # Any: a tensor, or a symbol of one
        return at.j % self.step == 0


@dataclass  # pyright: ignore[reportGeneralTypeIssues]  # the mistake
class OpenDataclass(ag.Mask):
    """A mask by dataclasses, not frozen."""

    step: int


@attrs.define  # pyright: ignore[reportGeneralTypeIssues]  # the mistake
class Changeable(ag.Mask):
    """A mask by attrs, not frozen."""

    step: int


@attrs.frozen
class NoKeep(ag.Mask):
    """A mask without a definition."""


class UndecoratedStep(ag.Modifier):
    """A modifier whose author left out @frozen."""

    step: float


@dataclass(frozen=True)
class DataclassStep(ag.Modifier):
    """A modifier by dataclasses."""

    step: float


@attrs.frozen
class NoChange(ag.Modifier):
    """A modifier without a definition."""


@attrs.frozen
class Unplaced(ag.Mask):
    """A mask whose author read no place."""

    def keep(self, at: Place) -> torch.Tensor:
        return torch.ones(2, 8).bool()


def describe(**options: object) -> ag.Graph:
    return ag.attention(SPEC, SPEC, SPEC, **options)  # type: ignore[arg-type]  # wrong on purpose


def attend(**options: object) -> object:
    return attention(Q, Q, Q, **options)  # type: ignore[arg-type]  # wrong on purpose


def by_position(*others: Any) -> object:
    return attention(Q, Q, Q, *others)


def plan_for(target: str) -> ag.Plan:
    return ag.compile(describe(), target=target)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a mask by position": (
        lambda: by_position(ag.Causal()),
        "attention(q, k, v, mask=Causal())",
    ),
    "flags by position": (lambda: by_position(FLAGS), "attention(q, k, v, keep=keep)"),
    "a bias by position": (lambda: by_position(Q), "attention(q, k, v, bias=bias)"),
    "a scale by position": (lambda: by_position(0.5), "attention(q, k, v, scale=0.5)"),
    "None by position": (lambda: by_position(None), "attention(q, k, v, mask=Causal())"),
    "a modifier by position": (
        lambda: by_position(ag.SoftCap(3.0)),
        "attention(q, k, v, modifiers=(SoftCap(cap=3.0),))",
    ),
    "is_causal": (lambda: attend(is_causal=True), "no argument is_causal; use mask=Causal()"),
    "causal": (lambda: attend(causal=True), "no argument causal; use mask=Causal(), or Causal("),
    "softcap": (lambda: attend(softcap=30.0), "no argument softcap; use soft_cap="),
    "window_size": (lambda: attend(window_size=(4, 0)), "use mask=Window(left, right), with None"),
    "attn_mask": (lambda: attend(attn_mask=FLAGS), "no argument attn_mask; use keep="),
    "dropout_p": (lambda: attend(dropout_p=0.1), "no argument dropout_p; use dropout="),
    "softmax_scale": (lambda: attend(softmax_scale=0.1), "argument softmax_scale; use scale="),
    "return_lse": (lambda: attend(return_lse=True), 'argument return_lse; use stats=("lse",)'),
    "spec": (lambda: describe(is_causal=True), "no argument is_causal; use mask=Causal()"),
    "close": (lambda: attend(kv_length=ROWS), "no argument kv_length; did you mean kv_lengths?"),
    "far": (
        lambda: attend(zebra=ROWS, mask=ag.Causal()),
        "no argument zebra, and the mask reads no tensor of that",
    ),
    "several": (lambda: attend(causal=True, softcap=3.0), "no argument softcap; use soft_cap="),
    "scale": (lambda: attend(scale=Q), "scale <tensor of torch.float32 [2, 4, 8, 16]> must be"),
    "gradient": (lambda: attend(scale=torch.ones((), requires_grad=True)), "multiply q by it"),
    "mask": (lambda: attend(mask=FLAGS), "torch.bool [8, 8]> is not a mask; pass booleans"),
    "class": (lambda: attend(mask=ag.Causal), "is not a mask; write Causal(...), an instance"),
    "word": (
        lambda: attend(mask="causal"),
        "'causal' is not a mask; write a mask such as Causal()",
    ),
    "unfrozen": (lambda: attend(mask=Unfrozen()), "write @attrs.frozen above the class"),
    "undecorated": (
        lambda: Undecorated(4),
        "Undecorated is not decorated, so its fields are unknown; write @attrs.frozen above",
    ),
    "own init": (lambda: OwnInit(4), "OwnInit is not decorated, so its fields are unknown; write"),
    "dataclass": (
        lambda: attend(mask=Dataclass(4)),
        "Dataclass is a dataclass; masks and modifiers are attrs classes: replace @dataclass by",
    ),
    "open dataclass": (lambda: OpenDataclass(4), "OpenDataclass is a dataclass; masks and mod"),
    "changeable": (
        lambda: attend(mask=Changeable(4)),
        "Changeable can change after it is made; write @attrs.frozen above the class",
    ),
    "no keep": (lambda: attend(mask=NoKeep()), "NoKeep defines no keep(self, at)"),
    "no keep, seen": (lambda: NoKeep().picture(4, 4), "NoKeep defines no keep(self, at)"),
    "undecorated step": (lambda: UndecoratedStep(4), "UndecoratedStep is not decorated, so its"),
    "dataclass step": (
        lambda: describe(modifiers=(DataclassStep(4),)),
        "DataclassStep is a dataclass; masks and modifiers are attrs classes: replace @dataclass",
    ),
    "no change": (
        lambda: describe(modifiers=(NoChange(),)),
        "NoChange defines no change(self, s, at)",
    ),
    "unplaced": (
        lambda: attend(mask=Unplaced()),
        "keep gives booleans [2, 8] for a block of places",
    ),
    "segments": (
        lambda: attend(segments=ROWS),
        "[2, 8]> is not a pair of Tensor; write segments=(x, x)",
    ),
    "tensors": (lambda: ag.attention(Q, Q, Q), "or nn.functional.attention for tensors"),  # type: ignore[arg-type]  # wrong on purpose
    "here": (
        lambda: plan_for("cuda:7"),
        "to plan for a GPU of another machine, write its name: a100",
    ),
    "device": (
        lambda: ag.compile(describe(), target=torch.device("cuda")),  # type: ignore[call-overload]  # wrong on purpose
        'is not a Target, nor the name of one; write target="cuda", or Target.here("cuda") for',
    ),
    "mask function": (
        lambda: attend(mask=lambda b, h, i, j: i >= j),
        "is not a mask; a function is read by mask, tensors = ag.from_flex(function)",
    ),
    "mod with and": (
        lambda: ag.from_flex(lambda b, h, i, j: i >= j and i - j < 8),
        "use & and | in place of `and` and `or`, ~ in place of `not`, and torch.where in place",
    ),
    "mod with if, dense": (
        lambda: ag.from_flex(lambda b, h, i, j: i if i > j else j, dense=True, sizes=(1, 1, 8, 8)),
        "and torch.where in place of `if`",
    ),
    "mod of scores with if": (
        lambda: ag.from_flex_score(lambda s, b, h, i, j: s if i > j else -s),
        "and torch.where in place of `if`",
    ),
    "dtype as text": (
        lambda: ag.TensorSpec((2, 8), "float32"),  # type: ignore[arg-type]  # wrong on purpose
        "dtype 'float32' is a text; write torch.float32",
    ),
    "dtype as short text": (
        lambda: ag.TensorSpec((2, 8), "bf16"),  # type: ignore[arg-type]  # wrong on purpose
        "dtype 'bf16' is a text; write torch.bfloat16",
    ),
    "dtype of Python": (
        lambda: ag.TensorSpec((2, 8), float),  # type: ignore[arg-type]  # wrong on purpose
        "is not of PyTorch; write torch.float32",
    ),
    "sizes in a row": (
        lambda: ag.TensorSpec(2, 8, 64, 32),  # type: ignore[arg-type]  # wrong on purpose
        "4 arguments in a row; write the sizes in brackets and then the dtype, TensorSpec((2,",
    ),
    "three axes": (
        lambda: attention(Q[0], Q[0], Q[0]),
        "have 3 axes and need 4; write q[None], k[None], v[None], or give q_starts= if they are",
    ),
    "two axes": (lambda: attention(Q, Q[0, 0], Q), "write k[None, None]"),
    "one query": (
        lambda: attention(Q[:, :, :1], Q, Q, mask=ag.Causal()),
        "1 query and 8 keys need an alignment",
    ),
    "formula with and": (
        lambda: ag.Formula("i >= j and i - j < 8"),
        'is not one comparison; write Formula("i >= j") & Formula("i - j < 8")',
    ),
    "formula with | and ~": (
        lambda: ag.Formula("(i >= j) | ~(i - j < 8)"),
        'write Formula("i >= j") | (~Formula("i - j < 8"))',
    ),
    "formula with two ends": (
        lambda: ag.Formula("0 <= i - j < 8"),
        'write Formula("0 <= i - j") & Formula("i - j < 8")',
    ),
    "formula by other names": (
        lambda: ag.Formula("q_idx >= kv_idx"),
        "formula: q_idx is not read; write i",
    ),
    "a step without a spec": (
        lambda: ag.graph(lambda q, k, v: ag.scores(q, k).softmax()[0].weigh(v), q=SPEC, k=SPEC),
        "the function reads q, k, v, and specs are given for q, k; write one spec for each",
    ),
    "backend": (
        lambda: compile_any(backend="math"),
        "compile() has no argument backend; did you mean backends=('math',)?",
    ),
    "explained backend": (
        lambda: explain_any(backend="math"),
        "explain() has no argument backend; did you mean backends=('math',)?",
    ),
    "compile for a device": (lambda: compile_any(device="cpu"), "did you mean target='cpu'?"),
    "masked tensor": (
        lambda: scaled_dot_product_attention(masked_tensor(Q, Q > 0), Q, Q),
        "query is a masked tensor; pass x.get_data(), and the pairs that may attend as keep=",
    ),
    "masked bias": (
        lambda: attend(bias=masked_tensor(Q[..., :1], Q[..., :1] > 0)),
        "bias is a masked tensor; pass x.get_data()",
    ),
    "target": (lambda: plan_for("A100-SXM"), "'A100-SXM' is not known; known are cpu, cuda, a100"),
    "seed": (lambda: attend(dropout=0.5, seed=2**63, offset=0), "is not a 64-bit integer"),
    "pool": (
        lambda: ag.attention(SPEC, POOL, POOL, pages=TABLE, kv_lengths=LENGTHS),
        "if it is [pages, heads, rows, D], pass k.transpose(1, 2)",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_plans_refuse_masked_tensors_like_those_of_earlier_calls() -> None:
    plan = ag.compile(ag.attention(SPEC, SPEC, SPEC))
    plan(Q, Q, Q)
    with pytest.raises(ag.PlanMismatchError, match=r"k: .*is a masked tensor; pass x.get_data"):
        plan(Q, masked_tensor(Q, Q > 0), Q)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_how_to_write_it(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ag.GraphError, match=re.escape(text)):
        call()


@pytest.mark.parametrize("name", SAID)
def test_an_argument_of_other_libraries_is_said_by_ours(name: str) -> None:
    own = {*signature(ag.attention).parameters, *signature(attention).parameters}
    assert name not in own
    assert {*re.findall(r"\b([a-z_]+)=", SAID[name])} <= {*own, *EXTRA, *DEFAULTS}
    text = re.escape(f"attention() has no argument {name}; {use(SAID[name])}")
    for call in (describe, attend):
        with pytest.raises(ag.GraphError, match=text):
            call(**{name: 1})


def test_words_of_several_libraries_mean_one_thing() -> None:
    for table in LIBRARIES.values():
        for name in table:
            roots = {use(other[name])[:12] for other in LIBRARIES.values() if name in other}
            assert len(roots) == 1, name


def test_options_of_compile_are_known_wherever_they_are_written() -> None:
    for name in (*DEFAULTS, *OPTION_WORDS):
        with pytest.raises(ag.GraphError, match=r"attn_graph\.compile|; leave it out"):
            describe(**{name: 1})


def test_the_guide_for_users_of_other_libraries_has_their_words() -> None:
    text = (ROOT / "docs/guides/coming-from.md").read_text(encoding="utf-8")
    for library, table in LIBRARIES.items():
        assert f"| {library} |" in text
        for name in table:
            assert f"`{name}`" in text
    rows = re.findall(r"^\| (`[a-z_]+(?:`, `[a-z_]+)*`) \|", text, re.MULTILINE)
    known = {*SAID, *signature(ag.attention).parameters, *FOREIGN}
    for name in (name for row in rows for name in re.findall(r"`(\w+)`", row)):
        assert name in known, f"{name} of the guide is not among the words of messages"


FOREIGN = {  # of functions other than attention, and functions themselves
    *("device", "separate_full_blocks", "compute_dq_write_order", "dq_kv_order", "varlen_attn_out"),
    *("and_masks", "or_masks", "noop_mask", "softmax_lse"),
}


@pytest.mark.parametrize(
    "name",
    ["max_c", "ranks", "values", "graphs", "full", "head", "prefix", "cached", "outs", "scaling_"],
)
def test_a_name_that_is_near_none_gets_no_other_suggested(name: str) -> None:
    near = nearest(name, signature(ag.attention).parameters)
    assert not near or sum(a != b for a, b in zip(name, near, strict=False)) <= 1


@pytest.mark.parametrize(
    ("slip", "meant"),
    [("kv_length", "kv_lengths"), ("softmax_scal", "scale="), ("is_casual", "mask=Causal()")],
)
def test_a_slip_in_a_word_of_another_library_means_that_word(slip: str, meant: str) -> None:
    with pytest.raises(ag.GraphError, match=re.escape(meant)):
        attend(**{slip: ROWS})


PLACE = re.compile(r" \(at [^)]*:\d+\)")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wrong_calls_are_told_their_edit_in_one_sentence(golden: Callable[[object], None]) -> None:
    told = []
    for name, (call, edit) in GATHERED.items():
        with pytest.raises((ag.GraphError, ag.PlanMismatchError)) as caught:
            call()
        text = PLACE.sub("", str(caught.value))
        assert edit in text, name
        one = isinstance(caught.value, ag.GraphError)
        assert not one or len(caught.value.problems) == 1, f"{name}: {text}"  # type: ignore[attr-defined]
        told.append(f"[{name}] {text}")
    assert len(told) >= 150
    golden("\n".join(told) + "\n")


@attrs.frozen
class Stripes(ag.Mask):
    """A mask of a user's, well written."""

    width: int

    def keep(self, at: Place) -> Any:  # Any: a tensor, or a symbol of one
        return at.j % self.width == 0


KINDS = [
    *(ag.Band, ag.Causal, ag.Window, ag.Prefix, ag.KeyLengths, ag.QueryLengths, ag.SameSegment),
    *(ag.Keep, ag.KeepBlocks, ag.Formula, ag.SoftCap, ag.Bias, ag.Alibi, ag.RelativeBias),
    *(ag.Addend, ag.Factor, Stripes),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_or_modifier_of_other_arguments_shows_the_call(kind: Callable[..., object]) -> None:
    for given_ in ({"zebra": 1}, {"start": (0, 0), "whole": (8, 8), "zebra": 1}):
        with pytest.raises(ag.GraphError, match=rf"{kind.__name__}\(\).*; write {kind.__name__}\("):
            kind(**given_)
    assert "self" not in signature(kind).parameters


def test_masks_and_modifiers_print_as_they_are_written() -> None:
    values = [ag.RelativeBias(5), ag.KeepBlocks(4, 4), ag.Alibi(), Stripes(3), ag.SoftCap(2.0)]
    texts = ["RelativeBias(entries=5)", "KeepBlocks(rows=4, keys=4)", "Alibi()", "Stripes(width=3)"]
    assert [*map(repr, values)] == [*texts, "SoftCap(cap=2.0)"]
    assert repr(ag.Causal() | ~ag.Prefix(2)) == "(Causal() | ~Prefix(length=2))"


@given(st.data(), st.sampled_from(["BGN", "nPG", "TG"]))
def test_every_index_written_for_a_scale_fits_its_tensor(data: st.DataObject, axes: str) -> None:
    full = data.draw(st.tuples(*[st.integers(1, 3)] * (len(axes) + 1)))
    kept = data.draw(st.lists(st.sampled_from(range(len(axes))), unique=True).map(sorted))
    shape = tuple(data.draw(st.sampled_from((1, full[n]))) for n in kept)
    scale = torch.ones(shape + (1,) * data.draw(st.integers(0, 1)))
    fault = scale_fault("scale", (*scale.shape,), full, axes)
    assert bool(fault) != scales_fit((*scale.shape,), full)
    for code in fault.partition("; write ")[2].split(" or ") if fault else ():
        written = eval(code.partition(" if ")[0], {"scale": scale})
        assert scales_fit((*written.shape,), full), code


@pytest.mark.parametrize("name", ["H100", "h100", "B200", "CPU"])
def test_names_of_targets_are_known_in_any_case(name: str) -> None:
    assert ag.Target.of(name) == ag.Target.of(name.lower())


@pytest.mark.parametrize(
    ("size", "count"), [("1kb", 1000), ("1KB", 1000), ("2kib", 2048), ("3 b", 3)]
)
def test_units_of_bytes_are_known_in_any_case(size: str, count: int) -> None:
    graph = describe()
    assert ag.compile(graph, max_workspace=size) is ag.compile(graph, max_workspace=count)


def test_seeds_may_be_numbers() -> None:
    numbers, tensors = {"seed": 5, "offset": 2**40}, {}
    for name, number in numbers.items():
        tensors[name] = torch.tensor(number)
    assert attend(dropout=0.5, **numbers).equal(attend(dropout=0.5, **tensors))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "dropout= adds seed and offset: pass seed=torch.tensor(0), offset=torch.tensor(1)"),
        ({"seed": 1, "offset": torch.tensor(0)}, "got 1; pass torch.tensor(1)"),
    ],
)
def test_a_plan_with_dropout_is_told_what_its_seeds_are(given: dict[str, Any], told: str) -> None:
    plan = ag.compile(describe(dropout=0.5))
    with pytest.raises(ag.PlanMismatchError, match=re.escape(told)):
        plan(Q, Q, Q, **given)


@pytest.mark.parametrize("name", ["backend", "sizes in a row"])
def test_an_unknown_argument_is_a_type_error_as_in_python(name: str) -> None:
    with pytest.raises(TypeError):
        WRONG[name][0]()


def options_of(function: Callable[..., object]) -> list[str]:
    """The options of a function that are not tensors, sizes by name left out."""
    tensors = {*"qkv", *EXTRA, "graph", "sizes", "data"}
    return [name for name in signature(function).parameters if name not in tensors]


def with_option(function: Callable[..., object], name: str) -> Callable[[object], object]:
    """The function of one option, all else as usual."""
    return lambda x: function(**{name: x})


def compile_any(**options: Any) -> object:  # Any: wrong on purpose
    return ag.compile(describe(), **options)


def explain_any(**options: Any) -> object:  # Any: wrong on purpose
    return ag.explain(describe(), **options)


OPTIONS: tuple[tuple[Callable[..., object], Callable[..., object]], ...] = (
    (ag.attention, describe),
    (attention, attend),
    (ag.compile, compile_any),
    (ag.explain, explain_any),
)
FIRST: tuple[Any, ...] = (  # Any: wrong on purpose
    *(ag.compile, ag.explain, ag.vjp, ag.jvp, ag.parse, ag.Causal, ag.Window, ag.Prefix),
    *(ag.Formula, ag.Dim, Store, ag.Target.of, ag.Target.here),
)
WITH_TENSORS: dict[str, Callable[[object], object]] = {
    **{
        f"{call.__name__}({name}=)": with_option(call, name)
        for declared, call in OPTIONS
        for name in options_of(declared)
    },
    **{f"{function.__name__}()": function for function in FIRST},
}


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_no_error_prints_the_numbers_of_a_tensor(name: str) -> None:
    for tensor in (torch.tensor([[0.123456, -9.87], [1.5, 2.5]]), [torch.tensor([0.123456, 7.0])]):
        kinds = (ag.PlanMismatchError,) if "(out=)" in name else (ag.GraphError, TypeError)
        with pytest.raises(kinds) as caught:
            WITH_TENSORS[name](tensor)
        assert "0.123" not in str(caught.value)


def test_masks_of_ones_own_take_what_they_need_by_any_name() -> None:
    @attrs.frozen
    class Own(ag.Mask):
        """Keys that a tensor of a foreign name marks."""

        @property
        def needs(self) -> dict[str, ag.Data]:
            return {"causal": ag.Data("bj", torch.bool)}

        def keep(self, at: Place) -> Any:  # Any: a tensor, or a symbol of one
            return at.load("causal", at.b, at.j)

    kept = torch.ones(2, 8).bool()
    assert torch.equal(attend(mask=Own(), causal=kept), attend())  # type: ignore[arg-type]
