"""Checks the promises of a user's own masks and modifiers, on a small block of places.

Backends rely on them: `keep` gives booleans, `span` has every kept key, an additive step adds. A
graph is built only if they hold on a block of at most SIDE queries and keys. Tests prove the
library's own masks and modifiers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, final

import attrs
import torch
from attrs import evolve, frozen

from attn_graph.errors import GraphError, attrs_problem
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.terms.addends import Addend, Factor
from attn_graph.ir.terms.formulas import Formula, range_problems
from attn_graph.ir.terms.relative import MODIFIERS
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.cache import remember
from attn_graph.masks import LEAVES, And, Data, Mask, Not, Or, ragged_in
from attn_graph.masks.places import Block, Place

SIDE = 512  # queries and keys, at most, for a mask without tensors
READ_SIDE = 64  # queries and keys, at most, for one with tensors, which have to be invented
CLOSE = 1e-9  # relative error within which two ways to compute a float64 number are equal
STEP = 1e-6  # of differences, in float64: their error is near its square
Sizes = tuple[int, int, int, int]  # B, H, M, N
FAILURES = (RuntimeError, TypeError, ValueError)  # raised by tensors in place of numbers


def leaf_promise_problems(mask: Mask, sizes: Sizes) -> Iterator[str]:
    if isinstance(mask, (And, Or, Not)):
        for part in mask.parts:
            yield from leaf_promise_problems(part, sizes)
    elif type(mask) not in LEAVES:
        yield from (
            value_problems(mask)
            or overflow_problems(mask, sizes)
            or check_once(problems_of_leaf, mask, checked_sizes(sizes, mask.needs))
        )


def modifier_promise_problems(modifier: Modifier, sizes: Sizes) -> Iterator[str]:
    if type(modifier) not in MODIFIERS:
        yield from (
            value_problems(modifier)
            or overflow_problems(modifier, sizes)
            or check_once(problems_of_modifier, modifier, checked_sizes(sizes, {"s": None}))
        )


def overflow_problems(step: Mask | Modifier, sizes: Sizes) -> list[str]:
    """Why the integers of a step written as text may be too large."""
    match step:
        case Formula():
            return range_problems(step.text, step.elements, sizes)
        case Addend() | Factor():
            return range_problems(step.text, step.integers, sizes)
    return []


def checked_sizes(sizes: Sizes, needs: Mapping[str, object]) -> Sizes:
    """The sizes of the block to check: Dims as their largest size, then B, M and N cut.

    H stays, since tables are by head.
    """
    B, H, M, N = map(int, sizes)
    side = READ_SIDE if needs else SIDE
    return min(B, 2), H, min(M, side), min(N, side)


def value_problems(value: Mask | Modifier) -> list[str]:
    """Why equal values may differ in meaning: plans are looked up by these values."""
    kind = type(value)
    if problem := attrs_problem(kind):
        return [problem]
    return [
        f"{kind.__name__}: {field.name} is a {type(each).__name__}, and fields are numbers, texts "
        "and tuples of them; tensors are named in `needs`"
        for field in attrs.fields(kind)
        if isinstance(each := getattr(value, field.name), list | dict | set | torch.Tensor)
    ]


@remember
def check_once(
    problems_of: Callable[..., Iterable[str]],
    step: Mask | Modifier,
    sizes: Sizes,
    *more: Any,  # Any: as `problems_of` takes
) -> tuple[str, ...]:
    """The problems of a step on a block of places; none without places."""
    if 0 in sizes:
        return ()
    with neutral_state(), torch.no_grad():
        return tuple(problems_of(step, sizes, *more))


def attempt(who: str, run: Callable[[], Any]) -> tuple[Any, list[str]]:  # Any: what run returns
    """(result, []) of a definition, or (None, why it fails)."""
    try:
        return run(), []
    except GraphError as error:
        return None, [f"{who}: {text}" for text in error.problems]
    except FAILURES as error:
        return None, [
            f"{who} fails on a block of places: {error}; write it with operators and methods, "
            "&, | and ~ in place of `and`, `or` and `not`, and no `if`"
        ]


# Masks


def problems_of_leaf(mask: Mask, sizes: Sizes) -> Iterator[str]:
    B, H, M, N = sizes
    try:
        mask = mask.resolved(M, N, ragged_in(mask.needs))
    except GraphError:  # a missing alignment, which the canonical form reports
        return
    who, data = type(mask).__name__, invent_tensors(mask.needs, sizes)
    for bounds in ("bound_keys", "span", "surely"):
        if getattr(type(mask), bounds) is not getattr(Mask, bounds):
            yield f"{who} defines {bounds}, which follows from keep; delete the method"
    everywhere = Block(range(B), range(min(H, 2)), range(M), H, M, N, data)
    kept, failures = attempt(
        f"{who}.keep", lambda: mask.keep(Place.of(everywhere, range(N), torch.device("cpu")))
    )
    yield from failures
    if failures:
        return
    if not isinstance(kept, bool) and getattr(kept, "dtype", None) != torch.bool:
        given = getattr(kept, "dtype", type(kept).__name__)
        yield f"{who}.keep gives {given} instead of booleans; compare: ... != 0"
        return
    kept, shape = torch.as_tensor(kept), (B, min(H, 2), M, N)
    if kept.ndim > 4 or any(
        n not in (1, m) for n, m in zip(kept.shape[::-1], shape[::-1], strict=False)
    ):
        yield (
            f"{who}.keep gives booleans {list(kept.shape)} for a block of places {list(shape)}; "
            "read tensors at the place, for example at.load(name, at.b, at.j)"
        )
        return
    flags = kept.expand(shape)
    yield from problems_of_strip(mask, everywhere, flags)
    shifted = flags[..., 1:, 1:] != flags[..., :-1, :-1]
    if mask.relative and bool(shifted.any()):
        yield f"{who} declares relative = True, but keep depends on more than j - i"


def problems_of_strip(mask: Mask, block: Block, kept: torch.Tensor) -> Iterator[str]:
    at = Place.of(block, range(block.N), torch.device("cpu"))
    strip = mask.strip(at)
    if strip is None:
        return
    bounds = (
        strip.low is None or at.j - at.i >= strip.low,
        strip.high is None or at.j - at.i <= strip.high,
        strip.keys is None or at.j < strip.keys,
        strip.rows is None or at.i < strip.rows,
    )
    inside = torch.ones_like(kept)
    for bound in bounds:
        inside = inside & bound
    for b, h, i, j in (inside != kept).nonzero()[:1].tolist():
        yield f"{type(mask).__name__}.strip disagrees with keep at b={b}, h={h}, i={i}, j={j}"


# Modifiers


@final
@frozen(eq=False)
class Trial:
    """A modifier on the places of a block, with the tensors to read there."""

    modifier: Modifier
    at: Place
    shape: Sizes

    @classmethod
    def of(cls, modifier: Modifier, sizes: Sizes) -> Trial:
        B, H, M, N = sizes
        heads = range(min(H, 2))
        block = Block(range(B), heads, range(M), H, M, N, invent_tensors(modifier.needs, sizes))
        return cls(modifier, Place.of(block, range(N), torch.device("cpu")), (B, len(heads), M, N))

    def change(self, s: torch.Tensor) -> torch.Tensor:
        """The step's result; s stays unchanged."""
        return self.modifier.change(s.clone(), self.at)

    def back(self, ds: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """The step's gradient; ds and s stay unchanged."""
        return self.modifier.back(ds.clone(), s.clone(), self.at)

    def lost_gradients(self, ds: torch.Tensor, s: torch.Tensor) -> list[str]:
        totals, before = self.collected(ds), self.change(s)
        return [
            name
            for name, total in totals.items()
            if not total.any() and differ(before, self.with_other(name).change(s))
        ]

    def collected(self, ds: torch.Tensor) -> dict[str, torch.Tensor]:
        names = self.modifier.trains
        totals = {n: torch.zeros_like(self.at.data[n], dtype=torch.float64) for n in names}
        self.modifier.collect(totals, ds.clone(), self.at)
        return totals

    def problems_of_back(self, s: torch.Tensor) -> list[str]:
        """Why `back` is not the derivative of `change`, where that has one."""
        ahead, behind = (self.change(s + step) for step in (STEP, -STEP))
        due, made = (ahead - behind) / (2 * STEP), self.back(torch.ones_like(s), self.change(s))
        off = due.isfinite() & ~torch.isclose(made.to(due.dtype), due, rtol=1e-4, atol=1e-4)
        who = type(self.modifier).__name__
        return [
            f"{who}.back gives {made[place].item():.4g} at a score of {s[place].item():.4g}, where "
            f"change has the derivative {due[place].item():.4g}; the s of back(ds, s, at) is the "
            "result of change"
            for place in map(tuple, off.nonzero()[:1].tolist())
        ]

    def problems_of_collect(self, s: torch.Tensor, ds: torch.Tensor) -> list[str]:
        who = f"{type(self.modifier).__name__}.collect"
        lost, failures = attempt(who, lambda: self.lost_gradients(ds, s))
        return failures or [
            f"{who} adds nothing to totals[{name!r}], but change depends on {name}; `load` returns "
            "a view to add to only for indices from at.b, at.h, at.i, at.j, in this order, "
            f"else a copy: then add to totals[{name!r}] itself"
            for name in lost
        ]

    def with_other(self, name: str) -> Trial:
        data = {**self.at.data, name: self.at.data[name] * 2 + 1}
        return evolve(self, at=self.at.reading(data))

    def problems(self, name: str, run: Callable[[], Any]) -> list[str]:  # Any: is looked at
        """Why the result of `run` is not a block of scores. name: of the method in `run`."""
        who = f"{type(self.modifier).__name__}.{name}"
        given, failures = attempt(who, run)
        if failures:
            return failures
        if not isinstance(given, torch.Tensor):
            return [f"{who} returns {type(given).__name__} instead of the new block"]
        if given.shape != self.shape or not given.is_floating_point():
            returned = f"{given.dtype} {list(given.shape)}"
            return [f"{who} returns {returned} for a block of scores {list(self.shape)}"]
        return []


def problems_of_modifier(modifier: Modifier, sizes: Sizes) -> Iterator[str]:
    trial, who = Trial.of(modifier, sizes), type(modifier).__name__
    random = torch.Generator("cpu").manual_seed(0)
    one, two = torch.randn(2, *trial.shape, generator=random, dtype=torch.float64).unbind()
    problems = trial.problems("change", lambda: trial.change(one))
    if not problems and not [*modifier.gradient_problems()]:
        problems = trial.problems("back", lambda: trial.back(two, trial.change(one)))
        if not problems and modifier.additive and differ(trial.back(two, one), two):
            problems = [f"{who} declares additive = True, but back does not return ds itself"]
        if not problems and not modifier.additive:
            problems = trial.problems_of_back(one)
        if not problems and modifier.trains:
            problems = trial.problems_of_collect(one, two)
    yield from problems
    if problems:
        return
    if modifier.additive and differ(trial.change(one) - one, trial.change(two) - two):
        yield f"{who} declares additive = True, but the term it adds depends on the score"
    level = trial.change(torch.full(trial.shape, 0.5, dtype=torch.float64))
    if modifier.relative and differ(level[..., 1:, 1:], level[..., :-1, :-1]):
        yield f"{who} declares relative = True, but change depends on more than j - i"


def tangent_promise_problems(modifier: Modifier, sizes: Sizes) -> Iterator[str]:
    if type(modifier) not in MODIFIERS:
        block = checked_sizes(sizes, modifier.needs)
        checks = problems_of_spread, problems_of_sums, problems_of_bend
        yield from check_once(problems_of_tangents, modifier, block, *checks)


def derivative_problems(modifier: Modifier, sizes: Sizes) -> Iterator[str]:
    block, checks = checked_sizes(sizes, modifier.needs), (problems_of_spread, problems_of_bend)
    yield from check_once(problems_of_tangents, modifier, block, *checks)


def problems_of_tangents(
    modifier: Modifier, sizes: Sizes, *checks: Callable[[Trial], list[str]]
) -> Iterator[str]:
    trial, who = Trial.of(modifier.resolved(*sizes[2:]), sizes), type(modifier).__name__
    for check in checks:
        problems, failures = attempt(f"{who}'s derivative", partial(check, trial))
        yield from failures or problems


def problems_of_spread(trial: Trial) -> list[str]:
    """Why `spread` is not the dual of `collect`."""
    who, names = type(trial.modifier).__name__, trial.modifier.trains
    if not names:
        return []
    data, random = trial.at.data, torch.Generator("cpu").manual_seed(1)
    ds = torch.randn(trial.shape, generator=random, dtype=torch.float64)
    moves = {n: torch.randn(data[n].shape, generator=random).to(data[n].dtype) for n in names}
    sums = trial.collected(ds)
    pulled = sum((sums[n] * moves[n]).sum() for n in names)
    pushed = trial.modifier.spread(torch.zeros_like(ds), moves, trial.at)
    if differ((ds * pushed).sum(), torch.as_tensor(pulled), 1e-4):
        return [f"{who}.spread and {who}.collect are not derivatives of one step"]
    return []


def problems_of_sums(trial: Trial) -> list[str]:
    """Why `collect` has no derivative by the trained tensors: it reads them."""
    who, names = type(trial.modifier).__name__, trial.modifier.trains
    ds = torch.randn(
        trial.shape, generator=torch.Generator("cpu").manual_seed(1), dtype=torch.float64
    )
    sums = trial.collected(ds) if names else {}
    others = [trial.with_other(name).collected(ds) for name in names]
    if any(differ(other[n], sums[n], 1e-4) for other in others for n in names):
        return [f"{who}.collect reads trained tensors: change has to be linear in them"]
    return []


def problems_of_bend(trial: Trial) -> list[str]:
    random, modifier = torch.Generator("cpu").manual_seed(2), trial.modifier
    s, ds, t = torch.randn(3, *trial.shape, generator=random, dtype=torch.float64).unbind()
    s = trial.change(s)
    bent = modifier.bend(ds.clone(), t.clone(), s.clone(), trial.at)
    ahead, behind = (trial.back(ds, s + step * t) for step in (STEP, -STEP))
    due = (ahead - behind) / (2 * STEP)
    if differ(torch.zeros_like(due) if bent is None else bent, due, 1e-4):
        return [f"{type(modifier).__name__}.bend is not the derivative of back by s"]
    return []


def differ(a: torch.Tensor, b: torch.Tensor, close: float = CLOSE) -> bool:
    return not torch.allclose(a.to(b.dtype), b, rtol=close, atol=close, equal_nan=True)


# Tensors to read


def invent_tensors(needs: Mapping[str, Data], sizes: Sizes) -> dict[str, torch.Tensor]:
    """A random tensor for each name: floats, flags, and integers below the lesser of M and N."""
    random = torch.Generator("cpu").manual_seed(0)
    full = dict(zip("bhij", sizes, strict=True))
    made = {}
    for name, data in needs.items():
        shape, dtype = data.shape(full), next(iter(data.dtypes))
        if dtype.is_floating_point:
            made[name] = torch.randn(shape, generator=random).to(dtype)
        else:
            most = min(sizes[2:]) if dtype != torch.bool else 2
            made[name] = torch.randint(most, shape, generator=random).to(dtype)
    return made
