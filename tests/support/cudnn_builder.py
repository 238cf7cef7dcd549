"""The program that builds cuDNN's plans, asked something in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from attn_graph.lowering.cudnn import builder
from attn_graph.lowering.cudnn.offline import driver_library

BEGIN = """
import ctypes, json, sys
from pathlib import Path
folder = sys.argv[2]
import builder
builder.load_stand_in(sys.argv[1])
import cudnn
"""


def ask_builder(script: str, folder: Path) -> str:
    """What a script prints beside the program, with cuDNN loaded and no GPU."""
    program = (sys.executable, "-c", BEGIN + script, driver_library(str(folder)), str(folder))
    home = Path(builder.__file__).parent
    return subprocess.run(program, cwd=home, check=True, capture_output=True, text=True).stdout
