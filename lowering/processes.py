"""Programs in processes of their own: one that hangs or dies harms nothing here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

GRACE = 5.0  # seconds for a killed process to end


def run_apart(
    program: Sequence[str],
    request: str = "",
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """The failure of a program, as a clause after "it", "" without one; and what it prints."""
    try:
        process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,  # so that its compilers can be ended with it
        )
    except OSError as error:
        return f"could not start a process: {error}", ""
    try:
        output, errors = process.communicate(request, timeout=seconds)
    except subprocess.TimeoutExpired:
        end_process(process)
        return f"had not ended after {seconds:g} s", ""
    if process.returncode:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
        return f"ended with {process.returncode}: {last.strip()}", ""
    return "", output


def end_process(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children, without waiting for one held by the driver."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE)
