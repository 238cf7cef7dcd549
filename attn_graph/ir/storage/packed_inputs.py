"""How `attention` reads packed tensors and pages, by their starts and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from attrs import frozen

from attn_graph import masks
from attn_graph.errors import GraphError, show
from attn_graph.ir.graph import op_name
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.storage.packing import Lengths, Pack, Unpack, to_most
from attn_graph.ir.storage.paging import Unpage
from attn_graph.masks.joins import leaves
from attn_graph.spec import ValueType
from attn_graph.spec.dims import are_numbers

Value = Any  # a value of the graph's builder


@final
@frozen(eq=False)
class Sequences:
    """How q, or k and v, are packed: starts [B+1], lengths [B], and the most rows of a sequence."""

    starts: Value
    lengths: Value
    most: int

    def unpack(self, x: Value) -> Value:
        """x [T,H,D] -> [B,H,most,D]."""
        return x.then(Unpack(self.most), self.starts, self.lengths)

    def pack(self, x: Value, like: Value, blind: bool) -> Value:
        """x [B,H,most,E] -> [T,H,E], or a statistic [B,H,most] -> [H,T], with T as in `like`."""
        return x.then(Pack(like.type.shape[0], blind), self.starts, self.lengths)


@final
@frozen(eq=False)
class Pages:
    """Pages of k and v: the table [B,pages], and kv_lengths [B] if given. finite: declared so."""

    table: Value
    lengths: Value | None
    finite: bool

    def unpack(self, x: Value) -> Value:
        """x [n,P,G,D] -> [B,G,pages * P,D]."""
        ends = () if self.lengths is None else (self.lengths,)
        return x.then(Unpage(bool(ends), self.finite), self.table, *ends)


def find_packed_sides(
    x: dict[str, Value], M: int | None, N: int | None, finite: object, all_rows: object
) -> tuple[Sequences | None, Sequences | Pages | None]:
    """The packing of q, and of k and v; None if not packed. M, N: from `two_sizes`. Raises
    GraphError for either on a side that is not packed, for `finite` without pages, and for
    `all_rows` without packed rows or beside their lengths.
    """
    if problems := [*promise_problems(x, finite, all_rows)]:
        raise GraphError(*problems)
    ends = Lengths(bool(all_rows))
    rows: Sequences | None = None
    keys: Sequences | Pages | None = None
    if "q_starts" in x:
        starts = x["q_starts"]
        lengths = x["q_lengths"] if "q_lengths" in x else starts.then(ends)
        rows = Sequences(starts, lengths, size_of(x["q"]) if M is None else M)
    if "pages" in x:
        keys = Pages(x["pages"], x.get("kv_lengths"), bool(finite))
    elif len(x["k"].type.shape) == 3 and (rows or "kv_starts" in x):
        starts = x["kv_starts" if "kv_starts" in x else "q_starts"]
        if "kv_lengths" in x:
            lengths = x["kv_lengths"]
        else:
            alike = None if "kv_starts" in x else rows
            lengths = alike.lengths if alike else starts.then(ends)
        keys = Sequences(starts, lengths, size_of(x["k"]) if N is None else N)
    for name, side, size in (("M", rows, M), ("N", keys, N)):
        if size is not None and not isinstance(side, Sequences):
            raise GraphError(
                f"attention: max_lengths has {name} = {size}, but that side is not packed; "
                "leave it out"
            )
    return rows, keys


def size_of(x: Value) -> int:
    """T, of a packed tensor [T,H,D]. A tensor without axes is refused elsewhere."""
    return x.type.shape[0] if x.type.shape else 0


def packed_problems(x: Mapping[str, ValueType]) -> Iterator[str]:
    """Why q, k and v are not packed as starts and pages say. x: the types of all inputs."""
    if not {"q_starts", "kv_starts", "pages"} & x.keys():
        return
    whole = {"v": x["k"], **x}  # v may be a number
    ranks = {name: len(whole[name].shape) for name in "qkv"}
    if "q_starts" in x and ranks["q"] != 3:
        yield f"attention: q {x['q']} has {ranks['q']} axes; with q_starts it is [T,H,D]"
    if "kv_starts" in x and ranks["k"] != 3:
        yield f"attention: k {x['k']} has {ranks['k']} axes; with kv_starts it is [T,G,D]"
    if {"pages", "kv_starts"} <= x.keys():
        yield "attention: kv_starts and pages are both given; keys are packed or in pages, not both"
    if "pages" in x and not ranks["k"] == ranks["v"] == 4:
        yield (
            f"attention: k {x['k']} and v {whole['v']} have {ranks['k']} and {ranks['v']} "
            f"axes; with pages they are pools [n,P,G,D]{halves_of(x)}"
        )
    elif "pages" in x and x["k"].shape[:2] != whole["v"].shape[:2]:
        yield (
            f"attention: k {x['k']} and v {whole['v']} are not of the same pages [n,P]; one table "
            "of pages serves both pools"
        )
    if {"q_starts", "kv_starts"} & x.keys() and ranks["k"] != ranks["v"]:
        yield f"attention: k {x['k']} and v {whole['v']} are not packed alike"
    if (
        "kv_starts" not in x
        and ranks["q"] == ranks["k"] == 3
        and x["q"].shape[0] != x["k"].shape[0]
    ):
        yield (f"attention: q {x['q']} and k {x['k']} are packed differently; pass kv_starts= too")


def halves_of(x: Mapping[str, ValueType]) -> str:
    """The pools in one tensor of keys and values, given as both; "" for others."""
    shapes = {x[name].shape for name in "kv" if name in x}
    if len(shapes) > 1 or len(x["k"].shape) != 5 or 2 not in x["k"].shape[:2]:
        return ""
    first, second = ("[:, 0]", "[:, 1]") if x["k"].shape[1] == 2 else ("[0]", "[1]")
    return f"; of one cache with both, pass cache{first} and cache{second}"


def promise_problems(x: dict[str, Value], finite: object, all_rows: object) -> Iterator[str]:
    """Promises about absent pools or packed rows, or against given lengths."""
    if not isinstance(finite, bool):
        yield f"attention: finite_pages {show(finite)} is neither True nor False"
    elif finite and "pages" not in x:
        yield "attention: finite_pages=True speaks of pools, and pages= is not given; leave it out"
    packed = {"q_starts", "kv_starts"} & x.keys()
    if not isinstance(all_rows, bool):
        yield f"attention: all_rows {show(all_rows)} is neither True nor False"
    elif all_rows and not packed:
        yield (
            "attention: all_rows=True speaks of packed rows, and neither q_starts= nor kv_starts= "
            "is given; leave it out"
        )
    elif all_rows:
        packs_keys = "kv_starts" in x or len(x["k"].type.shape) == 3
        sides = {"q_lengths": "q_starts" in x, "kv_lengths": packs_keys}
        for name in (name for name, is_packed in sides.items() if is_packed and name in x):
            yield (
                f"attention: all_rows=True says that sequences take all rows, and {name} may leave "
                f"some; leave out one of them"
            )


def two_sizes(most: object) -> tuple[int | None, int | None]:
    """The most queries and keys of a sequence. Raises GraphError unless they are a pair."""
    match most:
        case None:
            return None, None
        case (M, N) if are_numbers(*(n for n in (M, N) if isinstance(n, int))):
            return to_most(M), to_most(N)
    pair = f"({most}, {most})" if isinstance(most, int) else "(M, N), two numbers or None"
    raise GraphError(f"attention: max_lengths {show(most)} is not a pair; write max_lengths={pair}")


def alignment_problems(
    mask: masks.Mask | None,
    alibi: str | None,
    steps: Sequence[Modifier],
    rows: Sequences | None,
    keys: Sequences | Pages | None,
) -> Iterator[str]:
    """Parts without an alignment that compare positions of packed sequences.

    Only if queries and keys may differ in length. alibi: its alignment, "" without one, or
    None. steps: further modifiers.
    """
    if not rows and not isinstance(keys, Sequences):
        return
    if rows and keys and keys.lengths is not None and rows.lengths.index == keys.lengths.index:
        return
    parts = [] if mask is None else [*leaves(mask)]
    free = [str(x) for x in parts if isinstance(x, masks.Diagonal) and x.align is None]
    free += ["alibi"] * (alibi == "")
    free += [op_name(type(x)) for x in steps if x.aligned("top_left", ()) != x]  # it takes one
    for name in free:
        yield (
            f"{name}: a sequence may have more keys than queries, so the diagonal needs an "
            'alignment; pass align="top_left" or align="bottom_right"'
        )
