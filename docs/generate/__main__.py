"""`python -m docs.generate`: write all pages that take no compiler, and README."""

from __future__ import annotations

from docs.generate import assets, command_line, hugging_face, readme, speed, support, words
from docs.generate.pages import ROOT, Parts, fill

PAGES: dict[str, Parts] = {
    "README.md": {
        "call": readme.call_example,
        "plan": readme.plan_example,
        "explain": readme.explain_example,
        "support": support.compact,
    },
    "docs/guides/coming-from.md": {"words": words.words},
    "docs/guides/hugging-face.md": {"models": hugging_face.models},
    "docs/support.md": {"support": support.numbered_table},
    "docs/speed.md": {
        "rows": speed.all_rows,
        "derivatives": speed.derivative_rows,
        "layers": speed.layer_rows,
        "models": speed.model_rows,
    },
    "docs/command-line.md": command_line.PARTS,
}


def main() -> None:
    for name, parts in PAGES.items():
        page = ROOT / name
        text = fill(page.read_text(encoding="utf-8"), parts)
        page.write_text(text, encoding="utf-8")
    assets.draw()


if __name__ == "__main__":
    main()
