"""Attention by Triton's kernels: every mask and modifier of ours, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import Factory, evolve, field, frozen

from attn_graph.errors import Reason
from attn_graph.ir.attention import SAVED
from attn_graph.ir.gradient_ops import sink_gradient
from attn_graph.ir.graph import Graph
from attn_graph.ir.philox import WORDS
from attn_graph.lowering.backend import Backend, Executable, Options
from attn_graph.lowering.problem import Problem, output_names, returns_lse, select_outputs
from attn_graph.lowering.reasons import (
    missing_library,
    no_elements,
    no_gpu,
    old_gpu,
    other_dtype,
    other_equations,
    other_statistics,
    untraceable,
    wide_heads,
)
from attn_graph.lowering.triton.few_rows import is_decoding
from attn_graph.lowering.triton.jvp import Push, plan_push
from attn_graph.lowering.triton.layout import Layout, read_operands
from attn_graph.machine.device_memo import DeviceMemo, copy_to
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:  # and imported where they are used: machines without a GPU never ask for them
    from attn_graph.lowering.triton.device_code import Contribution
    from attn_graph.lowering.triton.launches import Launch
    from attn_graph.lowering.triton.offline import MachineCode
    from attn_graph.lowering.triton.plan import Flash

LEAST_SM = 80
WIDEST = 256
MOST_ROWS = 256  # of one tile
POSITIONS = 2**30  # beyond all of them lies FAR of kernels/common.py
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STATISTICS = ("lse", "max")  # what the forward kernel stores beside o
INTERPRETER = "with TRITON_INTERPRET=1 set before Python starts it runs here too, slowly"
Named = dict[str, Any]  # tensors by the names that launches give them


def why_not(graph: Graph, target: Target, options: Options) -> Iterator[Reason]:
    """Every reason against a graph: the target, the sizes, what can't be traced."""
    if target.kind == "cpu" and not target.interprets:
        yield evolve(no_gpu(target), sentence=f"{{limit}}, and {{actual}}; {INTERPRETER}")
        return
    against = [*target_reasons(target)]
    work = work_of(graph)
    if work is None:
        against.append(other_equations(graph, " of gradients"))
    else:
        against += attention_reasons(work.problem, DTYPES)
    if isinstance(work, Push):
        against = [*dict.fromkeys((*against, *work.reasons()))]
    elif isinstance(work, Layout):
        against += work.reasons()
    yield from against
    if work is not None and not against:
        tangents = work.large if isinstance(work, Push) else ()
        more = {f"t{name}": spec for name, spec in tangents}
        yield from plan_reasons(lambda: plan_flash(work, target, options), options, more)


def work_of(graph: Graph) -> Layout | Push | None:
    """What there are kernels for: one attention, its gradient or its forward mode; None of else."""
    return Layout.of(graph) or Push.of(graph)


def target_reasons(target: Target) -> Iterator[Reason]:
    """What a target lacks."""
    if target.kind == "cuda":
        yield from old_gpu(LEAST_SM, target.sm)
    if "triton" not in dict(target.libraries):
        yield missing_library("triton", "pip install 'attn-graph[cuda]'")


def attention_reasons(problem: Problem, dtypes: Sequence[torch.dtype]) -> Iterator[Reason]:
    """The sizes, dtypes and statistics that the kernels do not take."""
    yield from other_dtype(problem, dtypes)
    yield from wide_heads(problem, WIDEST)
    yield from no_elements(problem)
    if max(problem.M, problem.N) >= POSITIONS:
        limit = f"counts positions below {POSITIONS}"
        yield Reason("positions", limit, f"M = {problem.M}, N = {problem.N}")
    yield from other_statistics(problem, STATISTICS)
    if problem.node.origin and problem.node.origin[3] % WORDS:
        limit = f"draws dropout of parts that begin at a multiple of {WORDS} keys"
        yield Reason("dropout_origin", limit, f"this one begins at key {problem.node.origin[3]}")


def plan_reasons(
    plan: Callable[[], Flash],
    options: Options,
    more: Mapping[str, TensorSpec] = MappingProxyType({}),
) -> Iterator[Reason]:
    """What shows only when the launches are planned. more: what they read beside operands."""
    from attn_graph.masks.places import Untraceable

    try:
        flash = plan()
    except Untraceable as error:
        yield untraceable(error)
        return
    yield from address_reasons(flash, more)
    yield from options.over_workspace(flash.scratch.bytes)


