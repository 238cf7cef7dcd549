"""Where the library's source lies: one place, for the tests that read it."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
HOMES = {
    "attn_graph": ROOT / "attn_graph",
    "attn_graph.kernels": ROOT / "kernels",
    "attn_graph.lowering": ROOT / "lowering",
}


def found(pattern: str) -> dict[str, Path]:
    """Module name -> file, for the files under HOMES whose name matches `pattern`."""
    return {
        ".".join([package, *path.relative_to(home).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for package, home in HOMES.items()
        for path in sorted(home.rglob(pattern))
        if path.resolve().is_relative_to(home)  # a symlinked folder counts once, at its home
    }
