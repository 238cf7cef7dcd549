"""Named sizes for calls on packed tensors, pages and growing caches: lengths share a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from attn_graph.ir.arguments import ARGUMENTS
from attn_graph.machine.cache import remember
from attn_graph.machine.tensors import STARTS
from attn_graph.plan import Plan
from attn_graph.plan.pull import generalise
from attn_graph.spec import TensorSpec
from attn_graph.spec.dims import Dim

PACKING = frozenset((*STARTS, "pages"))  # inputs of calls on packed tensors or pages
PLACES = dict.fromkeys(STARTS, "B") | {"pages": "BC"}  # axes of these, the letters of name_sizes
MOST_KEYS = 2**16  # of a cache that grows under one plan; from there on up to the next power of two

Specs = Mapping[str, TensorSpec]
Letters = Mapping[str, str]  # by tensor: the names of its axes, - for a number


def round_size(size: int) -> int:
    """The least power of two of at least `size`.

    By comparisons alone: torch.compile, with a symbol for the size, compiles once for each power.
    """
    room = 1
    while room < size:
        room *= 2
    return room


def largest_size(letter: str, size: int) -> int:
    """`most` of the Dim for a size: a power of two; for B two less, Triton's limit."""
    if letter == "N":
        return max(MOST_KEYS, round_size(size))
    return max(1, round_size(size + 2) - 2) if letter == "B" else round_size(size)


known_largest = remember(largest_size)  # for numbers: symbols have no hash


def name_sizes(specs: Specs, caches: bool = False) -> Specs:
    """The specs of a call, with Dims for the sizes that change from call to call.

    B is the number of sequences, T and S the rows of packed queries and keys, n the pages of a
    pool, C those of a sequence. With `caches`, N is the number of keys of calls with one query for
    each sequence, as in token generation. The specs stay unchanged if a tensor has axes of unknown
    meaning, or if sizes disagree.
    """
    packed = bool(PACKING & specs.keys())
    if not packed and not (caches and reads_cache(specs)):
        return specs
    letters = axis_letters(specs, packed)
    sizes = agree_on_sizes(specs, letters)
    if sizes is None:
        return specs
    dims = {letter: Dim(letter, largest_size(letter, n)) for letter, n in sizes.items()}
    named: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        shape = [
            n if letter == "-" else dims[letter] + (name in STARTS)
            for letter, n in zip(letters[name], spec.shape, strict=True)
        ]
        named[name] = generalise(TensorSpec(shape, spec.dtype), spec, sizes)
    return named


def reads_cache(specs: Specs) -> bool:
    """True for a call with one query of each sequence, and more keys."""
    shapes = [specs[name].shape for name in "qkv" if name in specs]
    return all(len(shape) == 4 for shape in shapes) and shapes[0][2] == 1 < shapes[1][2]


def axis_letters(specs: Specs, packed: bool) -> dict[str, str]:
    """The letters of all tensors of known meaning, packed or of a call that reads a cache."""
    rows = "T--" if "q_starts" in specs else "B---"
    keys = "n---" if "pages" in specs else "S--" if "kv_starts" in specs else rows
    known = {"q": rows, "k": keys, "v": keys} if packed else {"q": "----", "k": "--N-", "v": "--N-"}
    known |= PLACES
    axes = {"b": "B", "h": "-"} if packed else {"b": "-", "h": "-", "i": "-", "j": "N"}
    letters = {name: known[name] for name in specs if name in known}
    for name in (specs.keys() & ARGUMENTS.keys()) - known.keys():
        argument, shape = ARGUMENTS[name], specs[name].shape
        data = argument.form(len(shape))
        own = "".join(axes.get(x, "?") for x in data.axes) or "-" * len(shape)
        own = known.get(argument.scales, "?") if argument.scales else own
        if "?" not in own:
            letters[name] = own
            if data.broadcasts or argument.scales:
                pairs = zip(own, shape, strict=False)
                letters[name] = "".join("-" if n == 1 else x for x, n in pairs)
    return letters


def agree_on_sizes(specs: Specs, letters: Letters) -> dict[str, int] | None:
    """The sizes by letter; None if tensors disagree, or one has no letters."""
    if any(name not in letters or len(letters[name]) != len(x.shape) for name, x in specs.items()):
        return None
    pairs = [
        (letter, size - (name in STARTS))
        for name, x in specs.items()
        for letter, size in zip(letters[name], x.shape, strict=True)
        if letter != "-"
    ]
    sizes = dict(pairs)
    agree = all(sizes[letter] == n >= 0 for letter, n in pairs)
    return sizes if agree else None


def serves_sizes(plan: Plan, tensors: Sequence[Tensor]) -> bool:
    """True if a plan made for tensors of other sizes is right for these."""
    if plan.sized is None or not plan.memo.unsized[0](*tensors):
        return False
    fit = plan.sized.fit
    sizes = fit.lying(tensors)
    if sizes is None:
        return False
    for symbol, n in zip(fit.symbols, sizes, strict=True):
        if known_largest(symbol.name, n) != symbol.most:
            return False
    return True
