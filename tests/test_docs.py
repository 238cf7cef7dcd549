"""The pages: generated parts are what the code says today, and every block of code runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import attn_graph as ag
from attn_graph import extend, testing, types
from attn_graph.nn.tracing import KEEPS_CONSTANTS
from attn_graph.testing import gpu
from tests.support.sources import ROOT, load_file
from tests.support.tracing import WHY

WRITER = load_file(ROOT / "docs" / "generate" / "__main__.py")
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]
NEEDS = {  # beside what the library needs
    "docs/first-five-minutes.md": ("transformers",),
    "docs/command-line.md": ("transformers",),
    "docs/guides/fit-a-model.md": ("transformers",),
    "docs/guides/hugging-face.md": ("transformers", "cudnn"),
    "docs/guides/other-runtimes.md": ("onnxscript",),
    "docs/guides/read-an-explanation.md": ("cudnn",),
}
AGAIN = "run `.venv/bin/python -m docs.generate`, and read the diff"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def require_library(page: str) -> None:
    """Skip where a page needs a library that is not there."""
    for library in NEEDS.get(page, ()):
        pytest.importorskip(library, reason=f"the page needs {library}")


@pytest.mark.parametrize("name", WRITER.PAGES)
def test_the_generated_parts_are_up_to_date(name: str) -> None:
    require_library(name)
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == WRITER.fill(text, WRITER.PAGES[name]), AGAIN


def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    for drawn in WRITER.assets.draw(tmp_path):
        committed = WRITER.assets.FOLDER / drawn.name
        assert drawn.read_text() == committed.read_text(), AGAIN


def blocks(page: Path) -> Iterator[tuple[str, str | None]]:
    """Each block of Python, and what it is said to print; None: not said."""
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2]


@pytest.mark.usefixtures("few_examples")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own export
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_every_block_runs_and_prints_what_the_page_says(page: Path) -> None:
    require_library(name_of(page))
    if "fullgraph=True" in page.read_text(encoding="utf-8") and not KEEPS_CONSTANTS:
        pytest.skip(WHY)
    names: dict[str, Any] = {"__name__": page.stem}  # Any: whatever the page defines
    for code, said in blocks(page):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)  # the page's own code
        assert said is None or printed.getvalue() == said


def test_every_public_name_has_an_example() -> None:
    shown = dict[str, str]()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        parts = re.split(
            r"^(?:::: attn_graph\.|## `)([\w.]+).*$", page.read_text(), flags=re.MULTILINE
        )
        shown |= dict(zip(parts[1::2], parts[2::2], strict=True))
    moved = {f"extend.{name}" for name in extend.__all__}
    moved |= {f"types.{name}" for name in types.__all__}
    tests = {f"testing.{name}" for name in testing.__all__ if name != "seeds"}
    functions = {f"nn.functional.{name}" for name in ag.nn.functional.__all__}
    others = {"nn.ops.introduce", "seeds"}  # seeds is a value, which is shown by its name
    others |= {"nn.Attention", "nn.MultiheadAttention", "layers.report.Report"}
    others |= {"nn.flash.register_flash_attention"}
    others |= {"nn.append_to_pages", "nn.varlen_attn", "nn.varlen_attn_out"}
    others |= {f"testing.gpu.{name}" for name in gpu.__all__}
    assert shown.keys() == {*ag.__all__, *moved, *tests, *functions, *others}
    assert not [name for name, text in shown.items() if "```python" not in text]


def test_readme_is_short_enough_to_be_read() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 1200
    assert max(map(len, prose.splitlines())) <= 120


NESTED = re.compile(r"^(?: {1,3}| {5,7})(?:[-*]|\d+\.) ", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lists_in_lists_are_indented_by_four(page: Path) -> None:
    """Python-Markdown ends the outer list at fewer, and numbers its next item as the first."""
    prose = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert not NESTED.findall(prose)


def test_cells_of_tables_show_no_escapes() -> None:
    site = load_file(ROOT / "docs" / "generate" / "site.py")
    html = r"<td><code>a \| b</code></td><pre>c \| d</pre>"
    assert site.on_page_content(html) == r"<td><code>a | b</code></td><pre>c \| d</pre>"


def test_no_spec_reads_as_a_link() -> None:
    """`f16[2, 3](strides=...)` outside of code is a link to Markdown."""
    code = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
    texts = {page: code.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    assert not [page.name for page, text in texts.items() if "](strides=" in text]
