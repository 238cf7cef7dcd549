"""Words stay plain: functions by verbs, values by nouns, one name one meaning."""

import ast
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from inspect import getdoc, isclass, isroutine
from pathlib import Path

import pytest

from tests.support.sources import ROOT, source_files, tree_of

MODULES = source_files("*.py")
OTHERS = [
    path
    for folder in ("docs/generate", "examples")
    for path in sorted((ROOT / folder).glob("*.py"))
]
FILES = [*MODULES.values(), *OTHERS]

WORDS = re.compile(r"\w+")
IRREGULAR = WORDS.findall(
    "bound built chosen cut drawn driven fallen found given gone held kept known laid left lost "
    "made met put said seen sent shown split taken thought told written"
)
PARTICLES = WORDS.findall(
    "about after ahead apart as at away by down for in of off on out up when where with within"
)
NOT_PARTICIPLES = {  # a name that only looks like one, or is both: what it is here
    "ragged_in": "an adjective: the lengths of sequences that end at different places",
    "nesting": "a noun: how deep joins lie within one another",
    "tiling": "a noun: the tile sizes of a kernel",
    "doubling": "a noun: sizes, each twice the one before",
}
PARTICIPLE_SHARE = 0.03  # of all top-level functions
TWO_MEANINGS = {  # a name that several modules define: why it may be
    "__getattr__": "a package's names that are imported at first use",
    "Attention": "the op, and the module that has its options",
    "Mask": "the op that applies a mask is called as its text is, `mask`",
    "attend": "each set of kernels has its forward pass",
    "attention": "a graph of specs, and the same of tensors, by the same options",
    "backward": "each set of kernels has its backward pass",
    "forward": "each set of kernels has its forward pass",
    "lower": "what every backend does, by the protocol Backend",
    "main": "where a program starts: the command line, and the process that builds a plan",
    "price": "what every backend may do, by the protocol Backend",
    "variants": "what every backend may do, by the protocol Backend",
    "why_not": "what every backend does, by the protocol Backend",
}
VAGUE = re.compile(r"\b(found|told)\b")
MOST_VAGUE = 5  # in 1,000 lines

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guides").glob("*.md")]
SHOWN = re.compile(r"^::: (\S+)", re.MULTILINE)
NO_NOUN = re.compile(
    r"(?<!here )\b(?:is|are) no (?!more|less|longer|larger|smaller|faster|worse)[a-z]+"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions() -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Every function and class at the top of a module of the library."""
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            if isinstance(node, Function | ast.ClassDef):
                yield module, node


def is_participle(word: str) -> bool:
    return word in IRREGULAR or re.fullmatch(r"[a-z]{3,}(ed|ing)", word) is not None


def is_bare_participle(name: str) -> bool:
    """Whether a name is a participle that neither does something nor names a thing.

    `settled` and `laid_out` are; `padded_size` is a noun with an adjective, `read_file` a verb.
    """
    first, *others = name.strip("_").split("_")
    return is_participle(first) and name not in NOT_PARTICIPLES and {*others} <= {*PARTICLES}


def test_functions_are_named_by_verbs_or_nouns() -> None:
    names = [node.name for _, node in definitions() if isinstance(node, Function)]
    bare = sorted({name for name in names if is_bare_participle(name)})
    assert not bare, f"say what they do, or what they give: {', '.join(bare)}"
    assert len(NOT_PARTICIPLES) <= PARTICIPLE_SHARE * len(names)


def test_one_name_has_one_meaning() -> None:
    homes = defaultdict(set)
    for module, node in definitions():
        if not module.startswith("attn_graph.testing"):  # it says the same again, by other code
            homes[node.name].add(module)
    wrong = [
        f"{name} stands in {', '.join(sorted(modules))}"
        for name, modules in homes.items()
        if len(modules) > 1 and name not in TWO_MEANINGS
    ]
    assert not wrong, "\n".join(wrong)


def test_sentences_and_names_are_specific() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    lines = sum(len(text.splitlines()) for text in texts)
    count = sum(len(VAGUE.findall(text)) for text in texts)
    assert 1000 * count <= MOST_VAGUE * lines, (
        f"found and told stand {count} times in {lines} lines"
    )


def shown_names() -> list[str]:
    """The names on the pages of the reference: all that users meet."""
    pages = (*(ROOT / "docs/reference").glob("*.md"), *(ROOT / "docs/guides").glob("*.md"))
    return [name for page in pages for name in SHOWN.findall(page.read_text(encoding="utf-8"))]


def undocumented(name: str) -> Iterator[str]:
    """A name without a docstring, and such public methods of a class: a base's counts."""
    thing = pkgutil.resolve_name(name)
    methods = [each for each in vars(thing) if not each.startswith("_")] if isclass(thing) else []
    for path, each in [(name, thing), *((f"{name}.{m}", getattr(thing, m)) for m in methods)]:
        if (isroutine(each) or isclass(each) or isinstance(each, property)) and not getdoc(each):
            yield path


def test_everything_users_meet_is_documented() -> None:
    names = shown_names()
    assert len(names) > 100
    wrong = [path for name in names for path in undocumented(name)]
    assert not wrong, "\n".join(wrong)


def test_sentences_say_what_a_thing_is_not() -> None:
    """As "is not a mask": "is no mask" has to be read twice."""
    found = {
        f"{path.relative_to(ROOT)}: {match}"
        for path in (*MODULES.values(), *PAGES)
        for match in NO_NOUN.findall(path.read_text(encoding="utf-8"))
    }
    assert not found


RELATIVE = re.compile(r"\b(that|which|whose|what|those|such|so many|where)\b", re.IGNORECASE)
OPENINGS = ("The same", "Whether")
# Relative words in 100 words; docstrings with such an opening.
MOST_RELATIVE_IN_DOCSTRINGS, MOST_RELATIVE_IN_PAGES = 1.6, 2.5
MOST_OPENINGS = 10


def docstrings() -> Iterator[str]:
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (
                text := ast.get_docstring(node)
            ):
                yield text


def relative_share(text: str) -> float:
    """Relative words in 100."""
    return 100 * len(RELATIVE.findall(text)) / len(text.split())


def test_docstrings_have_few_relative_words() -> None:
    texts = list(docstrings())
    assert relative_share(" ".join(texts)) <= MOST_RELATIVE_IN_DOCSTRINGS
    assert sum(text.startswith(OPENINGS) for text in texts) <= MOST_OPENINGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_few_relative_words(page: Path) -> None:
    assert relative_share(page.read_text(encoding="utf-8")) <= MOST_RELATIVE_IN_PAGES
