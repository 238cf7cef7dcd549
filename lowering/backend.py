"""A backend: a name, its refusals, and a function that makes a graph callable; and rooms, the
caller's tensors for results.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from math import inf
from typing import Any, TypeVar, final

import torch
from attrs import Factory, evolve, field, frozen
from attrs.converters import optional

from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import output_specs
from attn_graph.ir.transforms.vjp import output_names
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.machine.tensors import lay_in_order
from attn_graph.machine.torch_switches import Precision
from attn_graph.spec import TensorSpec, memory_order, new_strides, normalise_strides

Tensors = Sequence[torch.Tensor]
Run = Callable[..., tuple[Tensors, Tensors]]  # of a graph: see Executable
Write = Callable[..., Tensors]  # as above
Needs = TypeVar("Needs", bound="Foreseen | Executable")
UNKNOWN = sys.float_info.max  # seconds
OUT_COPIED = "out= takes a copy: the kernels write to memory of their own"
Rooms = Mapping[str, torch.Tensor]  # by the result's name
ResultLayout = tuple[Sequence[int], Sequence[int], torch.dtype]  # shape, strides, dtype of a result
NO_ROOMS: Rooms = {}
zero_each = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]  # documented


class RefusedError(Exception):
    """A backend's `lower` raises it if only trying shows that it can't. The planner then asks the
    next backend.

    Its arguments are reasons, as `why_not` yields them.
    """

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Its arguments as values."""
        return tuple(evolve(Reason.of(x), late=True) for x in self.args)

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


@final
@frozen
class Foreseen:
    """The needs of a graph, known before lowering. None: known only after it.

    Fields as in `Executable`.
    """

    workspace: int | None = None
    temporary: int = 0
    notes: tuple[str, ...] = ()
    copies_out: bool = False
    block: int = 0

    def or_more(self, other: Foreseen) -> Foreseen:
        """The larger of each of two known needs."""
        workspace = max(self.workspace or 0, other.workspace or 0)
        temporary, block = max(self.temporary, other.temporary), max(self.block, other.block)
        return evolve(self, workspace=workspace, temporary=temporary, block=block)


@final
@frozen(eq=False)
class Executable:
    """A lowered graph.

    run: takes the inputs in order. It returns the outputs, and the tensors for the backward: o and
    lse of each attention, in the order of the equations; none in a backward graph. Outputs are new
    tensors: o in the memory order of q, others but gradients in C order. Gradients are dense. Saved
    tensors may lie in any order. in_c_order: True if all of these but o lie in C order.

    infer: as `run`, for calls without a gradient afterwards. It saves nothing, and is `run` by
    default. write: as `infer`, with the caller's tensors for the outputs first. It returns the
    outputs, each in its tensor or, if kernels cannot write there, in memory of its own. None: they
    never can. fix: reads inputs given in advance, by number, and gives `write` for calls with them;
    None: it reads nothing in advance. writes_anywhere: True if they can in tensors of any strides.
    copies_out: True if they can in none. prepare: builds in advance for the first calls.

    workspace: bytes leased while either runs. temporary: bytes allocated by kernels, estimated
    from above. block: bytes beside them that each thread of PyTorch's fused CPU kernel works in.
    notes: lines for `explain`. These are called only on request: `launches` gives more
    lines, by simulation; `inspect` still more, and `text` the generated code, by compiling.
    """

    run: Run
    workspace: int = 0
    temporary: int = 0
    notes: tuple[str, ...] = ()
    inspect: Callable[[], tuple[str, ...]] = tuple
    text: Callable[[], str] = str
    block: int = field(default=0, kw_only=True)
    infer: Run = field(
        default=Factory(lambda executable: executable.run, takes_self=True), kw_only=True
    )
    prepare: Callable[[], object] = field(default=tuple, kw_only=True)
    launches: Callable[[], tuple[str, ...]] = field(default=tuple, kw_only=True)
    in_c_order: bool = field(default=False, kw_only=True)
    write: Write | None = field(default=None, kw_only=True)
    fix: Callable[[Mapping[int, torch.Tensor]], Write] | None = field(default=None, kw_only=True)
    writes_anywhere: bool = field(default=False, kw_only=True)
    copies_out: bool = field(
        default=Factory(lambda executable: executable.write is None, takes_self=True), kw_only=True
    )

    def place(self, rooms: Tensors, tensors: Tensors) -> Tensors:
        """The outputs, in the caller's tensors if it can write there."""
        return self.infer(*tensors)[0] if self.write is None else self.write(rooms, *tensors)

    @property
    def foreseen(self) -> Foreseen:
        """The needs of the lowered graph. They are exact."""
        return Foreseen(self.workspace, self.temporary, self.notes, self.copies_out, self.block)


