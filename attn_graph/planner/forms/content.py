"""A plan, or a call without one, as text. Compiled and exported code keeps this text.

It holds every option of the choice, so it means the same in another process. It names the user's
own things: classes of masks or modifiers, backends, workspaces. A process knows them once it has
used them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, final
from weakref import WeakValueDictionary

import attrs
from attrs import define, field, frozen

from attn_graph.errors import GraphError, PlanTargetError
from attn_graph.ir.arguments import order_inputs, require_modifiers
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.layouts import PlainLayouts, restore_layouts
from attn_graph.ir.transforms.parse import Parser, parse, parse_mask, parse_modifier, read_syntax
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.request import Fallback, Named, Options, Request
from attn_graph.machine.cache import remember
from attn_graph.machine.sizes import parse_bytes
from attn_graph.machine.store import Store, default_store
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision, Switches
from attn_graph.machine.workspace import Workspace, default_workspace
from attn_graph.masks import Mask
from attn_graph.planner.arguments import CHOICE, Switch, one_of
from attn_graph.printing.text import show_call
from attn_graph.rings import find

PACKAGE = __name__.partition(".")[0]
WORKSPACE = "workspace"
NAMING = ("backends", "avoid")  # options that name backends
OTHERS = ("workspace", "store", "switches", "variant", "resized")
PLAIN = [x for x in attrs.fields(Options) if x.name not in OTHERS]  # stand in a text
USUAL = attrs.fields(
    attrs.make_class("Usual", {n: attrs.field(default=x) for n, x in CHOICE.items()})
)

Names = tuple[tuple[str, int], ...]  # a user's own things: a name, a number among its namesakes


@final
@define(eq=False)
class Registry:
    """The user's own things by name and number: several may share a name. It keeps none alive.

    It holds stores by folder too, so a text reaches only folders named in this process.
    """

    things: WeakValueDictionary[tuple[str, int], Any] = field(factory=WeakValueDictionary)
    stores: dict[str, Store] = field(factory=dict)  # by folder

    def number(self, name: str, thing: object) -> int:
        """The number of a thing; a new thing gets the lowest free one."""
        return next(n for n in count(1) if self.things.setdefault((name, n), thing) is thing)

    def thing(self, name: str, number: int) -> Any:  # Any: a class, or a backend
        """The thing of this name and number. Raises GraphError if this process does not know it."""
        thing = self.things.get((name, number))
        if thing is None:
            raise GraphError(
                f"{name} is a class or a backend of a user's own, which this process has not used; "
                f"say attn_graph.nn.ops.introduce({name}) before code runs that names it"
            )
        return thing

    def workspace(self, number: int) -> Workspace:
        """The default workspace for 0, else the one of this number, made at its first use."""
        if not number:
            return default_workspace()
        made = Workspace()
        known: Workspace = self.things.setdefault((WORKSPACE, number), made)
        return known

    def store(self, folder: str | bool) -> Store | None:
        """The store of a folder; True is the default one, False none. Raises GraphError if this
        process has not used the folder."""
        if isinstance(folder, bool):
            return default_store() if folder else None
        if folder not in self.stores:
            raise GraphError(
                f"the text names the store {folder!r}, which this process has not used; say "
                f"attn_graph.nn.ops.introduce(Store({folder!r})) before, if you trust the text"
            )
        return self.stores[folder]


OWN = Registry()


def with_fields(more: Sequence[Any]) -> Callable[..., list[Any]]:  # Any: attrs' own class
    """A hook of attrs: these fields of another class follow a class's own."""
    return lambda _, own: [*own, *more]


