"""The workspace of cuDNN's plans, in bytes, computed without a plan."""

from __future__ import annotations

from attn_graph.ir.modifiers import Alibi
from attn_graph.lowering.cudnn.graph import round_total, round_up_to
from attn_graph.lowering.libraries.cudnn_case import Case

FEW_KEYS = 512  # read in one piece by Hopper's kernel for one query
ROWS = 16  # query heads on common keys in one of its programs
MOST_SPLITS = 64
MULTIPROCESSORS = 132  # of the Hoppers with known plans


def workspace(case: Case) -> int | None:
    """Bytes of workspace; None if only a plan tells them. Known are Hopper's backward and its
    forward of one query with split keys."""
    if not 90 <= case.sm < 100 or case.backend >= (9, 25, 0):
        return None
    if case.pass_ == "backward":
        return hopper_backward_bytes(case)
    p, splits = case.problem, key_splits(case)
    rows = splits * p.B * p.H * 4
    parts = round_up_to(rows * p.E, 128) + 2 * round_up_to(rows, 128)
    return parts + 128 if splits > 1 else None


def key_splits(case: Case) -> int:
    """Into how many parts Hopper's kernel splits the keys of a forward of one query; 1 without a
    split.

    It depends on the batch size and on N, not on lengths: so the bits of an entry's result depend
    on the number of other entries. The rule was read off the workspaces of plans. The kernels for
    bands and for packed queries do not split.
    """
    p, band = case.problem, case.diagonal
    programs = p.B * p.G * -(-p.H // p.G // ROWS)
    split = 90 <= case.sm < 100 and p.M == 1 and p.N > FEW_KEYS and 2 * programs <= MULTIPROCESSORS
    if not split or "rows" in case.packed or (band.left, band.right) != (None, None):
        return 1
    most = min(MOST_SPLITS, p.N // 128, (2 * MULTIPROCESSORS - 1) // programs)
    return 1 << (most.bit_length() - 1)


def hopper_backward_bytes(case: Case) -> int:
    """Bytes of workspace of Hopper's backward kernel.

    dq is summed in float32 [B,H,M,D]. In order, or for the gradient of a bias, ds is stored
    instead, in half precision [B,H,M,N] with rows in tiles of 64 and keys in tiles of 128. Then
    come delta [B,H,M], dk and dv for each query head of shared key/value heads, ALiBi's slopes, and
    for each packed tensor a map from rows to entries. Packed rows count once, not B M, for head
    sizes in multiples of 16; dk and dv are in float32 then.

    This equals cuDNN's own figure for every plan built for docs/reports/cudnn.md.
    """
    p = case.problem
    rows, keys = bounded_rows(case, "rows", p.M), bounded_rows(case, "keys", p.N)
    if stores_ds(case):
        main = p.B * p.H * round_up_to(p.M, 64) * round_up_to(p.N, 128) * 2
    else:
        main = p.H * rows * p.D * 4
    width = 4 if "keys" in bounded_sides(case) else 2
    shared = [p.H * keys * n * width for n in (p.D, p.E) if p.H != p.G]
    slopes = [4 * p.H for m in p.node.modifiers if isinstance(m, Alibi)]
    return (
        main
        + p.H * rows * 4
        + sum(round_up_to(n, 128) for n in shared)
        + sum(round_up_to(n, 16) for n in slopes)
        + map_count(case) * 8 * round_up_to(8 * (p.B + 1), 16)
        + 256
    )


def stores_ds(case: Case) -> bool:
    """True if the kernel stores ds: it sums in order or gives the gradient of a bias."""
    return case.deterministic or case.wants("bias")


def bounded_sides(case: Case) -> tuple[str, ...]:
    """The packed sides with a number of rows given to cuDNN."""
    return case.packed if case.problem.D % 16 == case.problem.E % 16 == 0 else ()


def bounded_rows(case: Case, side: str, most: int) -> int:
    """The rows of a side in cuDNN's workspace. most: of one entry."""
    if side in bounded_sides(case):
        return round_total(case.lying.totals[side])
    return case.problem.B * most


def map_count(case: Case) -> int:
    """The packed tensors of a backward with a map of rows in cuDNN's workspace, as counted in
    plans."""
    p, bounded = case.problem, bounded_sides(case)
    rows = 2 + ("rows" in bounded and not stores_ds(case))
    keys = 4 if p.H == p.G or "keys" in bounded else 2
    return rows * ("rows" in case.packed) + keys * ("keys" in case.packed)