@final
@frozen
class Price:
    """What a call takes at least: the backend with the least seconds runs a graph.

    UNKNOWN seconds: known ones come first. Infinite ones: all others do. traffic: bytes moved by
    programs beside each operand once; the least of it comes first among equal seconds.
    """

    seconds: float
    traffic: float = 0

    @property
    def is_known(self) -> bool:
        """True for a forecast."""
        return self.seconds < UNKNOWN


UNPRICED = Price(UNKNOWN, inf)


def each_once(lines: Iterable[str]) -> tuple[str, ...]:
    """Each line once, in its first place, with a count if there are several."""
    counts = Counter(lines)
    return tuple([line if n == 1 else f"{line}, {n} times" for line, n in counts.items()])


def out_notes(graph: Graph, needs: Foreseen | Executable) -> Iterator[str]:
    """For `explain`: the copies of `out=`."""
    if needs.copies_out:
        yield OUT_COPIED
    elif graph.is_gradient:
        yield "out= takes a copy of gradients that lie otherwise than without it"


@final
@frozen(eq=False)
class LaidOut:
    """Runs a graph by an executable that lays some outputs in its own way.

    specs: of all outputs. places: of the outputs to lay as declared. orders: of the axes of others
    to make dense, by place.
    """

    specs: tuple[TensorSpec, ...]
    places: tuple[int, ...]
    orders: tuple[tuple[int, tuple[int, ...]], ...]
    executable: Executable

    def run(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        outputs, saved = self.executable.run(*tensors)
        places = [next((n for n, y in enumerate(outputs) if y is x), None) for x in saved]
        made = [*outputs]
        del outputs  # else an output would stay beside its copy
        self.lay(made)
        return made, [x if n is None else made[n] for x, n in zip(saved, places, strict=True)]

    def infer(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        if not (self.places and self.executable.writes_anywhere):
            return self.lay([*self.executable.infer(*tensors)[0]]), ()
        rooms = [new_output(spec, tensors[0].device) for spec in self.specs]
        return self.lay([*self.executable.place(rooms, tensors)], rooms), ()

    def write(self, rooms: Tensors, *tensors: torch.Tensor) -> Tensors:
        """The outputs, each in its room or still to be copied there."""
        return self.executable.place(rooms, tensors)

    def lay(self, made: list[torch.Tensor], rooms: Tensors = ()) -> list[torch.Tensor]:
        """The outputs as they are due, in their rooms. Each takes the place of another in the list,
        which is then free."""
        for n, order in self.orders:
            made[n] = lay_in_order(made[n], order)
        for n in self.places:
            x, spec = made[n].detach(), self.specs[n]
            if normalise_strides(x.shape, x.stride()) != spec.strides:
                made[n] = (rooms[n] if rooms else new_output(spec, x.device)).copy_(x)
        return made


def new_output(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(spec.shape, new_strides(spec), dtype=spec.dtype, device=device)


def lay_out_results(executable: Executable, graph: Graph, seen: Graph) -> Executable:
    """An executable of a graph, from one of the graph as `seen`, with fewer layouts."""
    places, orders = places_to_lay(graph, seen), orders_to_keep(graph)
    if not places and not orders:
        return executable
    each = LaidOut(output_specs(graph), places, orders, executable)
    made = evolve(executable, run=each.run, infer=each.infer, write=each.write, fix=None)
    return add_copies(made, graph, seen, recorded=executable.writes_anywhere)


def orders_to_keep(graph: Graph) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The memory order of each output without a declared layout, by place. Backends keep that of an
    attention's results by themselves."""
    own = {i for eqn, outs in graph.numbered if eqn.op.forward for i in outs}
    if own.issuperset(graph.outputs):
        return ()
    declared = graph.layouts or (None,) * len(graph.outputs)
    each = enumerate(zip(output_specs(graph), declared, strict=True))
    return tuple((n, memory_order(spec)) for n, (spec, due) in each if due is None)


def places_to_lay(graph: Graph, seen: Graph) -> tuple[int, ...]:
    """The places of the outputs that a graph lays otherwise than the graph as `seen`: of gradients,
    which backends lay in their own ways, perhaps."""
    if graph.layouts == seen.layouts:
        return ()
    own = seen.layouts or (None,) * len(graph.outputs)
    declared = [n for n, (x, y) in enumerate(zip(graph.layouts, own, strict=True)) if x != y]
    if graph.is_gradient:
        return tuple(declared)
    due, known = output_specs(graph), output_specs(seen)
    return tuple(n for n in declared if due[n] != known[n])


def add_copies(needs: Needs, graph: Graph, seen: Graph, *, recorded: bool = False) -> Needs:
    """Needs with the copies of outputs to declared layouts. recorded: in a training step alone."""
    places, names, types = places_to_lay(graph, seen), output_names(graph), graph.output_types
    is_copied = "may be copied" if graph.is_gradient else "is copied"
    end = ", in calls that autograd records" if recorded else ""
    notes = (
        f"{names[n]} {is_copied}, {format_bytes(types[n].bytes)}, to its declared layout{end}"
        for n in places
    )
    more = sum(types[n].bytes for n in places)
    return evolve(needs, temporary=needs.temporary + more, notes=(*needs.notes, *notes))


def any_device(target: Target) -> Reason | None:
    """It runs on every target."""
    return None


def no_price(request: Request) -> Price:
    """The seconds of a call are not known."""
    return UNPRICED


def no_any(request: Request) -> Executable | None:
    """Each size is lowered by itself."""
    return None


def no_variants(request: Request) -> tuple[str, ...]:
    """Each graph is lowered in one way."""
    return ()


@final
@frozen
class DeviceTest:
    """A test of a kernel on a device, to pass before the kernel is used there.

    It is for kernels without a test run on their device. home: the place of the backend for a new
    process, "module:NAME". variant: the kernel's, with everything its machine code depends on
    beside device, libraries and its source. graphs: small ones for the variant, in the form
    backends see, of ops of this library. seconds: the most for all of it, compiling too. way: their
    option `variant` in lowering. precision: their option of that name.
    """

    home: str
    variant: str
    graphs: tuple[Graph, ...]
    seconds: float = 300.0
    way: str | None = None
    precision: Precision = "ieee"


def no_layouts(graph: Graph) -> Iterable[int]:
    """All outputs are copied to their declared layouts."""
    return ()


def no_device_test(request: Request) -> DeviceTest | None:
    """Tests have run the backend."""
    return None


OfRequest = Callable[[Request], Any]  # Any: each field of Backend has its own result
OfParts = Callable[[Graph, Target, Options], Any]  # as above


@final
@frozen
class TakesParts:
    """A function of a graph, a target and options, called with the parts of a request."""

    function: OfParts

    def __call__(self, request: Request) -> Any:  # Any: as above
        return self.function(request.graph, request.target, request.options)


def taking_request(function: OfRequest | OfParts) -> OfRequest:
    """The function of a request; one of three arguments is called with its parts."""
    given: Any = function  # Any: of either kind
    try:
        signature(given).bind("graph", "target", "options")
    except (TypeError, ValueError):  # other arguments, or no signature in Python
        same: OfRequest = given
        return same
    return TakesParts(given)


@final
@frozen
class Backend:
    """One way to run graphs: some functions of a request, and a name.

    All functions but `lower_any` see sizes as numbers, and the graph after all passes. Functions of
    three arguments, graph, target and options, work too. why_not: every reason against a graph on a
    target. Each is a Reason, or a plain text that completes "can't: " and is its own key; without
    one, the backend takes the graph. price: of a call of any graph, taken or not. lower: makes the
    graph run. It is called only without a reason, and raises RefusedError for one that shows only
    then. foresees: the needs, for backends slow to lower; the planner lowers for others. variants:
    names of other ways to lower, for tuning to measure. device_test: a test to pass on this
    machine's device before the backend runs the graph there, or None. lower_any: runs tensors of
    any sizes of at least 1, for a graph with Dims as sizes; None if each size is lowered by itself,
    at its first call. one_size: True if building is too slow for a plan of many sizes. lays: the
    places of the outputs written in any declared layout (`Graph.layouts`). It sees no other layout:
    these outputs are copied. real: True if only a real GPU runs it, not one that a CPU emulates.
    no_device: the reason against a target of another kind; then nothing more is asked.
    """

    name: str
    why_not: Callable[[Request], Iterable[Reason | str]] = field(converter=taking_request)
    lower: Callable[[Request], Executable] = field(converter=taking_request)
    foresees: Callable[[Request], Foreseen] | None = field(
        default=None, converter=optional(taking_request)
    )
    variants: Callable[[Request], Sequence[str]] = field(
        default=no_variants, converter=taking_request
    )
    device_test: Callable[[Request], DeviceTest | None] = field(
        default=no_device_test, converter=taking_request
    )
    lower_any: Callable[[Request], Executable | None] = field(
        default=no_any, converter=taking_request
    )
    one_size: bool = False
    lays: Callable[[Graph], Iterable[int]] = no_layouts
    real: bool = False
    price: Callable[[Request], Price] = field(default=no_price, kw_only=True)
    no_device: Callable[[Target], Reason | None] = field(default=any_device, kw_only=True)

    def reasons(self, request: Request) -> tuple[Reason, ...]:
        """Every reason against a graph, from the options too. Without one, it takes the graph."""
        own, target = self.unwanted(request.options), request.target
        if (absent := self.no_device(target)) is not None:
            return (*own, absent)
        if self.real and target.is_emulated:
            actual = f"{target} is emulated by the CPU"
            own.append(Reason("emulated", "runs on a real GPU", actual))
        seen = request.with_graph(self.seen(request.graph)) if request.graph.layouts else request
        return (*own, *map(Reason.of, self.why_not(seen)))

    def unwanted(self, options: Options) -> list[Reason]:
        """Every reason against it that the options give, whatever the graph and the target."""
        own: list[Reason] = []
        if self.name in options.avoid:
            actual = "avoid names it, at the call or around it"
            own.append(Reason("avoided", "is not to run", actual, "{limit}: {actual}"))
        if self.one_size and options.resized:
            actual = "Dims without classes stand for any"
            own.append(Reason("one_size", "plans for one size", actual))
        return own

    def foreseen(self, request: Request) -> Foreseen:
        """The needs of a graph it takes."""
        graph, seen = request.graph, self.seen(request.graph)
        if self.foresees is not None:
            needs = self.foresees(request.with_graph(seen))
            return add_copies(needs, graph, seen) if graph.layouts else needs
        lowered = self.lowered(request)
        return evolve(lowered.foreseen, notes=each_once((*lowered.notes, *lowered.launches())))

    def lowered(self, request: Request) -> Executable:
        """The graph ready to run, its outputs as declared."""
        seen = self.seen(request.graph)
        return lay_out_results(self.lower(request.with_graph(seen)), request.graph, seen)

    def seen(self, graph: Graph) -> Graph:
        """The graph with no more layouts than it writes itself."""
        if not graph.layouts:
            return graph
        own = {*self.lays(graph)}
        layouts = tuple([x if n in own else None for n, x in enumerate(graph.layouts)])
        return evolve(graph, layouts=layouts if own else ())


def room_name(result: str) -> str:
    """The name of a room among the buffers of a call."""
    return f"out.{result}"


def room_or_new(
    rooms: Rooms, name: str, layout: ResultLayout, device: torch.device
) -> torch.Tensor:
    """The room of a result, or new memory if it has none, or if it lies in another way."""
    shape, strides, dtype = layout
    room = rooms.get(name)
    if room is not None and room.dtype == dtype:
        due = normalise_strides(shape, strides)
        if normalise_strides(room.shape, room.stride()) == due:
            return room.as_strided(shape, strides)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def write_named(
    run: Callable[..., tuple[Sequence[torch.Tensor], object]],
    names: Sequence[str],
    rooms: Sequence[torch.Tensor],
    *tensors: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """`Executable.write`, by a function that takes rooms by name. names: of the outputs."""
    return run(*tensors, rooms=dict(zip(names, rooms, strict=True)))[0]
