"""Graphs and masks from flags, from files with their text, and from expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, TextIO, TypeVar

import click
import torch

import attn_graph as ag
from attn_graph.ir.arguments import ADDENDS, ARGUMENTS
from attn_graph.ir.transforms.parse import parse_mask
from attn_graph.masks import Mask, needs_of
from attn_graph.spec import DTYPES, FLOATS, NAMES, QUANTISED

Command = TypeVar("Command", bound=Callable[..., None])
Flags = Mapping[str, Any]  # by the names of the options below
Sizes = tuple[int, ...]
Specs = Mapping[str, ag.TensorSpec]  # by the names of tensors
Read = Callable[[click.Context, click.Parameter, str | None], Sizes | None]  # click's callback
FLOAT_NAMES = [NAMES[dtype] for dtype in FLOATS]
SMALL_NAMES = [NAMES[dtype] for dtype in QUANTISED]
OTHER_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()} | {
    f"fp{bits}": f"f{bits}" for bits in (16, 32, 64)
}

SIZES = "a list of sizes such as 2,8,1024,64"
WINDOW = "LEFT or LEFT,RIGHT, such as 255 or 255,0"
MOST = 2**40  # of one size: no machine has room for more
LONGEST = 40  # digits of a number that an error repeats


def parse_sizes(text: str, form: str = SIZES) -> Sizes:
    """The sizes of "2,8,1024,64" or "128x128". form: for the message. Raises BadParameter."""
    if not re.fullmatch(r"\s*\d+(\s*[,x]\s*\d+)*\s*", text):
        raise click.BadParameter(f"{text!r} is not {form}")
    figures = [figures.lstrip("0") or "0" for figures in re.findall(r"\d+", text)]
    longest = max(figures, key=len)
    if len(longest) > len(str(MOST)) or max(map(int, figures)) > MOST:
        what = longest if len(longest) < LONGEST else f"a number of {len(longest)} digits"
        raise click.BadParameter(f"{what} is too large for a size: the most is {MOST}")
    return tuple(map(int, figures))


def reads_sizes(meaning: str, *counts: int, form: str = SIZES) -> Read:
    """A click callback for the sizes of `meaning`, as many as one of `counts`."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> Sizes | None:
        numbers = None if value is None else parse_sizes(value, form)
        if numbers is not None and len(numbers) not in counts:
            due = " or ".join(map(str, counts))
            raise click.BadParameter(f"{value} has {len(numbers)} sizes, and {meaning} has {due}")
        return numbers

    return read


def parse_dtype(text: str, known: Sequence[str] = FLOAT_NAMES) -> str:
    """The name of a dtype: "f16" for "float16" and "fp16" too. Raises BadParameter."""
    name = OTHER_NAMES.get(text, text)
    if name not in known:
        raise click.BadParameter(f"{text!r} is none of {', '.join(known)}")
    return name


def reads_dtype(*known: str) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """A click callback for the name of one of these dtypes."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        return None if value is None else parse_dtype(value, known)

    return read


def read_bias(
    _: click.Context, __: click.Parameter, value: str | None
) -> tuple[Sizes, str | None] | None:
    """A click callback for sizes and, after a colon, a dtype; None is q's."""
    if value is None:
        return None
    shape, colon, dtype = value.partition(":")
    return parse_sizes(shape), parse_dtype(dtype) if colon else None


