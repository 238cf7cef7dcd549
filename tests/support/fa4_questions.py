"""Asks flash-attn-4 itself what it takes: many calls in one process, for a GPU that isn't here.

`python -P -m tests.support.fa4_questions` reads calls as JSON, one a line, and answers each with
the package's own refusal, or "" where it went on to compile. Nothing is compiled: what the package
checks, it checks before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_graph.lowering.fa4.offline import environment
from attn_graph.machine.target import Target

HAS_PACKAGE = find_spec("flash_attn") is not None and find_spec("cutlass") is not None
WITHOUT = "flash-attn-4 is not installed"


def ask_package(calls: Sequence[dict[str, Any]], target: Target, folder: Path) -> list[str]:
    """The package's refusal of each call, "" where it refuses nothing."""
    known = environment(target, folder, folder) | {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    process = subprocess.run(
        (sys.executable, "-P", "-m", __name__),
        input="\n".join(map(json.dumps, calls)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | known,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith('"')]


def answer(plain: dict[str, Any], processors: int) -> str:
    """The refusal of one call."""
    from attn_graph.lowering.fa4.builder import compile_fakes

    try:
        compile_fakes(plain, processors)
    except (AssertionError, NotImplementedError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Answer every call."""
    from cutlass import cute

    cute.compile = lambda *_, **__: None
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), int(os.environ["FLASH_ATTENTION_NUM_SMS"]))))


if __name__ == "__main__":
    main()
