"""The pictures of README and of the start page, drawn by the library, for light and dark pages."""

from __future__ import annotations

from pathlib import Path

import attn_graph as ag
from attn_graph.instruments.pictures import draw_bars, draw_mask
from docs.generate.pages import ROOT
from docs.generate.speed import common_jobs

FOLDER = ROOT / "docs" / "assets"
MASK = ag.Causal() & (ag.Window(1024) | ag.Prefix(256))
SHADES = {"light": False, "dark": True}


def draw(folder: Path = FOLDER) -> list[Path]:
    """Write the pictures; their paths."""
    paths: list[Path] = []
    for shade, dark in SHADES.items():
        paths += [folder / f"mask-{shade}.svg", folder / f"speed-{shade}.svg"]
        draw_mask(paths[-2], MASK, 4096, 4096, tile=(128, 128), dark=dark)
        draw_bars(paths[-1], common_jobs(), unit="times as fast as PyTorch", line=1, dark=dark)
    return paths
