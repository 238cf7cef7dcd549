"""Every public entry answers any value in words: an error of the library, never of some line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import nn
from attn_graph.machine.store import Unfit
from attn_graph.measuring.self_check import read_proof
from attn_graph.measuring.tuning import read_figures
from attn_graph.nn import functional as F
from attn_graph.planner.forms.content import write_call
from tests.support.command_line import run

Q, ROWS = torch.randn(1, 2, 6, 8), torch.randn(6, 2, 8)
STARTS = torch.tensor([0, 6], dtype=torch.int32)
X = ag.TensorSpec.like(Q)
GRAPH = ag.attention(X, X, X)
PLAN = ag.compile(GRAPH, target="cpu", store=False)
ERRORS = (ag.GraphError, ag.PlanMismatchError, ag.PlanTargetError, ag.NoBackendError)
JUNK: dict[str, Any] = {  # Any: what nobody should pass
    "None": None, "text": "x", "bytes": b"x", "null": "\0", "3": 3, "-1": -1, "2**70": 2**70,
    "-2**70": -(2**70), "1.5": 1.5, "nan": float("nan"), "inf": float("inf"), "1j": 1j,
    "True": True, "[]": [], "[[]]": [[]], "{}": {}, "set": {1}, "(1, 2, 3)": (1, 2, 3),
    "object": object(), "class": int, "function": len, "tensor": torch.zeros(2), "spec": X,
    "mask": ag.Causal(), "graph": GRAPH,
}  # fmt: skip
# Of these Python asks the truth, which a tensor of two numbers does not have.
SWITCHES = ("is_causal", "enable_gqa", "recognize_masks", "report", "dense")
Usual = dict[str, Any]  # Any: an argument for each parameter


def usual(fn: Callable[..., object], **given: object) -> Usual:
    """The parameters of a function that have defaults, and those that are given."""
    parameters = inspect.signature(fn).parameters.items()
    defaults = {n: p.default for n, p in parameters if p.default is not inspect.Parameter.empty}
    return defaults | given


def replace(**options: Any) -> object:  # Any: options of replace_sdpa
    with ag.replace_sdpa(**options):
        return torch.nn.functional.scaled_dot_product_attention(Q, Q, Q)


def within(block: Callable[..., Any]) -> Callable[..., None]:  # Any: a context
    def enter(value: object) -> None:
        with block(value):
            pass

    return enter


def traced(**given: Any) -> ag.Graph:  # Any: arguments of `scores`
    return ag.graph(lambda q: ag.scores(**({"q": q, "k": q} | given)), q=X)


SPECS, TENSORS = {"q": X, "k": X, "v": X}, {"q": Q, "k": Q, "v": Q}
KEYS = {"query": Q, "key": Q, "value": Q}
PACKED = {"query": ROWS, "key": ROWS, "value": ROWS, "cu_seq_q": STARTS, "cu_seq_k": STARTS}
ENTRIES: dict[str, tuple[Callable[..., object], Usual]] = {
    "attention": (ag.attention, usual(ag.attention, **SPECS)),
    "functional": (F.attention, usual(F.attention, **TENSORS)),
    "sdpa": (F.scaled_dot_product_attention, usual(F.scaled_dot_product_attention, **KEYS)),
    "varlen": (nn.varlen_attn, usual(nn.varlen_attn, **PACKED, max_q=6, max_k=6)),
    "module": (lambda **x: nn.Attention(**x)(Q, Q, Q), usual(nn.Attention)),
    "replace_sdpa": (replace, usual(ag.replace_sdpa)),
    "compile": (lambda **x: ag.compile(**x), {**usual(ag.compile), "graph": GRAPH, "store": False}),
    "explain": (lambda **x: ag.explain(**x), {**usual(ag.explain), "graph": GRAPH}),
    "evaluate": (ag.evaluate, usual(ag.evaluate, graph=GRAPH, tensors=(Q, Q, Q))),
    "tiles": (ag.tiles, usual(ag.tiles, mask=ag.Causal(), M=6, N=6)),
    "vmap": (ag.vmap, usual(ag.vmap, graph=GRAPH, size=2)),
    "vjp": (ag.vjp, usual(ag.vjp, graph=GRAPH)),
    "jvp": (ag.jvp, {"graph": GRAPH}),
    "parse": (ag.parse, {"text": str(GRAPH)}),
    "graph": (lambda spec: ag.graph(lambda q: ag.scores(q, q), q=spec), {"spec": X}),
    "graph of": (lambda fn: callable(fn) or ag.graph(fn, q=X), {"fn": len}),
    "scores": (traced, {"q": None, "k": None, "scale": 1.0}),
    "sole": (ag.extend.sole, {"graph": GRAPH}),
    "spec": (ag.TensorSpec, usual(ag.TensorSpec, shape=(1, 2, 6, 8), dtype=torch.float32)),
    "like": (ag.TensorSpec.like, {"tensor": Q}),
    "Dim": (ag.Dim, {"name": "T", "most": 4, "classes": ()}),
    "classes": (ag.Dim, {"name": "T", "classes": (2, 4)}),
    "doubling": (ag.doubling, {"least": 1, "most": 4}),
    "Window": (ag.Window, {"left": 1, "right": 0, "align": None}),
    "Causal": (ag.Causal, {"align": None}),
    "Prefix": (ag.Prefix, {"length": 1}),
    "Keep": (ag.Keep, {"name": "keep"}),
    "Data": (ag.Data, {"axes": "ij"}),
    "Formula": (ag.Formula, {"text": "i - j < 3", "elements": ()}),
    "Addend": (ag.Addend, {"text": "real(i - j)", "elements": (), "integers": ()}),
    "picture": (ag.Causal().picture, {}),
    "here": (lambda device: ag.Target.here(device), {"device": None}),
    "of": (ag.Target.of, {"name": "cpu"}),
    "Store": (ag.extend.Store, {"folder": "store", "most": 1}),
    "from_flex": (ag.from_flex, usual(ag.from_flex, mask_mod=lambda b, h, i, j: i >= j)),
    "from_flex_score": (
        ag.from_flex_score,
        usual(ag.from_flex_score, score_mod=lambda s, b, h, i, j: s),
    ),
    "prefer": (within(ag.prefer), {"value": "math"}),
    "avoid": (within(ag.avoid), {"value": "math"}),
    "plan": (lambda q, k, v: PLAN(q, k, v=v), TENSORS),
    "check": (lambda q, k, v: PLAN.check(q, k, v), TENSORS),
    "verify": (lambda q, k, v: PLAN.verify(q, k, v), TENSORS),
    "cost": (lambda x: PLAN.cost(x=x), {"x": Q}),
    "at": (lambda x: PLAN.at(x=x), {"x": 3}),
}


def raised_by(call: Callable[..., object], arguments: Usual) -> BaseException | None:
    """What a call raises; None where it raises nothing."""
    try:
        call(**arguments)
    except BaseException as error:
        return error
    return None


def is_answer(error: BaseException | None) -> bool:
    """Whether an error is one of the library's. A TypeError is PyTorch's for anything that is not
    a tensor."""
    if isinstance(error, TypeError):
        return str(error).startswith("attention: ")
    return error is None or (isinstance(error, ERRORS) and bool(str(error)))


@pytest.mark.parametrize("entry", ENTRIES)
def test_any_value_of_one_argument_is_answered_in_words(entry: str) -> None:
    fn, given_ = ENTRIES[entry]
    for name in given_:
        for text, value in JUNK.items():
            if name not in SWITCHES or not isinstance(value, torch.Tensor):
                error = raised_by(fn, {**given_, name: value})
                assert is_answer(error), f"{entry}({name}={text}) raises {error!r}"


@given(st.data())
def test_any_values_of_several_arguments_are_answered_in_words(data: st.DataObject) -> None:
    fn, given_ = ENTRIES[data.draw(st.sampled_from([*ENTRIES]))]
    names = data.draw(st.sets(st.sampled_from([*given_] or ["q"]), max_size=3)) & given_.keys()
    junk = {name: JUNK[data.draw(st.sampled_from([*JUNK]))] for name in sorted(names)}
    if any(isinstance(junk.get(name), torch.Tensor) for name in SWITCHES):
        return
    error = raised_by(fn, given_ | junk)
    assert is_answer(error), f"{junk} raise {error!r}"


# Numbers that are tensors


NUMBERS: dict[str, Callable[[Any], object]] = {  # Any: a number, or a tensor
    "scale of a graph": lambda x: ag.attention(X, X, X, scale=x),
    "scale of a step": lambda x: traced(scale=x),
    "scale": lambda x: F.attention(Q, Q, Q, scale=x),
    "scale of sdpa": lambda x: F.scaled_dot_product_attention(Q, Q, Q, scale=x),
    "scale of sequences": lambda x: nn.varlen_attn(ROWS, ROWS, ROWS, STARTS, STARTS, 6, 6, scale=x),
    "scale of a module": lambda x: nn.Attention(scale=x)(Q, Q, Q),
    "scale, mapped": lambda x: torch.func.vmap(lambda q: F.attention(q, q, q, scale=x))(Q[None]),
    "cap of a graph": lambda x: ag.attention(X, X, X, soft_cap=x),
    "cap": lambda x: F.attention(Q, Q, Q, soft_cap=x),
    "cap of a module": lambda x: nn.Attention(soft_cap=x)(Q, Q, Q),
    "rate of a graph": lambda x: ag.attention(X, X, X, dropout=x),
    "rate": lambda x: F.attention(Q, Q, Q, dropout=x),
    "rate of a module": lambda x: nn.Attention(dropout=x)(Q, Q, Q),
    "rate of sdpa": lambda x: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=x),
}


@pytest.mark.parametrize("entry", NUMBERS)
def test_a_number_that_is_differentiated_is_refused(entry: str) -> None:
    """Its gradient would be lost; so in forward mode, and under torch.func."""
    call = NUMBERS[entry]
    way_out = {"scale": "multiply q by it", "cap": "modifier of your own", "rate": "dropout|rate"}

    def attend(x: torch.Tensor) -> torch.Tensor:
        call(x)
        return x

    number = torch.tensor(0.5)
    calls = (
        lambda: call(number.clone().requires_grad_()),
        lambda: call(torch.nn.Parameter(torch.tensor([0.5]))),
        lambda: torch.func.grad(attend)(number),
        lambda: torch.func.jvp(attend, (number,), (number,)),
    )
    for each in calls:
        with pytest.raises((ag.GraphError, TypeError), match=way_out[entry.split()[0].rstrip(",")]):
            each()


@given(st.sampled_from(["scale", "soft_cap"]), st.lists(st.floats(0.1, 4.0), min_size=2))
@example("scale", [0.5, 2.0, 0.5])
def test_a_tensor_of_one_number_counts_by_what_it_holds_now(
    option: str, numbers: list[float]
) -> None:
    """A call is remembered by its options, and this one is written between the calls."""
    held = torch.zeros((), dtype=torch.float64)
    for number in numbers:
        held.fill_(number)
        due = F.attention(Q, Q, Q, **{option: number})  # type: ignore[arg-type]  # one of two
        o = F.attention(Q, Q, Q, **{option: held})  # type: ignore[arg-type]  # as above
        assert isinstance(o, torch.Tensor)
        assert isinstance(due, torch.Tensor)
        assert torch.equal(o, due)


JUNK_STEP: Any = ()
DEEP = "[" * 10**5 + "]" * 10**5
FAR = "9" * 5000


@pytest.fixture
def usual_depth() -> Iterator[None]:
    """Python's own limit of calls, which other libraries raise for their process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_depth")
