"""Attention by Triton's kernels: every mask and modifier of ours, forward and backward. No kernel
stores o in 8 bits: a pass of its own after them gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.scaling import NARROW, Dequantise, Quantise
from attn_graph.lowering.backend import UNKNOWN, UNPRICED, Backend, Executable, Price, write_named
from attn_graph.lowering.libraries.forecast import forecast
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import ROWS, Facts, Problem, facts_of, returns_lse
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
from attn_graph.lowering.request import Request
from attn_graph.lowering.steps import Steps
from attn_graph.lowering.triton.calls import TritonRun
from attn_graph.lowering.triton.places import kernel_strides, lying_reasons, order_bytes
from attn_graph.lowering.triton.work import Push, Single, Work, lying_of, split_graph
from attn_graph.machine.philox import WORDS
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision
from attn_graph.spec import IN_PAIRS, MOST_INT32, TensorSpec

if TYPE_CHECKING:  # imported on use: not needed on machines without a GPU
    from attn_graph.lowering.codegen.device_code import DeviceCode
    from attn_graph.lowering.codegen.machine_code import MachineCode
    from attn_graph.lowering.triton.plan import Flash

LEAST_SM = 80
WIDEST, REST = 512, 64  # of a head, and of q's and k's beside: see kernels/pieces.py
WIDEST_PUSHED = 128  # in forward mode: two sums of rows, and as many tangents, have no room beyond
MOST_ROWS = 256  # of one tile
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STATISTICS = ("lse", "max")  # stored by the forward kernel beside o
INTERPRETER = "with TRITON_INTERPRET=1 set before Python starts it runs here too, slowly"
Tensors = Sequence[torch.Tensor]


def no_interpreter(target: Target) -> Reason | None:
    """Against a CPU, unless it interprets kernels."""
    absent = None if target.interprets else no_gpu(target)
    return absent and evolve(absent, sentence=f"{{limit}}, and {{actual}}; {INTERPRETER}")


def why_not(request: Request) -> Iterator[Reason]:
    inner = inner_facts(request)
    parts = inner.once(split_graph)
    against: list[Reason] = []
    if request.target.kind == "cuda":
        against += old_gpu(LEAST_SM, request.target.sm)
    if "triton" not in dict(request.target.libraries):
        against.append(missing_library("triton", "pip install 'attn-graph[cuda]'"))
    if not parts:
        against.append(other_equations(inner.graph, pushes=True, packs=True))
    for work in (part.work for part in parts):
        lying = lying_of(work)
        against += [*attention_reasons(work.problem, lying.totals), *lying_reasons(lying)]
        against += wide_heads(work.problem, WIDEST_PUSHED) if isinstance(work, Push) else ()
        against += large_tiles(work.problem, request.target)
        against += conversion_reasons(work.problem)
    yield from dict.fromkeys(against)
    if not against:
        planned = (plan_reasons(part, request) for part in parts)
        yield from dict.fromkeys(chain.from_iterable(planned))


def inner_facts(request: Request) -> Facts:
    """The graph without the last step, if that quantises o."""
    inner = cut_last(request.graph)
    return request.facts if inner is None else facts_of(inner)


def conversion_reasons(problem: Problem) -> Iterator[Reason]:
    """Against keys and values beyond the dtype of queries."""
    kinds = {spec.dtype for spec in problem.specs[1:3]}
    if IN_PAIRS in kinds and problem.D > WIDEST:
        limit = f"has heads of at most {WIDEST} beside keys of two numbers a byte"
        yield Reason("wide_pairs", limit, f"q has D = {problem.D}")
    if problem.dtype == torch.float16 and (wider := kinds - {problem.dtype, *NARROW}):
        limit = "converts keys before it scales them, and float16 ends at 65504"
        yield Reason("converted", limit, f"k and v are in {', '.join(sorted(map(str, wider)))}")


def attention_reasons(problem: Problem, totals: Mapping[str, int]) -> Iterator[Reason]:
    """Against sizes, dtypes and statistics. totals: as `no_elements`."""
    from attn_graph.lowering.codegen.bounds import FAR

    yield from other_dtype(problem, DTYPES)
    yield from wide_heads(problem, WIDEST, REST)
    yield from no_elements(problem, totals)
    if max(problem.M, problem.N) >= FAR:
        limit = f"counts positions below {FAR}"
        yield Reason("positions", limit, f"M = {problem.M}, N = {problem.N}")
    yield from other_statistics(problem, STATISTICS)
    if problem.node.origin and problem.node.origin[3] % WORDS:
        limit = f"draws dropout of parts that begin at a multiple of {WORDS} keys"
        yield Reason("dropout_origin", limit, f"this one begins at key {problem.node.origin[3]}")


def large_tiles(problem: Problem, target: Target) -> Iterator[Reason]:
    """Against gradients in float32 whose least tiles exceed the GPU's shared memory."""
    from attn_graph.kernels.tilings import HELD, WIDE_GRADIENT, shared_memory
    from attn_graph.lowering.triton.programs import table_width

    single = problem.grad is not None and problem.dtype == torch.float32
    most = WIDE_GRADIENT if target.interprets else shared_memory(target.sm)
    if single and table_width(problem) == HELD and most < WIDE_GRADIENT:
        limit = f"needs {WIDE_GRADIENT:,} bytes of shared memory for gradients of such heads in f32"
        yield Reason("wide_gradient", limit, f"the GPU has {most}")


