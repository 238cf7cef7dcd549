"""Pictures of masks, rooflines and timings."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.instruments import pictures
from attn_graph.testing.mask_check import MaskCase, mask_cases
from tests.masks.test_counts import brute

ROWS = (("full", {"ours": 2.0, "theirs": 3.0}), ("causal", {"ours": 1.0}))
DRAWN: dict[str, Callable[[Path], None]] = {
    "mask": lambda path: pictures.draw_mask(path, ag.Causal(), 64, 64, tile=(16, 16)),
    "everything": lambda path: pictures.draw_mask(path, None, 64, 48),
    "roofline": lambda path: pictures.draw_roofline(
        path, {"f32": (20.0, 1e12)}, peak=67e12, bandwidth=4.8e12, title="h200"
    ),
    "empty roofline": lambda path: pictures.draw_roofline(path, {}, peak=1e12, bandwidth=1e11),
    "bars": lambda path: pictures.draw_bars(path, ROWS, title="forward"),
    "bars from a line": lambda path: pictures.draw_bars(path, ROWS, line=1.0, dark=True),
    "no bars": lambda path: pictures.draw_bars(path, ()),
}


def test_many_bars_fit_on_a_screen(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    pictures.draw_bars(path, [(f"job {n}", {"ours": 1.0 + n}) for n in range(100)], line=1.0)
    (height,) = re.findall(r'height="([\d.]+)pt"', path.read_text(encoding="utf-8"))
    assert float(height) <= 72 * (pictures.TALLEST + 1)


def test_a_small_mask_is_drawn_place_by_place() -> None:
    assert (ag.Causal() & ag.Window(2)).picture(5, 5) == (
        "█····\n"
        "██···\n"
        "███··\n"
        "·███·\n"
        "··███\n"
        "5 queries down, 5 keys across, a mark a place: █ kept, · not"
    )


def test_a_large_mask_is_drawn_tile_by_tile() -> None:
    lines = ag.Causal().picture(65536, 65536).splitlines()
    assert lines[-1].endswith("a mark a tile of 1024 x 1024: █ kept, ▒ some, · none")
    assert lines[:-1] == ["█" * i + "▒" + "·" * (63 - i) for i in range(64)]


@pytest.mark.parametrize("size", [10**7, 10**12])
def test_a_picture_of_any_size_takes_few_marks(size: int) -> None:
    *lines, _ = ag.Causal().picture(size, size).splitlines()
    assert lines == ["█" * i + "▒" + "·" * (63 - i) for i in range(64)]
    most = pictures.kinds(ag.Causal() | ag.Prefix(1), size, size, (size // 2000, size // 2000))
    assert most.numel() <= pictures.MOST_TILES
    with pytest.raises(ag.GraphError, match="in tiles of 1 x 1 are more than 4,194,304 tiles"):
        pictures.picture(ag.Causal(), size, size, tile=(1, 1))


def test_data_of_one_batch_entry_and_head_are_drawn() -> None:
    lengths = torch.tensor([1, 3])
    assert ag.KeyLengths().picture(1, 4, kv_lengths=lengths).startswith("█···\n")
    second = pictures.picture(ag.KeyLengths(), 1, 4, at=(1, 0), data={"kv_lengths": lengths})
    assert second.startswith("███·\n")
    assert ag.KeyLengths().picture(1, 4).startswith("▒▒▒▒\n")


def test_flags_of_one_head_are_drawn() -> None:
    flags = torch.tensor([[[[True, False, True]], [[False, True, True]]]])
    for h, line in enumerate(("█·█", "·██")):
        text = pictures.picture(ag.Keep(), 1, 3, at=(0, h), data={"keep": flags})
        assert text.splitlines()[0] == line


@given(mask_cases(), st.data())
def test_a_picture_shows_what_is_kept(drawn: MaskCase, data: st.DataObject) -> None:
    B, H, M, N = drawn.sizes
    if not B or not H:
        return
    b, h = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, H - 1))
    due = brute(drawn, drawn.mask)[b, h]
    text = pictures.picture(drawn.mask, M, N, tile=(1, 1), at=(b, h), data=drawn.data)
    lines = ["".join("█" if kept else "·" for kept in row) for row in due.tolist()]
    assert text.splitlines()[:-1] == lines


def test_a_picture_says_what_is_wrong_with_its_arguments() -> None:
    with pytest.raises(ag.GraphError, match="tile 0 is not a whole number of at least 1"):
        pictures.picture(ag.Causal(), 4, 4, tile=(0, 1))
    with pytest.raises(ag.GraphError, match="does not read lengths; it reads nothing"):
        ag.Causal().picture(4, 4, lengths=torch.ones(1))


@pytest.mark.parametrize(("name", "suffix"), [*((name, "svg") for name in DRAWN), ("mask", "png")])
def test_figures_are_files_of_the_kind_that_their_name_says(
    name: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{suffix}"
    DRAWN[name](path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:  # Any: as the builtin
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return before(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install 'attn-graph\[plot\]'"):
        pictures.draw_mask(tmp_path / "x.png", ag.Causal(), 4, 4)