def address_reasons(
    flash: Flash, more: Mapping[str, TensorSpec] = MappingProxyType({})
) -> Iterator[Reason]:
    """Why launches do not fit what a kernel can address. more: what they read beside operands."""
    from attn_graph.lowering.triton.device_code import LONG
    from attn_graph.lowering.triton.tile_lists import MOST_TILES, most_listed

    for name, spec in {**flash.specs(), **more}.items():
        strides = flash.layout.strides(name, spec)
        far = (MOST_ROWS - 1) * strides[2] + (spec.shape[-1] - 1) * strides[-1]
        if far > LONG:
            limit = f"counts within a tile up to {LONG} elements"
            yield Reason(f"tile_offsets.{name}", limit, f"{name} {spec} needs {far}")
    most = max(launch.grid for launch in flash.launches)
    if most > LONG:
        yield Reason("programs", f"launches up to {LONG} programs", f"{most} are needed")
    tiles = max(
        (most_listed(x.fixed) for x in flash.launches if x.kernel == "list_tiles"), default=0
    )
    if tiles > MOST_TILES:
        limit = f"lists {MOST_TILES} tiles a block at most where data decides"
        yield Reason("listed_tiles", limit, f"{tiles} are needed")


def plan_flash(work: Layout | Push, target: Target, options: Options) -> Flash:
    """What `why_not` and `lower` both ask for."""
    if isinstance(work, Push):
        return plan_push(work, target, options.precision, options.variant)
    problem = work.problem
    most = options.max_workspace if problem.grad is not None or is_decoding(problem) else None
    invariant = options.batch_invariant
    return plan_once(work, target, options.precision, options.variant, most, invariant)


@lru_cache(maxsize=256)
def plan_once(
    layout: Layout, target: Target, precision: Precision, variant: str | None, most: int | None,
    invariant: bool,
) -> Flash:  # fmt: skip
    """The launches, planned once."""
    from attn_graph.lowering.triton.plan import Flash

    return Flash.plan(layout, target, precision, variant, most, invariant)


def lower(graph: Graph, target: Target, options: Options) -> Executable:
    """The launches that run a graph."""
    work = work_of(graph)
    assert work is not None  # why_not said so
    flash = plan_flash(work, target, options)
    call, problem = TritonCall(flash, graph, options), flash.problem
    run = call.forward if problem.grad is None else call.backward
    if isinstance(work, Push):
        run = partial(call.push, work)
    return Executable(
        run,
        flash.scratch.bytes,
        temporary_of(flash),
        tuple(flash_notes(flash, options.precision)),
        launches=lambda: tuple(launch_notes(flash)),
        inspect=lambda: tuple(map(str, machines_of(flash))),
        text=lambda: generated_text(flash),
        infer=run if graph.is_gradient or returns_lse(graph) else call.inference,
        prepare=lambda: compile_kernels(flash),
    )


def compile_kernels(flash: Flash) -> None:
    """Compile for the target ahead of the first call."""
    from attn_graph.lowering.triton.offline import compile_ahead

    compile_ahead(flash)


def machines_of(flash: Flash) -> list[MachineCode]:
    """The machine code of every launch; none where Triton interprets."""
    from attn_graph.lowering.triton import offline
    from attn_graph.lowering.triton.launches import is_interpreting

    return [] if is_interpreting() else offline.compile_launches(flash)


def generated_text(flash: Flash) -> str:
    """The functions that were made of the mask and the modifiers, then each kernel's PTX."""
    texts = dict.fromkeys(text for launch in flash.launches for text in launch.texts.values())
    return "\n".join([*filter(None, texts), *(machine.ptx for machine in machines_of(flash))])


def temporary_of(flash: Flash) -> int:
    """Bytes that PyTorch allocates, at most, while it adds up sums and the gradient of sinks."""
    sums = sum(b.bytes for name, b in flash.buffers.items() if name.startswith("sums"))
    delta = flash.buffers.get("delta")
    return sums + (3 * delta.bytes if delta and flash.problem.node.sinks else 0)


def flash_notes(flash: Flash, precision: Precision) -> Iterator[str]:
    """How it runs, for `explain`."""
    if flash.problem.dtype == torch.float32 and precision != flash.precision:
        yield "float32 products without TF32: its tiles would not fit this GPU's shared memory"
    if flash.division:
        yield flash.division
    for name, spec in flash.specs().items():
        if len(spec.shape) < 4:
            continue
        if not copies_ahead(spec):
            yield f"{name} {spec} is read without copies ahead: rows don't begin on 16 bytes"