AXES = reads_sizes("[batch, heads, positions, head size]", 4, 3)
MASK = (
    click.option("--causal", is_flag=True, help="Keys up to the query's own place."),
    click.option(
        "--window", metavar="LEFT[,RIGHT]", callback=reads_sizes("a window", 1, 2, form=WINDOW),
        help="Sliding window: LEFT keys before and RIGHT after the query (default 0).",
    ),
    click.option(
        "--prefix", type=click.IntRange(0),
        help="Also keep the first keys, regardless of --causal and --window.",
    ),
    click.option("--lengths", is_flag=True, help="Only keys up to each sequence's length."),
    click.option("--q-lengths", is_flag=True, help="Only queries up to each sequence's length."),
    click.option("--segments", is_flag=True, help="Only keys of the query's own segment."),
    click.option(
        "--align", type=click.Choice(["top_left", "bottom_right"]),
        help="The corner to count positions from if M and N differ.",
    ),
)  # fmt: skip
FLAGGED = {name: argument for name, argument in ARGUMENTS.items() if argument.flag}
GRAPH = (
    click.option("--q", metavar="B,H,M,D", callback=AXES, help="Sizes of q; instead of FILE."),
    click.option("--k", metavar="B,G,N,D", callback=AXES, help="Sizes of k, by default q's."),
    click.option("--v", metavar="B,G,N,E", callback=AXES, help="Sizes of v, by default k's."),
    click.option(
        "--like", metavar="FILE", type=click.File(encoding="utf-8"),
        help="q, k and v as the graph in FILE has them; further flags change it.",
    ),
    click.option(
        "--dtype", metavar="|".join(FLOAT_NAMES), callback=reads_dtype(*FLOAT_NAMES, *SMALL_NAMES),
        help="Dtype of q, k and v, by default f32; of 8 bits, with scales, "
        f"{', '.join(SMALL_NAMES)}.",
    ),
    click.option(
        "--kv-dtype", metavar="|".join(SMALL_NAMES), callback=reads_dtype(*SMALL_NAMES),
        help="k and v in 8 bits, each with one scale.",
    ),
    click.option(
        "--o-scale", is_flag=True, help="o in 8 bits too, with amax; for --dtype of 8 bits."
    ),
    click.option(
        "--packed", metavar="B", type=click.IntRange(1),
        help="B sequences in a row: q is T,H,D, and k and v T,G,D unless --pages.",
    ),
    click.option(
        "--max-lengths", metavar="M[,N]", callback=reads_sizes("the most queries and keys", 1, 2),
        help="The most queries and keys of a packed sequence, by default all.",
    ),
    click.option(
        "--all-rows", is_flag=True, help="Every packed row is in a sequence; for --packed."
    ),
    click.option(
        "--pages", metavar="COUNT", type=click.IntRange(1),
        help="COUNT pages for each sequence; k and v are pools of pages: PAGES,ROWS,G,D.",
    ),
    click.option(
        "--finite-pages", is_flag=True, help="No row of the pools holds NaN or Inf; for --pages."
    ),
    click.option(
        "--blocks", metavar="ROWSxKEYS", callback=reads_sizes("a block", 1, 2),
        help="Only blocks of the scores that a tensor marks, such as 128x128.",
    ),
    click.option(
        "--layout", help="Memory order of q, k and v: bhsd, the default, bshd, sbhd, ..."
    ),
    click.option("--scale", type=float, help="Scale of the scores, by default 1 / sqrt(D)."),
    *MASK,
    click.option("--mask", metavar="TEXT", help="A mask as printed; flags join it."),
    click.option("--soft-cap", type=float, help="Scores s become c tanh(s / c)."),
    click.option("--alibi", is_flag=True, help="ALiBi, with the paper's slopes."),
    click.option(
        "--bias", metavar="B,H,M,N[:DTYPE]", callback=read_bias,
        help="Sizes of a bias, each full or 1; dtype q's by default.",
    ),
    *[click.option(f"--{n}".replace("_", "-"), is_flag=True, help=x.flag)
      for n, x in FLAGGED.items()],
    click.option("--dropout", type=float, help="Share of the weights to drop."),
    click.option("--stats", is_flag=True, help="lse as a second output."),
)  # fmt: skip
FILE = click.argument("file", type=click.File(encoding="utf-8"), required=False)


def graph_flags(command: Command) -> Command:
    """The command with FILE and all flags of a graph, for `graph_of`."""
    return add_options(FILE(command), GRAPH)


def mask_flags(command: Command) -> Command:
    """The command with the flags of a mask, for `mask_of`."""
    return add_options(command, MASK)


def add_options(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    """The command with these options, in their order."""
    return reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def graph_of(file: TextIO | None, flags: Flags) -> ag.Graph:
    """The graph of a file or of flags. Raises UsageError for both or neither."""
    given = [name for name, value in flags.items() if value not in (None, False)]
    if file is not None and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"FILE says the graph, and {names} would say another")
    if file is not None:
        try:
            return ag.parse(graph_text(file.read()))
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{file.name} is not text: {error}") from error
    if flags["q"] is None and flags["like"] is None:
        raise click.UsageError(
            "describe a graph: --q and further flags, or FILE, its text; - is stdin"
        )
    return graph_of_flags(flags)


def graph_text(text: str) -> str:
    """The graph in a text: all of it, or the first graph printed by `explain`."""
    plain = click.unstyle(text)
    told = re.search(
        r"^\w.* on .*?^(def graph\(.*?^    return [^\n]*)", plain, re.DOTALL | re.MULTILINE
    )
    return told[1] if told else plain


def graph_of_flags(flags: Flags) -> ag.Graph:
    """The graph of flags, --q or --like among them. Raises GraphError and UsageError."""
    specs = specs_of_flags(flags)
    mask, q = mask_of(flags), specs["q"]
    longest: Any = flags["max_lengths"] and (*flags["max_lengths"], None)[:2]
    bias, bias_dtype = flags["bias"] or (None, None)
    more: dict[str, Any] = {
        "bias": bias and ag.TensorSpec(bias, DTYPES[bias_dtype] if bias_dtype else q.dtype),
        **layout_inputs(flags, specs),
        **data_of(mask, flags, specs),
    }
    return ag.attention(
        specs["q"],
        specs["k"],
        specs["v"],
        scale=flags["scale"],
        mask=mask,
        align=flags["align"],
        soft_cap=flags["soft_cap"],
        alibi=flags["alibi"],
        dropout=flags["dropout"] or 0.0,
        stats=flags["stats"],
        max_lengths=longest,
        finite_pages=flags["finite_pages"],
        all_rows=flags["all_rows"],
        **more,
    )


