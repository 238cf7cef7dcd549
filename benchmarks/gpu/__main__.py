"""`python -m benchmarks.gpu`: everything that only a GPU can tell, in order of worth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu import wheels


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("items", nargs="*", help="by default all that are not done yet")
    parser.add_argument("--list", action="store_true", help="show the items; needs no GPU")
    parser.add_argument("--wheels", type=Path, help="a folder to install from what is missing")
    parser.add_argument("--out", type=Path, help="where figures go; by default benchmarks/results")
    parser.add_argument("--restart", action="store_true", help="drop figures of before")
    parser.add_argument("--minutes", type=float, help="begin no item that would not end by then")
    parser.add_argument("--commit", help="what to call the commit where git cannot say it")
    parser.add_argument("--device", help=argparse.SUPPRESS)  # another maker of devices, in tests
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    wheels.prepare(arguments.wheels)
    from benchmarks.gpu.session import run_session  # needs what was just installed

    sys.exit(run_session(arguments))


if __name__ == "__main__":
    main()