@final
@frozen(field_transformer=with_fields(PLAIN))
class PlanContent:
    """A plan: its simplified graph as text, and options, those of PLAIN among them.

    target: the name of the machine. store: a folder; True is the default store, False none.
    """

    graph: str
    target: str
    backends: tuple[str, ...] | None = None
    workspace: int = 0
    store: str | bool = True
    switches: tuple[Any, ...] = tuple(Switches())  # Any: values of Switches
    own: Names = ()

    def __attrs_post_init__(self) -> None:
        require_kinds(self, graph=str, target=str, store=str | bool, workspace=int, switches=tuple)
        given = {x.name: getattr(self, x.name) for x in PLAIN}
        require_names(self.backends or (), given["avoid"], self.own)
        known: dict[Any, Any] = {"bool": Switch, "Precision": Precision, "Fallback": Fallback}
        for x in PLAIN:
            if x.type in known:
                one_of(x.name, given[x.name], known[x.type])
        if given["max_workspace"] is not None:
            parse_bytes(given["max_workspace"])
        if not alike(self.switches, tuple(Switches())):
            raise GraphError(
                f"the text has switches {self.switches!r}, and those are not PyTorch's"
            )

    def restore(self) -> tuple[Graph, Options, tuple[Backend, ...] | None]:
        own = own_by_name(self.own)
        options = Options(
            workspace=OWN.workspace(self.workspace),
            store=OWN.store(self.store),
            switches=Switches(*self.switches),
            **{x.name: getattr(self, x.name) for x in PLAIN},
        )
        graph = parse(self.graph, known=classes_among(own))
        return graph, options, backends_of(self.backends, own)


@final
@frozen(field_transformer=with_fields(USUAL))
class CallContent:
    """A call of attention on tensors, without their shapes: its options, as the call has them, of
    CHOICE too.

    names: of the tensors after q, k and v, in their order. mask, modifiers: as text. v: the number
    of values within each key, if v is not a tensor.
    """

    names: tuple[str, ...] = ()
    mask: str | None = None
    scale: float | None = None
    align: str | None = None
    soft_cap: float | None = None
    alibi: bool = False
    dropout: float = 0.0
    stats: tuple[str, ...] | bool = False
    max_lengths: tuple[int | None, int | None] | None = None
    finite_pages: bool = False
    all_rows: bool = False
    outputs: PlainLayouts | None = None
    v: int | None = None
    modifiers: tuple[str, ...] = ()
    own: Names = ()

    def __attrs_post_init__(self) -> None:
        require_kinds(self, mask=str | None, v=int | None)
        if self.outputs is not None:
            restore_layouts(self.outputs)
        require_names(self.modifiers)
        who = (getattr(self, name) or () for name in NAMING)
        require_names(self.names, *who, self.own)
        if (due := tuple(order_inputs(dict.fromkeys(self.names)))) != self.names:
            raise GraphError(f"the text has names={self.names!r}, and their order is {due!r}")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all tensors, in their order."""
        return ("q", "k", "v", *self.names) if self.v is None else ("q", "k", *self.names)

    def restore(self) -> dict[str, Any]:  # Any: whatever the call takes
        own = own_by_name(self.own)
        options = {
            f.name: getattr(self, f.name)
            for f in attrs.fields(CallContent)
            if f.name not in ("names", "own")
        }
        if self.mask is not None:
            options["mask"] = parse_mask(self.mask, known=classes_among(own))
        known = classes_among(own)
        options["modifiers"] = tuple(parse_modifier(text, known) for text in self.modifiers)
        return options | {name: backends_of(options[name], own) for name in NAMING}


def require_kinds(content: Content, **kinds: Any) -> None:  # Any: a class, or a union of some
    """Raise GraphError for a field of another class."""
    for name, kind in kinds.items():
        value = getattr(content, name)
        if not isinstance(value, kind):
            raise GraphError(f"the text has {name}={value!r}, which it can't have")


def require_names(*fields: object) -> None:
    """Raise GraphError unless each is a tuple of names, or of names with their numbers."""
    for names in fields:
        parts = names if isinstance(names, tuple) else (names,)
        for part in parts:
            match part if isinstance(names, tuple) else None:
                case str() | (str(), int()):
                    continue
            raise GraphError(f"the text has {names!r} where names are due")


def alike(values: object, others: tuple[object, ...]) -> bool:
    """True if values have the types of other values: flags, texts or None, and numbers."""
    if not isinstance(values, tuple) or len(values) != len(others):
        return False
    pairs = zip(values, others, strict=True)
    return all(isinstance(x, type(y)) or (y is None and isinstance(x, str)) for x, y in pairs)


Content = PlanContent | CallContent
READER = Parser({cls.__name__: cls for cls in (PlanContent, CallContent)})


def write_plan(request: Request) -> str:
    """The text of a plan. Raises PlanTargetError if it is for another machine than this one."""
    graph, target, options = request.graph, request.target, request.options
    if options.workspace is default_workspace():
        workspace = 0
    else:
        workspace = OWN.number(WORKSPACE, options.workspace)
    if target.device is None and not target.is_emulated:
        raise PlanTargetError(
            f"the plan is for {target}, and code that is compiled or exported here runs on "
            f"{Target.here()}; compile the graph for that"
        )
    content = PlanContent(
        str(graph),
        target.name,
        names_of(request.among),
        workspace=workspace,
        store=name_store(options.store),
        switches=tuple(options.switches),
        own=name_own(*(eqn.op for eqn in graph.eqns), request.among),
        **{x.name: getattr(options, x.name) for x in PLAIN},
    )
    return show_call(content)


def write_call(names: tuple[str, ...], options: dict[str, Any]) -> str:  # Any: as `restore` gives
    """The text of a call with these options. Raises GraphError."""
    mask: Mask | None = options["mask"]
    who = {name: options[name] for name in NAMING}
    said: dict[str, Any] = options | {name: names_of(among) for name, among in who.items()}
    steps = require_modifiers(options["modifiers"])
    said |= {"mask": None if mask is None else str(mask), "modifiers": tuple(map(show_call, steps))}
    said |= {"own": name_own(mask, steps, *who.values())}
    return show_call(CallContent(names, **said))


@remember
def read_content(text: str) -> Content:
    """The plan or call of a text. Raises GraphError for a text of another form."""
    content = READER.value(read_syntax(text, "eval").body)
    if not isinstance(content, Content):
        raise GraphError(f"{text!r} is neither a plan nor a call")
    return content


# What is a user's own


def introduce(*things: type[Any] | Backend | Store) -> None:  # Any: masks, modifiers or ops
    """Make your own classes, backends and stores known before exported code runs that names them.

    A process that has called or compiled attention with them knows them already.
    """
    for thing in things:
        if isinstance(thing, Store):
            name_store(thing)
        else:
            OWN.number(thing.name if isinstance(thing, Backend) else thing.__name__, thing)


def names_of(backends: Sequence[str | Named] | None) -> tuple[str, ...] | None:
    if backends is None:
        return None
    return tuple(b if isinstance(b, str) else b.name for b in backends)


def name_own(*values: object) -> Names:
    """The user's own things among values and their parts, by name and number. Raises GraphError."""
    own = dict.fromkeys(own_parts(values))
    names = [thing.name if isinstance(thing, Backend) else thing.__name__ for thing in own]
    if twice := {name for name in names if names.count(name) > 1}:
        raise GraphError(f"two of your own are named {', '.join(sorted(twice))}; rename one")
    return tuple((name, OWN.number(name, thing)) for name, thing in zip(names, own, strict=True))


