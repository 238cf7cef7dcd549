"""`attn-graph explain`: the backend of a graph, its reason, and its cost."""

from __future__ import annotations

import re
from typing import Any, TextIO, get_args

import click
from rich.text import Text

import attn_graph as ag
from attn_graph.cli import output
from attn_graph.cli.flags import graph_flags, graph_of
from attn_graph.machine.gpus import devices
from attn_graph.machine.torch_switches import Precision

STYLES = {
    r"^(backward.*: )?\w+ runs this on .*$": "green",
    r"^ *also able: .*$": "cyan",
    r"^ *[\w, ]+ can't: ": "yellow",
    r"^(backward.*: )?no backend can run this on .*$": "bold red",
    r"^(mask|memory|cost|backward)\b": "bold",
}
names = click.option(
    "--backends", metavar="NAME,...",
    help=f"Only these backends, in this order, of {', '.join(b.name for b in ag.extend.BACKENDS)}.",
)  # fmt: skip
deterministic = click.option("--deterministic", is_flag=True, help="Equal bits in every run.")
precision = click.option(
    "--precision", type=click.Choice(get_args(Precision)), help="What products may be rounded."
)


def split_names(text: str | None) -> tuple[str, ...] | None:
    """The names in "cudnn,math"; None for None."""
    return None if text is None else tuple(filter(None, re.split(r"[\s,]+", text)))


@click.command(
    short_help="Show a graph's backend, reason and cost.",
    epilog=output.epilog(
        "attn-graph explain --q 2,32,8192,128 --k 2,8,8192,128 --dtype bf16 --causal \\",
        "    --window 4095 --target h200 --target a100",
    ),
)
@graph_flags
@click.option(
    "--target", "targets", metavar="NAME", multiple=True,
    help=f"cpu or one of {', '.join(devices())}; by default this machine. May be repeated.",
)  # fmt: skip
@names
@click.option("--avoid", metavar="NAME,...", help="Never these backends.")
@deterministic
@precision
@click.option("--inference", is_flag=True, help="Nothing is trained: no backward.")
@click.option("--max-workspace", metavar="SIZE", help="Limit for each pass: bytes, or 1GiB.")
@output.as_json
@output.as_usage_errors
def explain_command(
    file: TextIO | None,
    targets: tuple[str, ...],
    backends: str | None,
    avoid: str | None,
    deterministic: bool,
    precision: Precision | None,
    inference: bool,
    max_workspace: str | None,
    plain: bool,
    **flags: Any,  # Any: what click makes of each flag
) -> None:
    """Show which backend would run a graph and its gradient on a machine, and why; why the others
    can't, and how to change that; the tiles of the mask; memory; cost.

    Nothing is built or run. Describe the graph by flags, --q first, or by FILE, its text as the
    library prints it (- is stdin). Exits with 1 if no backend supports the graph.
    """
    graph = graph_of(file, flags)
    explanations = [
        ag.explain(
            graph,
            target=target,
            backends=split_names(backends),
            avoid=split_names(avoid) or (),
            deterministic=deterministic,
            precision=precision,
            max_workspace=max_workspace,
            gradients=() if inference else None,
        )
        for target in targets or (None,)
    ]
    if plain:
        output.show_json([each.to_dict() for each in explanations])
    else:
        text = Text("\n\n".join(map(str, explanations)))
        for pattern, style in STYLES.items():
            text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
        output.show_text(text, wraps=False)
    output.exit_no_if(any(each.backend is None for each in explanations))