def specs_of_flags(flags: Flags) -> Specs:
    """q, k and v, of --like where flags do not change them. Raises UsageError."""
    if flags["pages"] and flags["k"] is None and flags["like"] is None:
        raise click.UsageError("--pages needs the pool: --k PAGES,ROWS,G,D")
    specs: dict[str, ag.TensorSpec] = {}
    text = flags["like"] and graph_text(flags["like"].read())
    like = {i.name: i.spec for i in ag.parse(text).inputs} if text else {}
    if text and "q" not in like:
        raise click.UsageError(f"the graph in {flags['like'].name} has no input named q")
    for name, leader in (("q", "q"), ("k", "q"), ("v", "k")):
        known = like.get(name) or specs.get(leader)
        own = flags["dtype"] if name == "q" else flags["kv_dtype"] or flags["dtype"]
        dtype = DTYPES[own] if own else known.dtype if known else torch.float32
        if known is None or flags[name] or flags["layout"]:
            shape = flags[name] or (known.shape if known else ())
            specs[name] = ag.TensorSpec(shape, dtype, layout=flags["layout"])
        else:
            specs[name] = ag.TensorSpec(known.shape, dtype, known.strides)
    for name, spec in () if like else specs.items():
        axes = 3 if flags["packed"] and not (flags["pages"] and name != "q") else 4
        if len(spec.shape) != axes:
            raise click.UsageError(
                f"--{name} has {len(spec.shape)} sizes, and needs {axes}; --packed B has sequences "
                "in a row, T,H,D"
            )
    return specs


def layout_inputs(flags: Flags, specs: Specs) -> dict[str, ag.TensorSpec]:
    """The starts of packed sequences, the table of pages, and a scale for each tensor in 8 bits."""
    integers, count = torch.int32, flags["packed"] or specs["q"].shape[0]
    more = {}
    if flags["packed"]:
        more["q_starts"] = ag.TensorSpec((count + 1,), integers)
        if not flags["pages"] and specs["k"].shape[0] != specs["q"].shape[0]:
            more["kv_starts"] = more["q_starts"]
    if flags["pages"]:
        more["pages"] = ag.TensorSpec((count, flags["pages"]), integers)
    scaled = {name: spec for name, spec in specs.items() if spec.dtype in QUANTISED}
    scaled |= {"o": specs["q"]} if flags["o_scale"] else {}
    scales = {n: ag.TensorSpec((1,) * len(x.shape), torch.float32) for n, x in scaled.items()}
    return more | {f"{name}_scale": scale for name, scale in scales.items()}


def data_of(mask: Mask | None, flags: Flags, specs: Specs) -> dict[str, ag.TensorSpec]:
    """A spec for each tensor of a mask, and of a flag without a value."""
    q, k, most = specs["q"].shape, specs["k"].shape, flags["max_lengths"] or ()
    B, H, M = flags["packed"] or q[0], q[1], q[0] if flags["packed"] else q[2]
    N = flags["pages"] * k[1] if flags["pages"] else k[0] if flags["packed"] else k[2]
    M, N = (*most, *(M, N)[len(most) :]) if flags["packed"] else (M, N)
    axes = {"b": B, "h": H, "i": M, "j": N}
    needs = needs_of(mask) | {name: x.data for name, x in FLAGGED.items() if flags[name]}
    return {
        name: ag.TensorSpec(data.shape(axes), torch.float32 if name in ADDENDS else data.dtypes[0])
        for name, data in needs.items()
    }


def mask_of(flags: Flags, text: str | None = None) -> Mask | None:
    """The mask of all flags and a text, joined with &; None without any."""
    text = text if text is not None else flags.get("mask")
    bands: list[Mask] = [ag.Causal()] if flags["causal"] else []
    bands += [ag.Window(*flags["window"])] if flags["window"] else []
    band = reduce(and_, bands) if bands else None
    if flags["prefix"] is not None:
        prefix = ag.Prefix(flags["prefix"])
        band = prefix if band is None else band | prefix
    parts = [] if band is None else [band]
    if text is not None:
        parts.append(parse_mask(text))
    if blocks := flags.get("blocks"):
        parts.append(ag.KeepBlocks(blocks[0], blocks[-1]))
    leaves = {"lengths": ag.KeyLengths, "q_lengths": ag.QueryLengths, "segments": ag.SameSegment}
    parts += [leaf() for name, leaf in leaves.items() if flags[name]]
    return reduce(and_, parts) if parts else None
