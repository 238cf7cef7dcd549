"""Calls of the function form with any named inputs, and the ways to make such a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import and_
from typing import Any, cast

import torch
from attrs import astuple, evolve, field, frozen
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nested import nested_tensor_from_jagged
from torch.utils.checkpoint import checkpoint

import attn_graph as ag
from attn_graph.extend import Place
from attn_graph.nn.calls import SEGMENTS
from attn_graph.nn.functional import attention
from tests.support.tracing import Watch

Named = dict[str, torch.Tensor]
Attend = Callable[[Named], torch.Tensor]
Parts = tuple[Sequence[ag.Mask], Sequence[ag.Modifier], dict[str, Any]]  # Any: options of a call

B, H, G = 2, 2, 1
BETWEEN = 113  # in gaps; -1 as a boolean
QUANTISED = ("q_scale", "k_scale", "v_scale")
FIXED = (*QUANTISED, "o_scale", "t")  # floating inputs without a gradient


@frozen
class Sizes:
    """M queries and N keys of an entry, or the most of them; packed rows of both entries; rows of a
    page; head sizes."""

    M: int = 4
    N: int = 5
    rows: int = 6
    page: int = 2
    D: int = 4
    E: int = 3


@frozen
class Limited(ag.Mask):
    """A user's mask: keys before a number of each batch entry."""

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"limit": ag.Data("b")}

    def keep(self, at: Place) -> Any:
        return at.j < at.load("limit", at.b)


# What a call may read beside q, k and v: masks, modifiers and options, by the names of inputs.
PARTS: dict[tuple[str, ...], Parts] = {
    ("bias",): ((), (), {}),
    ("alibi",): ((), (), {"align": "bottom_right"}),
    ("keep",): ((), (), {}),
    ("kv_lengths",): ((), (), {}),
    ("q_lengths",): ((), (), {}),
    ("sinks",): ((), (), {}),
    SEGMENTS: ((), (), {}),
    ("seed", "offset"): ((), (), {"dropout": 0.5}),
    QUANTISED[1:]: ((), (), {}),
    QUANTISED: ((), (), {}),
    (*QUANTISED, "o_scale"): ((), (), {}),
    ("first",): ((ag.Formula("j >= first", (("first", "h"),)),), (), {}),
    ("keep_blocks",): ((ag.KeepBlocks(2, 2),), (), {}),
    ("limit",): ((Limited(),), (), {}),
    ("table",): ((), (ag.RelativeBias(5, "bottom_right"),), {}),
    ("slope",): ((), (ag.Addend("real(slope) * real(j - i)", (("slope", "h"),)),), {}),
    ("t",): ((), (ag.Factor("real(t)", (("t", "h"),)),), {}),
    (): ((ag.Causal("bottom_right"), ag.Prefix(2) | ag.Window(1, 1, "top_left")), (), {}),
}
FURTHER = ("values", "outputs")  # v as a number, and o laid out
LAYOUTS = {  # the inputs of a layout; jagged rows have their starts from nested tensors
    "dense": (),
    "packed": ("q_starts",),
    "packed keys": ("q_starts", "kv_starts"),
    "jagged": ("q_starts",),
    "jagged keys": ("q_starts", "kv_starts"),
    "paged": ("pages",),
    "packed pages": ("q_starts", "pages"),
}


def has_masks(part: tuple[str, ...]) -> bool:
    return bool(PARTS[part][0])


