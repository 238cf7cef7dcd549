"""attn_graph.testing lets what is right pass, and names what is wrong with both values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import testing
from attn_graph.extend import BACKENDS, Backend, Executable, Options, Place, sole
from attn_graph.ir.modifiers import Alibi, Bias, SoftCap
from attn_graph.ir.terms.relative import MODIFIERS, RelativeBias
from attn_graph.lowering.cpu.math import BACKEND as MATH
from attn_graph.lowering.request import Request
from attn_graph.masks import LEAVES, Band
from attn_graph.testing import strategies
from attn_graph.testing.formula import cast, read_chain
from attn_graph.testing.rule import operand_terms
from tests.support.sources import ROOT

STEPS = (
    *(SoftCap(3.0), Bias(), Alibi(), Alibi(False, "bottom_right", ("kv_lengths",), True)),
    *(RelativeBias(5, "bottom_right", ("kv_lengths",)), RelativeBias(4, places=True)),
)
MASKS = (
    *(ag.Causal(), ag.Window(2, 1, "bottom_right"), ag.Prefix(3), ag.Keep(), ag.KeyLengths()),
    *(ag.KeepBlocks(2, 3), ag.QueryLengths(), ag.SameSegment(), Band(-2, 1, ("q_lengths",))),
)


def test_every_leaf_and_every_modifier_of_ours_is_checked() -> None:
    assert {*map(type, MASKS)} == {*strategies.LEAVES} == {*LEAVES}
    assert {*map(type, STEPS)} == {*MODIFIERS}


@pytest.mark.usefixtures("few_examples")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_of_ours_pass(mask: ag.Mask) -> None:
    testing.check_mask(mask)


@pytest.mark.parametrize("op", STEPS, ids=str)
def test_modifiers_of_ours_pass(op: ag.Modifier) -> None:
    testing.check_modifier(op)


@pytest.mark.parametrize("name", ["math", "torch_sdpa"])
def test_backends_of_ours_pass(name: str) -> None:
    (backend,) = (each for each in BACKENDS if each.name == name)
    testing.check_backend(backend)


def test_a_backend_for_another_machine_is_planned_and_not_run() -> None:
    (backend,) = (each for each in BACKENDS if each.name == "triton")
    testing.check_backend(backend, "h200")


# Masks that are wrong


@final
@frozen
class Divided(ag.Mask):
    """Division, which rounds down for integers and not for tensors."""

    def keep(self, at: Place) -> Any:
        half = at.j // 2 if isinstance(at.j, int) else at.j / 2
        return half * 2 == at.j - at.j % 2


@final
@frozen
class Unread(ag.Mask):
    """Right, but its graphs are refused: it reads what it does not name."""

    def keep(self, at: Place) -> Any:
        return at.load("limits", at.b) > at.j


WRONG_MASKS: dict[ag.Mask, str] = {
    Divided(): r"Divided\(\)\.keep at b=0, .* gives False in a block of tensors and True for int",
}


@pytest.mark.parametrize("mask", WRONG_MASKS, ids=str)
def test_a_mask_that_says_wrong_is_caught(mask: ag.Mask) -> None:
    with pytest.raises(AssertionError, match=WRONG_MASKS[mask]):
        testing.check_mask(mask)


def test_a_mask_that_reads_what_it_does_not_name_is_an_error_in_words() -> None:
    with pytest.raises(ag.GraphError, match="'limits' is not in `needs`"):
        testing.check_mask(Unread())


# Modifiers that are wrong


@frozen
class Cubed(ag.Modifier):
    """s + s^3 / 10, whose derivative follows from s', but not simply: by Newton's method."""

    def change(self, s: Any, at: Place) -> Any:
        return s + 0.1 * s * s * s

    def back(self, ds: Any, s: Any, at: Place) -> Any:
        x = s.clone()
        for _ in range(60):
            x = x - (x + 0.1 * x * x * x - s) / (1 + 0.3 * x * x)
        return ds * (1 + 0.3 * x * x)


@final
@frozen
class WrongBack(Cubed):
    """The derivative at the result, where it is to be at what was changed."""

    def back(self, ds: Any, s: Any, at: Place) -> Any:
        return ds * (1 + 0.3 * s * s)


@final
@frozen
class ByBlock(ag.Modifier):
    """Adds the place within the block, not within the scores."""

    additive = True

    def change(self, s: Any, at: Place) -> Any:
        return s + torch.arange(s.shape[-1], dtype=s.dtype)


@final
@frozen
class Hiding(ag.Modifier):
    """Hides large scores, and denies it."""

    hides = False

    def change(self, s: Any, at: Place) -> Any:
        return torch.where(s > 0.5, -torch.inf, s)

    def back(self, ds: Any, s: Any, at: Place) -> Any:
        return ds


@frozen
class Tilt(ag.Modifier):
    """s + tilt[h] * (j - i)."""

    additive = True
    sign = 1.0

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"tilt": ag.Data("h", (torch.float32,))}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("tilt",)

    def change(self, s: Any, at: Place) -> Any:
        return s + at.load("tilt", at.h) * (at.j - at.i)

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        share = at.reading(totals).load("tilt", at.h)
        share += self.sign * (ds * (at.j - at.i)).sum_to_size(share.shape)


@final
@frozen
class WrongCollect(Tilt):
    """The other sign."""

    sign = -1.0


@final
@frozen
class Overwriting(Tilt):
    """Right for one block, and forgets what others added."""

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        share = at.reading(totals).load("tilt", at.h)
        share.copy_((ds * (at.j - at.i)).sum_to_size(share.shape))


NUMBER = r"-?[\d.e+-]+"
WRONG_STEPS: dict[ag.Modifier, str] = {
    WrongBack(): rf"WrongBack\(\)\.back of 1 x \d heads, .* is {NUMBER} at \[0, \d+, \d+, \d+\], "
    rf"but ds times the derivative of change is {NUMBER}",
    ByBlock(): rf"ByBlock\(\)\.change of .* is {NUMBER} at .*, but that part of the whole is",
    Hiding(): r"Hiding\(\) declares hides = False, but change gives -inf",
    WrongCollect(): rf"WrongCollect\(\)\.collect of .*: tilt is {NUMBER} at \[\d+\], but 1 and the "
    rf"sum of ds times the derivative of change is {NUMBER}",
    Overwriting(): r"Overwriting\(\)\.collect of .*, added to totals of 1: tilt is",
}


@pytest.mark.parametrize("op", [Cubed(), Tilt()], ids=str)
def test_a_modifier_of_ones_own_that_is_right_passes(op: ag.Modifier) -> None:
    testing.check_modifier(op)


def test_terms_of_a_gradient_do_not_cancel_among_places() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, tilt: ag.Value) -> ag.Value:
        return ag.scores(q, k).then(Tilt(), tilt).softmax()[0].weigh(v)

    x, tilt = ag.TensorSpec((2, 3, 5, 4), torch.float64), ag.TensorSpec((3,), torch.float32)
    graph = ag.graph(attend, q=x, k=x, v=x, tilt=tilt)
    chain = read_chain(graph, cast(graph, testing.tensors_for(graph, 0), torch.float64))
    ds = torch.rand(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ((op, data),) = chain.modifiers
    far = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    terms = operand_terms(chain, op, data, ds, "tilt", ds)
    torch.testing.assert_close(terms, (ds * far).sum((0, 2, 3)))


@pytest.mark.parametrize("op", WRONG_STEPS, ids=lambda op: type(op).__name__)
def test_a_modifier_that_says_wrong_is_caught(op: ag.Modifier) -> None:
    with pytest.raises(AssertionError, match=WRONG_STEPS[op]):
        testing.check_modifier(op)


# Backends that are wrong

Runs = Callable[..., Any]  # Any: outputs, and what the backward reads
Spoil = Callable[[ag.Graph, Runs], Runs]


def spoiled(name: str, spoil: Spoil) -> Backend:
    """`math` for graphs of one attention, with its results spoiled."""

    def why_not(graph: ag.Graph, target: ag.Target, options: Options) -> Iterable[Any]:
        yield from MATH.why_not(Request(graph, target, options))
        if sole(graph) is None:
            yield "takes one attention, and the graph is something else"

    def lower(graph: ag.Graph, target: ag.Target, options: Options) -> Executable:
        executable = MATH.lower(Request(graph, target, options))
        run = spoil(graph, executable.run)
        return evolve(executable, run=run, infer=run)

    return Backend(name, why_not, lower)


def drop_dlse(graph: ag.Graph, run: Runs) -> Runs:
    """A gradient that takes dlse for 0."""
    problem = sole(graph)
    assert problem is not None
    if problem.grad is None or not problem.grad.with_dlse:
        return run
    return lambda *tensors: run(*tensors[:-1], torch.zeros_like(tensors[-1]))


def save_wrong(graph: ag.Graph, run: Runs) -> Runs:
    """A forward pass whose outputs are right, and what its backward reads is not."""
    problem = sole(graph)
    assert problem is not None
    if problem.grad is not None:
        return run

    def wrong(*tensors: torch.Tensor) -> Any:  # Any: as `Runs`
        outputs, (o, lse) = run(*tensors)
        return outputs, (o, lse + 0.5)

    return wrong


def read_gaps(graph: ag.Graph, run: Runs) -> Runs:
    """Adds 0 times what lies right behind the last element of q."""

    def wrong(*tensors: torch.Tensor) -> Any:  # Any: as `Runs`
        outputs, saved = run(*tensors)
        last = tensors[0].untyped_storage().nbytes() // tensors[0].itemsize - 1
        beyond = tensors[0].as_strided((1,), (1,), last)
        return [outputs[0] + 0 * beyond.to(outputs[0].dtype), *outputs[1:]], saved

    return wrong if not graph.is_gradient else run


def write_inputs(graph: ag.Graph, run: Runs) -> Runs:
    """Scales q where it lies."""

    def wrong(*tensors: torch.Tensor) -> Any:  # Any: as `Runs`
        results = run(*tensors)
        tensors[0].detach().as_strided((1,), (1,)).mul_(2)
        return results

    return wrong if not graph.is_gradient else run


WRONG_BACKENDS: dict[Spoil, str] = {
    drop_dlse: r"drop_dlse: d[a-z]+: error [\d.e+-]+, allowed [\d.e+-]+",
    save_wrong: r"save_wrong: d[a-z]+: error [\d.e+-]+, allowed [\d.e+-]+",
    read_gaps: r"read_gaps: o: error inf, allowed [\d.e+-]+",
    write_inputs: r"write_inputs: a call changed its input q\n",
}


@pytest.mark.parametrize("spoil", WRONG_BACKENDS, ids=lambda spoil: spoil.__name__)
def test_a_backend_that_computes_wrong_is_caught(spoil: Spoil) -> None:
    dense = testing.shapes(most=12).filter(lambda x: 0 not in (x.B, x.H, x.M, x.N))
    drawn = testing.graphs(dense, st.just(torch.float32), stats=True)
    with pytest.raises(AssertionError, match=WRONG_BACKENDS[spoil]):
        testing.check_backend(spoiled(spoil.__name__, spoil), graphs=drawn)


def test_a_backend_that_is_right_passes() -> None:
    testing.check_backend(spoiled("right", lambda _, run: run))


def test_a_refusal_without_words_is_caught() -> None:
    silent = Backend("silent", lambda *_: [""], MATH.lower)
    with pytest.raises(AssertionError, match=r"silent refuses a graph with the reasons \[''\]"):
        testing.check_backend(silent)


def test_a_backend_that_takes_nothing_is_not_said_to_be_right() -> None:
    never = Backend("never", lambda *_: ["never runs"], MATH.lower)
    with pytest.raises(
        AssertionError, match="never supports none of the drawn graphs; pass graphs="
    ):
        testing.check_backend(never)


# What tests of one's own are made of


@given(graph=testing.simple_graphs(), seed=testing.seeds)
def test_gaps_between_elements_hold_nan(graph: ag.Graph, seed: int) -> None:
    for tensor in testing.tensors_for(graph, seed):
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        storage = tensor.as_strided((count,), (1,), 0)
        elements = torch.arange(count).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        gaps = torch.ones(count, dtype=torch.bool)
        gaps[elements] = False
        assert gaps.any()
        assert storage[gaps].isnan().all()
        assert not tensor.isnan().any()


WITHOUT = """
import sys
import attn_graph
sys.modules["hypothesis"] = None
import attn_graph.testing
"""


def test_without_hypothesis_the_error_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "ImportError: attn_graph.testing needs hypothesis" in done.stderr
    assert "pip install 'attn-graph[testing]'" in done.stderr


# Texts with ops of one's own


def test_modifiers_of_ones_own_are_parsed_where_they_are_known() -> None:
    x = ag.TensorSpec((1, 2, 4, 8), torch.float32)
    spec = ag.TensorSpec((2,), torch.float32)

    def attend(q: ag.Value, k: ag.Value, v: ag.Value, tilt: ag.Value) -> ag.Value:
        return ag.scores(q, k).then(Cubed()).then(Tilt(), tilt).softmax()[0].weigh(v)

    graph = ag.graph(attend, q=x, k=x, v=x, tilt=spec)
    backward = ag.vjp(graph)[1]
    for each in (graph, backward, ag.compile(graph).graph):
        assert ag.parse(str(each), known=(Cubed, Tilt)) == each
    with pytest.raises(ag.GraphError, match=r"line 8: cubed is not a known op; parse\(text, known"):
        ag.parse(str(graph), known=[Tilt])
