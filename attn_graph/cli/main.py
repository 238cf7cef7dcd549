"""All commands of `attn-graph`, in one list."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import final

import click

import attn_graph as ag
from attn_graph.cli.bench import bench
from attn_graph.cli.cache import cache
from attn_graph.cli.doctor import doctor
from attn_graph.cli.explain import explain_command
from attn_graph.cli.fit import fit
from attn_graph.cli.mask import mask
from attn_graph.cli.output import INTERRUPTED, UNREAD, epilog
from attn_graph.printing.words import nearest

HELP = """What will attention do on a machine, why, and at what cost?

Answers come as text, in colours on a terminal, or as --json.
"""


FLAGS = {  # of other libraries, and of arguments
    **dict.fromkeys(
        ("varlen", "q_starts", "kv_starts", "cu_seqlens", "cu_seqlens_q"), "write --packed B"
    ),
    **dict.fromkeys(("paged", "page_size", "block_table"), "write --pages COUNT"),
    **dict.fromkeys(("k_scale", "v_scale", "kv_cache_dtype"), "write --kv-dtype"),
    **dict.fromkeys(("quantised", "quantized", "fp8", "q_scale"), "write --dtype or --kv-dtype"),
    **dict.fromkeys(("keep_blocks", "block_mask", "block_size"), "write --blocks ROWSxKEYS"),
    "max_seqlen": "write --max-lengths M[,N]",
    "is_causal": "write --causal",
    "sliding_window": "write --window LEFT[,RIGHT]",
    "window_size": "write --window LEFT[,RIGHT]",
    "softcap": "write --soft-cap",
    "softmax_scale": "write --scale",
    "dropout_p": "write --dropout",
    "attn_bias": "write --bias B,H,M,N",
    "return_lse": "write --stats",
    "gpu": "write --target NAME",
    "device": "write --target NAME",
    "shape": "write --q B,H,M,D",
    "backend": "write --backends NAME",
}
COMMANDS = (doctor, explain_command, fit, mask, bench, cache)


@final
class Commands(click.Group):
    """The commands. An argument with a null byte is wrong usage of any of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. Raises UsageError for a null byte."""
        if holding := [arg for arg in args if "\0" in arg]:
            raise click.UsageError(f"{holding[0]!r} holds a null byte")
        return super().parse_args(ctx, args)


commands = click.version_option(ag.__version__, prog_name="attn-graph")(
    Commands(
        "attn-graph",
        commands=COMMANDS,
        help=HELP,
        epilog=epilog("attn-graph explain --q 2,8,4096,128 --dtype bf16 --causal --target h200"),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
)


def main() -> None:
    """Run the process's command, and exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that the terminal does not have
    sys.exit(exit_code())


def show_error(error: click.ClickException) -> int:
    """Print an error, and return its exit code."""
    error.show()
    return error.exit_code


def stranger_flag(error: click.NoSuchOption) -> str:
    """The message for a flag that a command lacks: the flag meant, or another library's word."""
    params = error.ctx.command.params if error.ctx else ()
    flags = [flag for param in params for flag in param.opts if flag.startswith("--")]
    name = error.option_name.removeprefix("--").replace("-", "_")
    begin = f"no such option: {error.option_name}"
    if way_out := FLAGS.get(name):
        return f"{begin}; {way_out}"
    near = nearest(error.option_name, flags, {})
    return f"{begin}; did you mean {near}?" if near else begin


def exit_code() -> int:
    """Run the command, report errors as click does, and return the code to exit with."""
    try:
        return int(commands.main(prog_name="attn-graph", standalone_mode=False) or 0)
    except click.NoSuchOption as error:
        return show_error(click.UsageError(stranger_flag(error), ctx=error.ctx))
    except click.ClickException as error:
        return show_error(error)
    except click.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except SystemExit as error:  # click's, with 1, where the output is closed
        return UNREAD if error.code == 1 else 0