@frozen(eq=False)
class Case:
    """A call: its layout, inputs, and options. lies: how named inputs lie, see `lay`."""

    layout: str
    names: tuple[str, ...]
    options: Mapping[str, Any]  # Any: of `attention`
    sizes: Sizes = Sizes()
    dtype: torch.dtype = torch.float64
    lies: dict[str, str] = field(factory=dict[str, str])

    @classmethod
    def of(
        cls,
        layout: str,
        parts: Sequence[tuple[str, ...]],
        joined: bool,
        further: Sequence[str] = (),
        sizes: Sizes = Sizes(),
    ) -> Case:
        """joined: masks are given as `mask`, else among the modifiers. further: of FURTHER."""
        each = [PARTS[names] for names in parts]
        steps: list[ag.Modifier | ag.Mask] = [step for _, steps, _ in each for step in steps]
        masks = [mask for masks, _, _ in each for mask in masks]
        options: dict[str, Any] = {}
        for _, _, more in each:
            options |= more
        if masks and joined:
            options["mask"] = reduce(and_, masks)
        else:
            steps += masks
        if "q_starts" in LAYOUTS[layout]:
            most = None if "pages" in LAYOUTS[layout] else sizes.N
            options["max_lengths"] = (sizes.M, most)
        names = dict.fromkeys(n for part in parts for n in part)
        options["modifiers"] = tuple(steps)
        if "values" in further and not names.keys() & {*QUANTISED}:
            options["v"] = sizes.E
        if "outputs" in further and not layout.startswith("jagged"):
            options["outputs"] = {"o": o_layout(layout, {*names}, sizes)}
        return cls(layout, (*names, *LAYOUTS[layout]), options, sizes)

    @property
    def is_jagged(self) -> bool:
        return self.layout.startswith("jagged")

    def draw(self, seed: int) -> Named:
        """Tensors of the call; those of two seeds differ in numbers alone."""
        random = torch.Generator().manual_seed(seed)
        made = {name: make_input(self, name, random) for name in self.inputs}
        for name, starts in (("q_lengths", "q_starts"), ("kv_lengths", self.key_starts)):
            if name in made and starts in made:
                lengths = made[starts].diff() - made[name].clamp(max=1)
                equal = "0" in self.lies.get(name, "")
                made[name] = lengths.amin().expand(B) if equal else lengths
        return {name: lay(x, self.lies.get(name, "")) for name, x in made.items()}

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("q", "k", *(() if "v" in self.options else ("v",)), *self.names)

    @property
    def key_starts(self) -> str:
        return "kv_starts" if "kv_starts" in self.names else "q_starts"

    def attend(self, named: Named) -> torch.Tensor:
        return self.attend_by(self.call, named)

    def attend_by(self, call: Any, named: Named) -> torch.Tensor:  # Any: `call`, or compiled
        """The rows of a call, for jagged layouts with nested tensors."""
        if not self.is_jagged:
            return cast(torch.Tensor, call(named))
        nested, starts = {**named}, [named[n] for n in LAYOUTS[self.layout]]
        for name, x in zip("qkv", (starts[0], starts[-1], starts[-1]), strict=True):
            if name not in named:
                continue
            nested[name] = nested_tensor_from_jagged(named[name], x).transpose(1, 2)
        o = call({n: x for n, x in nested.items() if n not in LAYOUTS[self.layout]})
        return cast(torch.Tensor, o.values().transpose(0, 1))

    def call(self, named: Named) -> Any:  # Any: of a private class of PyTorch, if nested
        """The function form."""
        given: dict[str, Any] = {**named}  # Any: a pair of segments among them
        if SEGMENTS[0] in given:
            given["segments"] = tuple(given.pop(name) for name in SEGMENTS)
        return self.join(attention(**given, **self.options))

    def join(self, results: Any) -> Any:  # Any: as above
        """o; with amax behind its elements, where there is one."""
        if "o_scale" not in self.names:
            return results
        o, amax = results
        return o if self.is_jagged else torch.cat([o.double().flatten(), amax.double()[None]])

    def attend_by_plan(self, lying: bool = False) -> Attend:
        """The plan of the call, its tensors by name; dense copies of them, or `lying` as given."""

        def take(x: torch.Tensor) -> torch.Tensor:
            return x if lying else x.contiguous()

        specs: dict[str, Any] = {n: ag.TensorSpec.like(take(x)) for n, x in self.draw(0).items()}
        free = ("seed", "offset") if "dropout" in self.options else ()
        given = {n: x for n, x in specs.items() if n not in (*free, *SEGMENTS)}
        if SEGMENTS[0] in specs:
            given["segments"] = tuple(specs[name] for name in SEGMENTS)
        own = {n: x for n, x in self.options.items() if n != "backends"}
        plan = ag.compile(ag.attention(**given, **own), backends=self.options.get("backends"))
        return lambda named: cast(
            torch.Tensor, self.join(plan(**{n: take(x) for n, x in named.items()}))
        )

    def trained(self, named: Named) -> Named:
        """The inputs with gradients."""
        if "o_scale" in self.names:
            return {}
        return {n: x for n, x in named.items() if x.is_floating_point() and n not in FIXED}


def lay(x: torch.Tensor, how: str) -> torch.Tensor:
    """A tensor that lies so, "" as it is: between other numbers, from an odd place on, with axes
    in the opposite order, negated in memory, or expanded from the first along axes by number."""
    if how == "negative":
        return cast(torch.Tensor, torch.ops.aten._neg_view(-x))
    if how == "gaps":
        room = x.new_full([3 * n for n in x.shape] or [1], BETWEEN)
        return room[tuple(slice(1, None, 3) for _ in x.shape)].view(x.shape).copy_(x)
    if how == "offset":
        room = x.new_full((x.numel() + 1,), BETWEEN)
        return room[1:].view(x.shape).copy_(x)
    if how == "reversed":
        axes = [*range(x.ndim)][::-1]
        return x.permute(axes).contiguous().permute(axes)
    once = [slice(0, 1) if str(n) in how else slice(None) for n in range(x.ndim)]
    return x[tuple(once)].expand(x.shape) if how else x


