"""`attn-graph fit`: a whole model's attention and memory on a GPU, from its config alone."""

from __future__ import annotations

import re
from typing import Any

import click
import torch
from rich.text import Text

from attn_graph.cli import output
from attn_graph.cli.flags import FLOAT_NAMES, reads_dtype
from attn_graph.machine.gpus import devices
from attn_graph.spec import DTYPES

STYLES = {
    r": fits\b.*$": "green",
    r": (does not fit|fits: unknown)\b.*$": "bold red",
    r"^ *(whole: )?(backward: )?\w+: (predicted|first) .*$": "cyan",
    r"^largest .*$": "bold",
}
TOKENS = {"": 1, "k": 2**10, "m": 2**20}


def read_tokens(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """A click callback for a number of tokens: 131072, 128k or 1M."""
    if text is None:
        return None
    parts = re.fullmatch(r"\s*([0-9]{1,9})([km]?)\s*", text.lower())
    if parts is None:
        raise click.BadParameter(
            f"{text!r} is not a number of tokens; write 131072, or 128k, which is 128 * 1024"
        )
    return int(parts[1]) * TOKENS[parts[2]]


@click.command(
    short_help="Show whether a model fits a GPU, and why.",
    epilog=output.epilog(
        "attn-graph fit config.json --target h200 --batch 8 --context 131072 --phase decode"
    ),
)
@click.argument("config")
@click.option(
    "--target", "targets", metavar="NAME", multiple=True,
    help=f"One of {', '.join(devices())}; by default this machine. May be repeated.",
)  # fmt: skip
@click.option(
    "--phase", type=click.Choice(["decode", "prefill", "train"]), default="prefill",
    help="A step of one token, a prompt, or a step of training; prefill by default.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=1, help="Sequences; 1 by default.")
@click.option(
    "--context", metavar="TOKENS", callback=read_tokens,
    help="Tokens, 131072 or 128k; by default the config's most.",
)  # fmt: skip
@click.option(
    "--dtype", metavar="|".join(FLOAT_NAMES), callback=reads_dtype(*FLOAT_NAMES),
    help="Dtype of weights and cache, by default the config's.",
)  # fmt: skip
@click.option("--gpus", type=click.IntRange(1), default=1, help="GPUs that share the model.")
@click.option(
    "--divide", type=click.Choice(["heads", "context"]), default="heads",
    help="What several GPUs share: heads and weights, by default, or each sequence.",
)  # fmt: skip
@click.option(
    "--link", metavar="NAME|NUMBER",
    help="How GPUs that divide the context are connected: nvlink, pcie4, pcie5, infiniband, or "
    "bytes a second.",
)  # fmt: skip
@click.option("--reserve", metavar="SIZE", default="1GiB", help="Memory for CUDA; 1GiB by default.")
@click.option("--no-search", is_flag=True, help="Without the largest batch and context that fit.")
@output.as_json
@output.as_usage_errors
def fit(
    config: str,
    targets: tuple[str, ...],
    dtype: str | None,
    no_search: bool,
    plain: bool,
    **options: Any,  # Any: what click makes of each flag
) -> None:
    """Show whether a model of transformers fits a GPU's memory, from its config alone: weights,
    cache, the tensors of a call; the backend, time and memory of each kind of layer's attention;
    and the largest batch and context that fit.

    CONFIG is the path of the model's config.json. Nothing is downloaded, allocated or run. Bytes
    are of one GPU. Exits with 1 if it does not fit a target, else with 3 if a target's memory is
    not known. Needs transformers (pip install 'attn-graph[transformers]').
    """
    try:
        from attn_graph.integrations.transformers import explain_model
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise click.ClickException(
            "fit needs transformers; pip install 'attn-graph[transformers]'"
        ) from error
    kind: torch.dtype | None = None if dtype is None else DTYPES[dtype]
    answers = [
        explain_model(config, target=target, dtype=kind, search=not no_search, **options)
        for target in targets or (None,)
    ]
    if plain:
        output.show_json([answer.to_dict() for answer in answers])
    else:
        text = Text("\n\n".join(map(str, answers)))
        for pattern, style in STYLES.items():
            text.highlight_regex(rf"(?m){pattern}", style)
        output.show_text(text, wraps=False)
    layers = (layer for answer in answers for layer in answer.kinds)
    output.exit_no_if(
        any(answer.fits is False for answer in answers)
        or any(layer.explanation.backend is None for layer in layers),
        is_unknown=any(answer.fits is None for answer in answers),
    )