def describe_balance(flash: Flash, launch: Launch) -> str:
    """ "3.9 waves, balance 1.02" of a launch, as far as known before data; "" of short ones."""
    from attn_graph.kernels.tilings import Tiling
    from attn_graph.lowering.triton.programs import block_costs, places_of, schedule_programs

    if "LAST_FIRST" not in launch.fixed:
        return ""
    fixed, lists = launch.fixed, str(launch.tensors.get("lists_ptr"))
    tile = Tiling(fixed["BLOCK_M"], fixed["BLOCK_N"], launch.warps, launch.stages)
    places = places_of(flash.problem, flash.target, tile)
    if places is None:
        return ""
    by_keys, table = launch.kernel == "key_gradient", flash.tables.get(lists)
    if (
        flash.layout.sides
        or lists in flash.buffers
        or not (costs := block_costs(flash.problem, tile, by_keys, table))
    ):
        return f"{launch.grid / places:.3g} waves, balance up to the data"
    heads, each = launch.grid // len(costs), 1
    if by_keys:
        each = -(-fixed["GROUP"] // fixed["SPLITS"])
    return schedule_programs(costs, tile, heads, each, fixed["TOGETHER"]).figures(places)


def launch_notes(flash: Flash) -> Iterator[str]:
    """What it launches, for `explain`: how many programs and how evenly they fill the GPU."""
    for launch in flash.launches:
        sizes = [str(launch.fixed[n]) for n in ("BLOCK_M", "BLOCK_N") if n in launch.fixed]
        tile = f"tiles of {' x '.join(sizes)}, " if len(sizes) == 2 else ""
        work = f"{launch.warps} warps, {count_of(launch.stages, 'stage')}"
        figures = describe_balance(flash, launch)
        programs = ", ".join(filter(None, (count_of(launch.grid, "program"), figures)))
        yield f"{launch.kernel}: {programs}, {tile}{work}"


def count_of(number: int, noun: str) -> str:
    """ "1 stage", "2 stages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def copies_ahead(spec: TensorSpec) -> bool:
    """Whether tiles are copied asynchronously: elements lie together along the rows or across
    them, and all else begins on 16 bytes. Read off machine code, by test_kernels."""
    _, _, row, last = spec.strides
    others = [s for s in spec.strides if s != 1]
    return 1 in (row, last) and all(s * spec.dtype.itemsize % 16 == 0 for s in others)


@final
@frozen(eq=False)
class TritonCall:
    """What runs a graph: its launches on tensors by name, in scratch from the workspace."""

    flash: Flash
    graph: Graph
    options: Options
    tables: DeviceMemo[torch.Tensor] = field(factory=DeviceMemo, init=False)
    names: tuple[str, ...] = field(  # of the results that are returned
        init=False, default=Factory(lambda call: output_names(call.graph), takes_self=True)
    )

    @cached_property
    def storing_no_lse(self) -> tuple[Launch, ...]:
        """The launches where nobody reads lse."""
        return self.flash.without_lse()

    def forward(
        self, *tensors: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """o and the statistics of the operands, and what is saved."""
        results = self.attend(self.flash.launches, tensors, self.flash.problem.node.stats)
        return [results[name] for name in self.names], [results[name] for name in SAVED]

    def inference(
        self, *tensors: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The forward of a graph that does not return lse, without it."""
        stats = [name for name in self.flash.problem.node.stats if name != "lse"]
        results = self.attend(self.storing_no_lse, tensors, stats)
        return [results[name] for name in self.names], ()

    def attend(
        self, launches: Sequence[Launch], tensors: Sequence[torch.Tensor], stats: Sequence[str]
    ) -> Named:
        """o and these statistics, by name."""
        every = read_operands(self.graph, tensors)
        count = len(self.flash.problem.node.ranks)
        operands, tables = every[:count], every[count:]
        o, shape = self.flash.new_o(operands[0].device), self.flash.layout.statistic()
        results: Named = {"o": o}
        for name in stats:
            results[name] = torch.empty(shape, dtype=torch.float32, device=o.device)
        with self.launched(launches, {**results}, operands, tables):
            pass
        return results

    def backward(
        self, *tensors: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The wanted gradients of the operands, o, lse and the cotangents."""
        problem = self.flash.problem
        grad = problem.grad
        assert grad is not None
        layout = self.flash.layout
        every = read_operands(self.graph, tensors)
        read = grad.split(every[: len(grad.ranks)])
        operands, device = read.own, read.o.device
        gradients: dict[int, torch.Tensor] = {
            n: self.flash.new_gradient(n, device) for n in range(3) if grad.wants[n]
        }
        whole = [n for n, x in self.flash.code.contributions.items() if set("ij") <= set(x.axes)]
        gradients |= {
            n: torch.empty(problem.specs[n].shape, dtype=problem.specs[n].dtype, device=device)
            for n in whole
        }
        named: Named = {f"grad{n}": x for n, x in gradients.items()} | {
            "o": read.o,
            "lse": read.lse.contiguous(),  # ours is; another backend may have saved it otherwise
            "do": read.do,
            "dlse": read.dlse,
        }
        named |= {"o.strides": layout.strides("o", TensorSpec.like(read.o))}
        tables = every[len(grad.ranks) :]
        with self.launched(self.flash.launches, named, operands, tables) as scratch:
            for n, collected in self.flash.code.contributions.items():
                if n not in gradients:
                    gradients[n] = sum_collected(scratch[f"sums{n}"], collected)
            if problem.node.sinks:
                at = problem.node.roles.index("sinks")
                if grad.wants[at]:
                    lse = named["lse"].view(layout.lines())
                    gradients[at] = sink_gradient(operands[at], lse, scratch["delta"].neg())
        made = [gradients[n] for n, wanted in enumerate(grad.wants) if wanted]
        return select_outputs(self.graph, made), ()

    def push(
        self, push: Push, *tensors: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The results of an AttentionJvp, and those that its derivatives read."""
        p, op = push.problem, push.op
        own, moved = op.split([tensors[i] for i in self.graph.eqns[0].args])
        device, shape = own[0].device, (p.B, p.H, p.M)
        results = {name: p.new_o(device) for name in ("o", "to")}
        stats = (*p.node.stats, "tlse")
        results |= {n: torch.empty(shape, dtype=torch.float32, device=device) for n in stats}
        pairs = zip(p.node.roles, moved, strict=True)
        tangents = {f"t{role}": x for role, x in pairs if x is not None}
        with self.launched(self.flash.launches, {**results, **tangents}, own):
            pass
        every = [results[name] for name in op.names]
        return select_outputs(self.graph, every), [results[name] for name in op.saved]

    @contextmanager
    def launched(
        self, launches: Sequence[Launch], named: Named, operands: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor] = (),
    ) -> Iterator[Mapping[str, torch.Tensor]]:  # fmt: skip
        """Run launches on the operands of the attention and these tensors; the scratch.

        tables: of packed operands and of keys in pages.
        """
        flash, device = self.flash, operands[0].device
        flash.check()
        given = flash.problem.node.split(operands)
        named |= {"q": given.q, "k": given.k, "v": given.v}
        named |= {"sinks": given.sinks, "seed": given.seed, "offset": given.offset}
        named |= flash.layout.where(given.mask, tables)
        data = (x for each in (*given.modifiers, given.mask) for x in each.values())
        named |= {f"data.{k}": x for k, x in enumerate(data)}
        named |= {name: self.table(name, device) for name in flash.tables}
        with self.options.workspace.lease(flash.scratch, device) as views:
            scratch = dict(zip(flash.buffers, views, strict=True))
            named |= scratch
            with torch.cuda.device_of(operands[0]):
                for launch in launches:
                    launch(named)
            yield scratch

    def table(self, name: str, device: torch.device) -> torch.Tensor:
        """A list of tiles on a device, brought there once."""
        host = self.flash.tables[name]
        return self.tables.get((name, device), lambda: copy_to(device, host, "lists of tiles"))


def sum_collected(sums: torch.Tensor, collected: Contribution) -> torch.Tensor:
    """A tensor's gradient from sums [B,H,M] or [B,H,N] of what it was read for."""
    line = "j" if "j" in collected.axes else "i"
    over = [n for n, axis in enumerate(("b", "h", line)) if axis not in collected.axes]
    spec = collected.spec
    return (sums.sum(over) if over else sums).reshape(spec.shape).to(spec.dtype, copy=not over)


def variants(graph: Graph, target: Target, options: Options) -> tuple[str, ...]:
    """Other tile shapes, warps and stages than the table's, each of one kind of change."""
    from attn_graph.kernels.tilings import VARIANTS

    return tuple(VARIANTS)


BACKEND = Backend("triton", why_not, lower, variants=variants)