def own_parts(value: object) -> Iterator[Any]:  # Any: classes and backends
    """Classes of masks and ops, and backends, from outside this library."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from own_parts(part)
    elif isinstance(value, Backend):
        if value not in find("BACKENDS"):
            yield value
    elif isinstance(value, Mask | Op):
        if type(value).__module__.partition(".")[0] != PACKAGE:
            yield type(value)
        yield from own_parts(tuple(getattr(value, f.name) for f in attrs.fields(type(value))))


def own_by_name(names: Names) -> dict[str, Any]:  # Any: classes and backends
    """The things of a text by name. Raises GraphError for those unknown to this process."""
    return {name: OWN.thing(name, number) for name, number in names}


def classes_among(own: dict[str, Any]) -> list[type[Any]]:  # Any: as above
    return [thing for thing in own.values() if isinstance(thing, type)]


def backends_of(
    names: tuple[str, ...] | None,
    own: dict[str, Any],  # Any: as above
) -> tuple[Any, ...] | None:  # Any: names of ours, and a user's own records
    """Backends by name, and a user's own by value."""
    return None if names is None else tuple(own.get(name, name) for name in names)


def name_store(store: Store | None) -> str | bool:
    """A store as text: its folder, now known to this process; True for the default store."""
    if store is None or store == default_store():
        return store is not None
    OWN.stores[str(store.folder)] = store
    return str(store.folder)
