"""`attn-graph fit`: a whole model's attention and memory on a GPU, from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.text import Text

from attn_graph.cli.flags import FLOAT_NAMES, reads_dtype
from attn_graph.cli.output import (
    as_json,
    as_usage_errors,
    epilog,
    exit_no_if,
    show_json,
    show_text,
)
from attn_graph.machine.gpus import devices
from attn_graph.spec import DTYPES

STYLES = {
    r": fits\b.*$": "green",
    r": (does not fit|needs)\b.*$": "bold red",
    r"^ *(backward: )?\w+: (predicted|first) .*$": "cyan",
    r"^largest .*$": "bold",
}


@click.command(
    short_help="Show whether a model fits a GPU, and why.",
    epilog=epilog(
        "attn-graph fit config.json --target h200 --batch 8 --context 131072 --phase decode"
    ),
)
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--target", metavar="NAME", help=f"One of {', '.join(devices())}; by default this machine."
)
@click.option(
    "--phase", type=click.Choice(["decode", "prefill", "train"]), default="prefill",
    help="A step of one token, a prompt, or a step of training; prefill by default.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=1, help="Sequences; 1 by default.")
@click.option("--context", type=click.IntRange(1), help="Tokens; by default the config's most.")
@click.option(
    "--dtype", metavar="|".join(FLOAT_NAMES), callback=reads_dtype(*FLOAT_NAMES),
    help="Dtype of weights and cache, by default the config's.",
)  # fmt: skip
@click.option("--gpus", type=click.IntRange(1), default=1, help="GPUs that share the model.")
@click.option(
    "--divide", type=click.Choice(["heads", "context"]), default="heads",
    help="What several GPUs share: heads and weights, by default, or each sequence.",
)  # fmt: skip
@click.option("--link", help="How they are connected: nvlink, pcie4, pcie5 or infiniband.")
@click.option("--reserve", metavar="SIZE", default="1GiB", help="Memory for CUDA; 1GiB by default.")
@click.option("--no-search", is_flag=True, help="Without the largest batch and context that fit.")
@as_json
@as_usage_errors
def fit(
    config: Path,
    dtype: str | None,
    no_search: bool,
    plain: bool,
    **options: Any,  # Any: what click makes of each flag
) -> None:
    """Show whether a model of transformers fits a GPU's memory, from its config alone: weights,
    cache, the tensors of a call; the backend, time and memory of each kind of layer's attention;
    and the largest batch and context that fit.

    Nothing is downloaded, allocated or run. Bytes are of one GPU. Exits with 1 if it does not fit.
    Needs transformers (pip install 'attn-graph[transformers]').
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
    answer = explain_model(config, dtype=kind, search=not no_search, **options)
    if plain:
        show_json(answer.to_dict())
    else:
        text = Text(str(answer))
        for pattern, style in STYLES.items():
            text.highlight_regex(rf"(?m){pattern}", style)
        show_text(text, wraps=False)
    exit_no_if(answer.fits is False or any(x.explanation.backend is None for x in answer.kinds))