def plan_reasons(part: Single, request: Request) -> Iterator[Reason]:
    """Reasons found only with traced masks and modifiers, or with planned launches."""
    from attn_graph.masks.places import Untraceable

    work, lying = part.work, lying_of(part.work)
    try:
        code = part.code
    except Untraceable as error:
        yield untraceable(error)
        return
    if against := table_reason(work.problem, code):
        yield against
        return
    moved = work.large if isinstance(work, Push) else {}
    for name, spec in (lying.large | moved).items():
        far = tile_reach(lying, name, spec)
        if far > MOST_INT32:
            limit = f"counts within a tile up to {MOST_INT32} elements"
            yield Reason(f"tile_offsets.{name}", limit, f"{name} {spec} needs {far}")
    if request.options.max_workspace is not None or may_overflow(work):
        flash = plan_flash(part, request)
        yield from launch_reasons(flash)
        yield from request.options.over_workspace(flash.scratch.bytes)


def table_reason(p: Problem, code: DeviceCode) -> Reason | None:
    """Against a mask with too many tiles for planning to list, and which no kernel can list."""
    from attn_graph.kernels.tilings import LEAST, Tiling
    from attn_graph.lowering.codegen.tile_lists import MOST_TABLE, ListCode
    from attn_graph.masks.places import Untraceable

    tiles = -(-p.M // LEAST) * -(-p.N // LEAST)
    if tiles <= MOST_TABLE or p.node.mask is None or code.strip:
        return None
    try:
        ListCode.trace(p, Tiling(LEAST, LEAST, 4, 1))
    except Untraceable as error:
        limit = f"lists up to {MOST_TABLE:,} tiles ahead of calls, and more on the GPU"
        return Reason("table", limit, f"there are {tiles}: {error}", "{limit}; {actual}")
    return None


def may_overflow(work: Work) -> bool:
    """True if launches may have too many programs, or lists too many tiles. Dense operands have no
    more of either than tiles of LEAST x LEAST."""
    from attn_graph.kernels.tilings import LEAST
    from attn_graph.lowering.codegen.tile_lists import MOST_TILES

    p = work.problem
    rows, columns = (-(-length // LEAST) for length in (p.M, p.N))
    far = p.B * p.H * rows * columns > MOST_INT32 or max(rows, columns) > MOST_TILES
    return far or (isinstance(work, Lying) and work.packed is not None)


def launch_reasons(flash: Flash) -> Iterator[Reason]:
    """Against launches beyond a kernel's addresses."""
    from attn_graph.lowering.codegen.tile_lists import MOST_TILES, most_listed

    most = max(launch.grid for launch in flash.launches)
    if most > MOST_INT32:
        yield Reason("programs", f"launches up to {MOST_INT32:,} programs", f"{most:,} are needed")
    tiles = max(
        (most_listed(x.fixed) for x in flash.launches if x.kernel == "list_tiles"), default=0
    )
    if tiles > MOST_TILES:
        limit = f"lists {MOST_TILES} tiles a block at most where data decides"
        yield Reason("listed_tiles", limit, f"{tiles} are needed")


def plan_flash(part: Single, request: Request) -> Flash:
    """The plan for `why_not` and `lower` alike."""
    options = request.options
    limits = options.max_workspace, options.batch_invariant
    chosen = request.target, options.precision, options.variant, *limits
    return facts_of(part.graph).once(plan_single, *chosen)


def plan_single(
    facts: Facts, target: Target, precision: Precision, variant: str | None, most: int | None,
    invariant: bool,
) -> Flash:  # fmt: skip
    """The plan of a graph of one equation."""
    from attn_graph.lowering.triton.plan import Flash

    (part,) = facts.once(split_graph)
    return Flash.plan(part.work, target, precision, variant, most, invariant, part.code)


def lower(request: Request) -> Executable:
    """The launches of each equation, in their order, and a pass of its own to quantise o."""
    facts = inner_facts(request)
    inner, parts = facts.graph, facts.once(split_graph)
    each = [lower_part(part, request) for part in parts]
    lowered = each[0] if len(parts) == 1 else join_parts(inner, parts, each)
    return lowered if facts is request.facts else finish(lowered, request.graph, inner)


def lower_part(part: Single, request: Request) -> Executable:
    flash = plan_flash(part, request)
    call = TritonRun(flash, part.graph, request.options)
    run, second = call.run, flash.push is not None and flash.problem.grad is not None
    infer = run if part.graph.is_gradient or returns_lse(part.graph) else call.inference
    return Executable(
        run,
        flash.scratch.bytes,
        temporary_of(flash, part.graph),
        tuple(flash_notes(flash, request.options.precision)),
        launches=lambda: tuple(launch_notes(flash)),
        inspect=lambda: tuple(map(str, machines_of(flash))),
        text=lambda: generated_text(flash),
        infer=infer,
        write=None if second else partial(write_named, infer, part.graph.result_names),
        prepare=lambda: compile_kernels(flash),
    )


def join_parts(graph: Graph, parts: Sequence[Single], lowered: Sequence[Executable]) -> Executable:
    """The equations of a graph one after another."""
    pairs = zip(parts, lowered, strict=True)
    steps = Steps.of(graph, [(part.args, as_step(x)) for part, x in pairs], "cuda")
    return Executable(
        steps.run,
        max(x.workspace for x in lowered),
        max(x.temporary for x in lowered) + steps.bytes_between,
        tuple(dict.fromkeys(note for x in lowered for note in x.notes)),
        launches=lambda: tuple(note for x in lowered for note in x.launches()),
        inspect=lambda: tuple(text for x in lowered for text in x.inspect()),
        text=lambda: "\n".join(x.text() for x in lowered),
        prepare=lambda: [x.prepare() for x in lowered],
    )


def as_step(lowered: Executable) -> Callable[..., Sequence[torch.Tensor]]:
    """The results of an equation, as a step of a graph runs it."""
    return lambda _, *operands: lowered.run(*operands)[0]


def compile_kernels(flash: Flash) -> None:
    """Compile for the target ahead of the first call."""
    from attn_graph.lowering.triton.plan import compile_ahead

    compile_ahead(flash)


def machines_of(flash: Flash) -> list[MachineCode]:
    """The machine code of every launch; none under the interpreter."""
    from attn_graph.lowering.codegen.launches import is_interpreting
    from attn_graph.lowering.triton.plan import compile_launches

    return [] if is_interpreting() else compile_launches(flash)


def generated_text(flash: Flash) -> str:
    """The generated functions of mask and modifiers, then each kernel's PTX."""
    texts = dict.fromkeys(text for launch in flash.launches for text in launch.texts.values())
    return "\n".join([*filter(None, texts), *(machine.ptx for machine in machines_of(flash))])


def temporary_of(flash: Flash, graph: Graph) -> int:
    """Bytes allocated by PyTorch, at most, for adding up sums and the gradient of sinks, for
    ordering pages, for lse, and for quantised queries times their scales, before they are rounded:
    twice in float32."""
    sums = sum(b.bytes for name, b in flash.buffers.items() if name.startswith("sums"))
    delta, rows = flash.buffers.get("delta"), 10 if flash.push else 3
    rows += 2 * ("rest" in flash.buffers)
    sinks = rows * delta.bytes if delta and flash.problem.node.sinks else 0
    scaled = (eqn.outs[0] for eqn in graph.eqns[:-1] if isinstance(eqn.op, Dequantise))
    prepared = sum(8 * x.bytes // x.dtype.itemsize for x in scaled)
    return sums + sinks + order_bytes(flash.lying) + copied_lse(flash) + prepared


def copied_lse(flash: Flash) -> int:
    """Bytes of a copy of lse for the gradient, if it is declared otherwise than in C order."""
    lse = flash.lying.saved.get("lse")
    return 0 if lse is None or lse.is_dense else lse.type.bytes


def flash_notes(flash: Flash, precision: Precision) -> Iterator[str]:
    if flash.problem.dtype == torch.float32 and "tf32" == precision != flash.precision:
        yield "float32 products without TF32: its tiles would not fit this GPU's shared memory"
    if names := " and ".join(flash.as_bytes):
        made = "becomes float16 by integer arithmetic, at up to twice the instructions of e5m2"
        yield f"{names}: float8_e4m3fn {made}: sm_{flash.target.sm} has none for it"
    yield from flash.division.splitlines()
    if count := copied_lse(flash):
        yield f"lse is copied, {format_bytes(count)}, in C order"
    for name, spec in flash.specs().items():
        if len(spec.shape) < 4:
            continue
        if not copies_ahead(spec):
            yield f"{name} {spec} is read without copies ahead: rows don't begin on 16 bytes"


def launch_notes(flash: Flash) -> Iterator[str]:
    """The launches, for `explain`: how many programs, and how often they fill the GPU."""
    from attn_graph.lowering.triton.programs import processors_of

    processors = processors_of(flash.target)
    for launch in flash.launches:
        sizes = [str(launch.fixed[n]) for n in ("BLOCK_M", "BLOCK_N") if n in launch.fixed]
        tile = f"tiles of {' x '.join(sizes)}, " if len(sizes) == 2 else ""
        work = f"{launch.warps} warps, {count_of(launch.stages, 'stage')}"
        programs = count_of(launch.grid, "program")
        if "LAST_FIRST" in launch.fixed and processors is not None:
            programs += f", {launch.grid / processors:.3g} waves"
        yield f"{launch.kernel}: {programs}, {tile}{work}"


def count_of(number: int, noun: str) -> str:
    """ "1 stage", "2 stages"."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def copies_ahead(spec: TensorSpec) -> bool:
    """True if tiles are copied asynchronously: elements lie together along or across the rows, and
    all else begins on 16 bytes. test_kernels reads it off machine code."""
    _, _, row, last = spec.strides
    others = [s for s in spec.strides if s != 1]
    return 1 in (row, last) and all(s * spec.dtype.itemsize % 16 == 0 for s in others)


def variants(request: Request) -> tuple[str, ...]:
    """Other tile shapes, warps and stages than the table's, each of one kind of change."""
    from attn_graph.kernels.tilings import VARIANTS

    return tuple(VARIANTS)


def lays(graph: Graph) -> Iterator[int]:
    """The places of o and of the gradients of q, k and v: kernels store their rows in any strides
    within a tile's addresses."""
    lying = facts_of(graph).once(Lying.of)
    if lying is None:
        return
    each = zip(graph.result_names, graph.declared_outputs, strict=True)
    for n, (name, spec) in enumerate(each):
        if name in ROWS and spec is not None and tile_reach(lying, name, spec) <= MOST_INT32:
            yield n


def tile_reach(lying: Lying, name: str, spec: TensorSpec) -> int:
    """The largest offset within a tile of rows of a tensor, in elements."""
    strides = kernel_strides(lying, name, spec)
    return (MOST_ROWS - 1) * strides[2] + (spec.shape[-1] - 1) * strides[-1]


def price(request: Request) -> Price:
    """Interpreted kernels are for tests: all other backends come before them. On a GPU without a
    rate compiled ones come before all others without: they are for every GPU."""
    if request.target.kind == "cpu":
        return Price(inf) if request.target.interprets else UNPRICED
    made = forecast(request, "triton")
    return made if made.is_known else Price(UNKNOWN)


BACKEND = Backend(
    "triton", why_not, lower, variants=variants, lays=lays, price=price, no_device=no_interpreter
)


def cut_last(graph: Graph) -> Graph | None:
    """The graph that gives o before it is quantised, first of its outputs; None for one without
    that step at its end."""
    if not graph.eqns or not isinstance(graph.eqns[-1].op, Quantise):
        return None
    last, outs = graph.numbered[-1]
    others = tuple(i for i in graph.outputs if i not in outs)
    return Graph(graph.inputs, graph.eqns[:-1], (last.args[0], *others))


def finish(lowered: Executable, graph: Graph, inner: Graph) -> Executable:
    """An executable of a graph, from one of the graph before its last step."""
    o = graph.types[inner.outputs[0]]
    note = f"o is quantised by a pass of its own, which reads {format_bytes(o.bytes)}"
    return evolve(
        lowered,
        run=partial(run_last, lowered.run, graph, inner),
        infer=partial(run_last, lowered.infer, graph, inner),
        write=None,
        fix=None,
        writes_anywhere=False,
        copies_out=True,
        temporary=lowered.temporary + 3 * o.bytes * 4 // o.dtype.itemsize,
        notes=(*lowered.notes, note),
    )


def run_last(
    run: Callable[..., tuple[Tensors, Tensors]], graph: Graph, inner: Graph, *tensors: torch.Tensor
) -> tuple[Tensors, Tensors]:
    outputs, saved = run(*tensors)
    eqn, outs = graph.numbered[-1]
    values = dict(zip(inner.outputs, outputs, strict=True))
    given = (values[i] if i in values else tensors[i] for i in eqn.args)
    values |= zip(outs, eqn.op.run(*given), strict=True)
    return [values[i] for i in graph.outputs], saved