def o_layout(layout: str, names: set[str], sizes: Sizes) -> ag.TensorSpec | str:
    """Another memory order of o than q's: its heads outermost where rows are packed."""
    dtype = torch.bfloat16 if "q_scale" in names else torch.float64
    dtype = torch.int8 if "o_scale" in names else dtype
    if "packed" not in layout:
        return "bshd"
    return ag.TensorSpec((sizes.rows, H, sizes.E), dtype, (sizes.E, sizes.rows * sizes.E, 1))


def make_input(case: Case, name: str, random: torch.Generator) -> torch.Tensor:
    M, N, rows, page, D, E = astuple(case.sizes)

    def numbers(*shape: int) -> torch.Tensor:
        """Sixteenths from 1/2 to 3/2, which every dtype holds."""
        return torch.randint(8, 24, shape, generator=random).to(case.dtype) / 16

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=random)

    count = -(-N // page)
    packed, keys = "q_starts" in case.names, count * page if "pages" in case.names else N
    q = (rows, H, D) if packed else (B, H, M, D)
    k = (
        (2 * B * count, page, G, D)
        if "pages" in case.names
        else (rows, G, D)
        if packed
        else (B, G, N, D)
    )
    if name in ("q", "k", "v"):
        shape = q if name == "q" else (*k[:-1], E) if name == "v" else k
        x = numbers(*shape) - 1
        return (8 * x).to(torch.int8) if f"{name}_scale" in case.names else x
    shapes: dict[str, tuple[int, ...]] = {
        "bias": (B, H, M, keys), "alibi": (H,), "sinks": (H,), "slope": (H,), "t": (H,),
        "table": (H, 5), "q_scale": (1,) * len(q), "k_scale": (1,) * len(k),
        "v_scale": (1,) * len(k), "o_scale": (1,) * len(q),
    }  # fmt: skip
    if name in shapes:
        x = numbers(*shapes[name])
        return x.float() if "q_scale" in case.names or name.endswith("_scale") else x
    if name in ("q_starts", "kv_starts"):
        middle = rows - M + integers(2 * M - rows + 1)
        return torch.stack([torch.zeros_like(middle), middle, torch.full_like(middle, rows)])
    if name == "pages":
        return torch.randperm(2 * B * count, generator=random)[: B * count].view(B, count)
    flags = {"keep": (B, 1, M, keys), "keep_blocks": (1, H, -(-M // 2), -(-keys // 2))}
    if name in flags:
        return integers(4, *flags[name]) > 0
    most, *sizes = {
        "kv_lengths": (keys + 1, B), "q_lengths": (M + 1, B), "q_segments": (2, B, M),
        "kv_segments": (2, B, keys), "seed": (9,), "offset": (9,), "first": (3, H),
        "limit": (keys + 1, B),
    }[name]  # fmt: skip
    return integers(most, *sizes)


# The ways to call, each beside what the plan gives


def values(attend: Attend, case: Case) -> list[torch.Tensor]:
    """Called for tensors of a new kind, then for others of that kind."""
    return [attend(case.draw(seed)) for seed in range(3)]


def gradients(attend: Attend, case: Case) -> list[torch.Tensor]:
    """By autograd, twice."""
    results: list[torch.Tensor] = []
    for seed in range(2):
        named = case.draw(seed)
        leaves = {n: x.requires_grad_() for n, x in case.trained(named).items()}
        attend({**named, **leaves}).square().sum().backward()
        results += [x.grad for x in leaves.values() if x.grad is not None]
    return results


def by_func_grad(attend: Attend, case: Case) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for seed in range(2):
        named = case.draw(seed)

        def loss(own: Named, named: Named = named) -> torch.Tensor:
            return attend({**named, **own}).square().sum()

        results += grad(loss)(case.trained(named)).values()
    return results


def by_vmap(attend: Attend, case: Case) -> list[torch.Tensor]:
    """Mapped over all inputs, and over q alone."""
    draws = [case.draw(seed) for seed in range(3)]
    every = {n: stack([draw[n] for draw in draws]) for n in draws[0]}
    o = vmap(attend)(every)
    alone = vmap(lambda q: attend({**draws[0], "q": q}))(every["q"])
    return [*o, *alone]


def stack(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """[..] -> [count,..], innermost in memory unless each tensor is dense."""
    dense = all(x.is_contiguous() for x in xs)
    return torch.stack([*xs]) if dense else torch.stack([*xs], -1).movedim(-1, 0)


def one_by_one(attend: Attend, case: Case) -> list[torch.Tensor]:
    draws = [case.draw(seed) for seed in range(3)]
    alone = [attend({**draws[0], "q": draw["q"]}) for draw in draws]
    return [*map(attend, draws), *alone]


def tangents(attend: Attend, case: Case) -> list[torch.Tensor]:
    named, other = case.draw(0), case.draw(1)
    own = case.trained(named)
    moves = {n: other[n] for n in own}
    return [*jvp(lambda own: attend({**named, **own}), (own,), (moves,))]


def watched(attend: Attend, case: Case) -> list[torch.Tensor]:
    with Watch():  # type: ignore[no-untyped-call]  # torch's own
        return values(attend, case)


def compile_call(case: Case, backend: str) -> Attend:
    torch.compiler.reset()
    return partial(case.attend_by, torch.compile(case.call, backend=backend, fullgraph=True))


def compiled(attend: Attend, case: Case) -> list[torch.Tensor]:
    return values(compile_call(case, "eager"), case)


def compiled_gradients(attend: Attend, case: Case) -> list[torch.Tensor]:
    return gradients(compile_call(case, "aot_eager"), case)


def exported(attend: Attend, case: Case) -> list[torch.Tensor]:
    class Module(torch.nn.Module):
        def forward(self, named: Named) -> torch.Tensor:
            return attend(named)

    program = torch.export.export(Module(), (case.draw(0),)).module()
    return values(cast(Attend, program), case)


def traced(attend: Attend, case: Case) -> list[torch.Tensor]:
    program = make_fx(lambda named: attend(named))(case.draw(0))
    return values(program, case)


def checkpointed(reentrant: bool) -> Callable[[Attend, Case], list[torch.Tensor]]:
    def run(attend: Attend, case: Case) -> list[torch.Tensor]:
        def again(named: Named) -> torch.Tensor:
            def call(*tensors: torch.Tensor) -> torch.Tensor:
                return attend(dict(zip(named, tensors, strict=True)))

            o = checkpoint(call, *named.values(), use_reentrant=reentrant)
            return cast(torch.Tensor, o)

        return gradients(again, case)

    return run


def into_rooms(attend: Attend, case: Case) -> list[torch.Tensor]:
    """With `out`, as which the results of the call without serve."""
    rooms = []
    for seed in range(2):
        named = case.draw(seed)
        room = torch.full_like(attend(named), 7.0)
        room_case = evolve(case, options={**case.options, "out": room})
        assert room_case.attend(named) is room
        rooms.append(room)
    return rooms


def twice(attend: Attend, case: Case) -> list[torch.Tensor]:
    return values(attend, case)[:2]


Way = Callable[[Attend, Case], list[torch.Tensor]]
WAYS: dict[str, tuple[Way, Way]] = {  # to call the function; to get the same from the plan
    "called": (values, values),
    "into rooms": (into_rooms, twice),
    "watched": (watched, values),
    "traced": (traced, values),
    "recorded": (gradients, gradients),
    "grad": (by_func_grad, gradients),
    "vmap": (by_vmap, one_by_one),
    "jvp": (tangents, tangents),
    "checkpoint": (checkpointed(False), gradients),
    "reentrant checkpoint": (checkpointed(True), gradients),
    "compiled": (compiled, values),
    "compiled gradients": (compiled_gradients, gradients),
    "exported": (exported, values),
}
COMPILED = ("compiled", "compiled gradients", "exported")  # a hundred times as long as others
# PyTorch's transforms don't take nested tensors, and `out` is for dense results.
LAID = ("called", "watched", "traced", "compiled", "exported")  # o lies as the plan's
DENSE = ("into rooms", "traced", "grad", "vmap", "jvp", "exported")


def ways_for(case: Case) -> list[str]:
    """The ways to make a call: without gradients, those whose results are the call's."""
    trains = bool(case.trained(case.draw(0)))
    return [
        way
        for way, (_, due) in WAYS.items()
        if not (case.is_jagged and way in DENSE)
        and not (way == "into rooms" and "o_scale" in case.names)
        and (trains or due is not gradients)
        and (trains or due is not tangents)
    ]


def check_call(case: Case, way: str) -> None:
    """Assert that the function form gives, in this way, what the plan does."""
    run, run_plan = WAYS[way]
    due = run_plan(case.attend_by_plan(), case)
    for x, expected in zip(run(case.attend, case), due, strict=True):
        torch.testing.assert_close(x, expected, check_stride=way in LAID and not case.is_jagged)