def test_texts_nested_deeper_than_python_calls_are_refused_in_words() -> None:
    for nested in ("~" * 600, "(" * 90 + "~" * 600):
        text = str(ag.attention(X, X, X, mask=ag.Causal())).replace("mask=", f"mask={nested}")
        with pytest.raises(ag.GraphError, match=r"nested too deeply|can't be read"):
            ag.parse(text.replace("Causal()", "Causal()" + ")" * nested.count("(")))


def test_steps_that_are_not_ops_are_refused_in_words() -> None:
    with pytest.raises(ag.GraphError, match=r"\(\) is not an op, such as a modifier or a mask"):
        ag.graph(lambda q, k: ag.scores(q, k).then(JUNK_STEP), q=X, k=X)
    with pytest.raises(ag.GraphError, match="are not a sequence of Modifiers and Masks"):
        write_call((), {"mask": None, "modifiers": ((),), "backends": None, "avoid": None})


@pytest.mark.parametrize("folder", ["a\0b", "/tmp/\ud800"])
def test_a_folder_that_no_path_names_is_no_store(folder: str) -> None:
    with pytest.raises(ag.GraphError, match="has characters that no path has"):
        ag.extend.Store(folder)


def test_a_file_that_is_too_large_or_no_json_is_no_plan(tmp_path: Path) -> None:
    store = ag.extend.Store(tmp_path)
    store.put("key", b"x")
    with store.path("key").open("r+b") as file:
        file.truncate(2**40)
    assert store.get("key") is None
    (entry,) = store.entries()
    assert entry.unfit == f"it has {2**40:,} bytes, and {2**26:,} is the most of a stored plan"
    wrong = [DEEP, '{"a": NaN}', '{"a": -1}', f'{{"a": {"9" * 400}}}', f'{{"a": {FAR}}}']
    for text in wrong:
        with pytest.raises(Unfit):
            read_figures(text.encode())
        with pytest.raises(Unfit):
            read_proof(f'{{"failure": "", "shares": [], "seconds": {text}}}'.encode())


def test_booleans_are_no_sizes_and_an_index_past_the_last_block_is_an_error() -> None:
    with pytest.raises(ag.GraphError, match="are not whole numbers"):
        ag.Dim("T", classes=(True, 2))
    for wrong in (4, -1):
        with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds"):
            ag.select_blocks(torch.tensor([[0, wrong]]), 4)
    table = ag.select_blocks(torch.tensor([[3, 4], [0, 9]]), 4, torch.tensor([1, 0]))
    assert table.tolist() == [[False, False, False, True], [False] * 4]


@pytest.mark.parametrize("flags", [("--q", f"1,1,4,{FAR}"), ("--q", "1,1,4,8", "--window", FAR)])
def test_figures_of_thousands_of_digits_are_refused_in_words(flags: tuple[str, ...]) -> None:
    result = run("explain", *flags)
    assert result.exit_code == 2
    assert "a number of 5000 digits is too large for a size" in result.output
