"""One call of FlashAttention 4, as a value: all inputs of its kernels and its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.ir.storage.packed import LENGTHS
from attn_graph.lowering.fa4.dialect import CuteCode, trace_problem
from attn_graph.lowering.fa4.lists import (
    MadeLists,
    TileLists,
    backward_tile,
    make_lists,
    plan_lists,
)
from attn_graph.lowering.libraries.fa4_masks import (
    STATISTICS,
    NativeMask,
    copied_names,
    count_splits,
    end_names,
    forward_tile,
    native_mask,
)
from attn_graph.lowering.lying import SIDES, Lying
from attn_graph.lowering.problem import Problem, read_specs
from attn_graph.machine.cache import remember
from attn_graph.spec import NAMES, TensorSpec, dense_like

DTYPES = {name: dtype for dtype, name in NAMES.items()}
# As the package names them.
SEQUSED = {"q_lengths": "seqused_q", "kv_lengths": "seqused_k"}
CU_SEQLENS = {"rows": "cu_seqlens_q", "keys": "cu_seqlens_k"}
MOST = {"rows": "max_seqlen_q", "keys": "max_seqlen_k"}
NARROW = (128, 64)  # queries and keys of a tile; a kernel for sm_100 has one or two such of queries
Named = Mapping[str, torch.Tensor]


@final
@frozen(eq=False)
class Fa4Call:
    """An attention, or its gradient, as the package computes it.

    code: the functions of mask and modifiers. lists: of tiles, made with the plan or by each call;
    None: all are visited. narrow: True for forward tiles of half as many keys, for kernels short
    of registers; lists are of whole ones still. splits: how many programs share the keys of a head.
    """

    lying: Lying
    sm: int
    native: NativeMask | None
    code: CuteCode
    lists: TileLists | MadeLists | None
    deterministic: bool = False
    narrow: bool = False
    splits: int = 1

    @classmethod
    def of(
        cls,
        lying: Lying,
        sm: int,
        deterministic: bool = False,
        admits: Callable[[MadeLists], bool] = lambda _: True,
        processors: int | None = None,
    ) -> Fa4Call:
        """admits: True for lists that each call may make. processors: of the GPU; None: no program
        may share keys with others.

        Raises Untraceable if the mask or a modifier can't be a kernel's function.
        """
        problem = lying.stepped
        native = native_mask(lying)
        code = trace_problem(problem, with_mask=native is None)
        in_order = deterministic and problem.grad is not None  # lists have no order of sums
        lists: TileLists | MadeLists | None = None
        if native is None and not in_order and lying.packed is None:
            assert problem.node.mask is not None
            exact = not problem.node.mask.needs and not code.axes
            tile = (forward_tile if problem.grad is None else backward_tile)(sm, problem)
            made = plan_lists(problem, tile)
            if made is not None and admits(made):
                lists = made
            else:
                lists = make_lists(problem, tile, exact=exact)
        splits = count_splits(lying, sm, processors) if processors and lists is None else 1
        return cls(lying, sm, native, code, lists, in_order, splits=splits)

    @cached_property
    def problem(self) -> Problem:
        """Padded, if tensors are packed or in pages."""
        return self.lying.stepped

    @property
    def may_be_narrow(self) -> bool:
        """True if the package has narrower tiles for this: on sm_100, where a thread holds a row of
        a tile. Of keys in pages it would read whole ones."""
        p = self.problem
        fits = self.sm // 10 in (10, 11) and max(p.D, p.E) <= 128
        return fits and p.grad is None and not self.lying.pools and not self.narrow

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The lengths given to kernels, some by starts; a mask function compares with the others.
        There may be no page past a length of keys in pages."""
        if self.native is not None:
            return self.native.ends
        sides = [*self.lying.totals, *("keys" for _ in self.lying.pools)]
        told = dict.fromkeys(LENGTHS[side] for side in sides)
        return tuple(name for name in told if name in self.limited)

    @cached_property
    def limited(self) -> tuple[str, ...]:
        return end_names(self.problem)

    @cached_property
    def lengths(self) -> tuple[str, ...]:
        """The lengths given to kernels besides starts."""
        gapless = {LENGTHS[side] for side in self.lying.gapless}
        return tuple(name for name in self.ends if name not in gapless)

    def own_spec(self, side: str, spec: TensorSpec) -> TensorSpec:
        """The spec of a new tensor for the problem's [B,H,L,D] or [B,H,L]: itself, or packed."""
        T = self.lying.totals.get(side)
        if T is None:
            return spec
        _, H, _, *last = spec.shape
        return TensorSpec((T, H, *last) if last else (H, T), spec.dtype)

    @cached_property
    def copied(self) -> dict[str, TensorSpec]:
        """The specs of a call's copies of operands, by name; o as the forward gives it."""
        p = self.problem
        given = dict(zip("qkv", p.specs, strict=False))
        dense = {name: dense_like(x) for name, x in given.items()} | {"o": p.o}
        dense |= dict.fromkeys(STATISTICS, TensorSpec((p.B, p.H, p.M), torch.float32))
        return {n: self.own_spec(SIDES[n], dense[n]) for n in copied_names(self.lying)}

    @property
    def shared(self) -> int:
        """Query heads of a group if the backward for sm_90 passes another place to a score
        function: head h r + i % r and query i // r; else 1."""
        p = self.problem
        return p.H // p.G if p.grad is not None and self.sm // 10 == 9 else 1

    def plain(self, with_lse: bool) -> dict[str, Any]:  # Any: JSON
        """All inputs of the kernels, as JSON. Sizes are among them: some decide the kernel."""
        lists = self.lists
        mask = (self.native or NativeMask()).arguments
        own = self.most | ({"tile_mn": [*NARROW]} if self.narrow else {})
        own |= {"num_splits": self.splits} if self.splits > 1 else {}
        return {
            "sm": self.sm,
            "backward": self.problem.grad is not None,
            "tensors": {n: plain_spec(x) for n, x in self.tensors(with_lse).items()},
            "reads": [plain_spec(x) for x in read_specs(self.problem)],
            "options": {"softmax_scale": self.problem.node.scale, **mask, **own},
            "texts": dict(self.code.texts),
            "numbers": [*self.code.numbers],
            "shared": self.shared,
            "tile": lists and [*lists.tile],
            "lists": [[*x] for x in lists.shapes] if lists else [],
            "deterministic": self.deterministic,
        }

    @property
    def texts(self) -> list[str]:
        """The generated functions: of mask and modifiers, and to classify tiles."""
        made = self.lists.made.launches if isinstance(self.lists, MadeLists) else ()
        return [*self.code.texts.values(), *(x for each in made for x in each.texts.values())]

    @cached_property
    def variant(self) -> str:
        """A name of the kernels, independent of numbers and of all sizes but a head's."""
        plain, p = self.plain(True), self.problem
        told = {name: x for name, x in plain.items() if name != "numbers"}
        told["lists"] = [[p.B > b == 1, p.H > h == 1] for b, h, *_ in plain["lists"]]
        told["reads"] = [x[2] for x in plain["reads"]]
        told["tensors"] = {name: x[2] for name, x in plain["tensors"].items()}
        told["options"] = {name: x is not None for name, x in plain["options"].items()}
        digest = sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]
        way = ", backward" if p.grad is not None else ""
        return f"{plain['tensors']['q'][2]}, D {p.D}, E {p.E}{way}, {digest}"

    @property
    def kernels(self) -> str:
        """The kernels, with their tile of rows and the heads of a group: both compiled in."""
        group = self.problem.H // self.problem.G
        return f"{self.variant}, tile {forward_tile(self.sm, self.problem)}, group {group}"

    def tensors(self, with_lse: bool = True) -> dict[str, TensorSpec]:
        """The specs of operands and results as the package takes them, by its names."""
        p, own = self.problem, self.problem.by_role
        specs = dict(zip("qkv", p.specs, strict=False)) | self.lying.in_place  # of pages the pool
        specs |= {name: x for name, x in self.copied.items() if name in specs}
        o = self.own_spec("rows", p.o)
        lse = self.own_spec("rows", TensorSpec((p.B, p.H, p.M), torch.float32))
        if p.grad is None:
            specs |= {"out": o}
        else:
            in_place = len(o.shape) == 4 and "o" not in self.copied
            specs |= {"out": p.grad.split(p.specs).o if in_place else o, "dout": o}
            specs |= self.gradients
        padded = {n for n, x in specs.items() if len(x.shape) == 4} - {*self.lying.pools}
        named = {n: rows_first(x) if n in padded else x for n, x in specs.items()}
        named |= {"lse": lse} if with_lse or p.grad is not None else {}
        if p.grad is not None and p.grad.with_dlse:
            named["dlse"] = lse
        named |= {SEQUSED[name]: TensorSpec((p.B,), torch.int32) for name in self.lengths}
        starts = TensorSpec((p.B + 1,), torch.int32)
        named |= {CU_SEQLENS[side]: starts for side in self.lying.totals}
        if (table := self.lying.pages) is not None:
            named["page_table"] = TensorSpec(table.shape, torch.int32)
        return named | ({"learnable_sink": own.sinks} if own.sinks is not None else {})

    @property
    def gradients(self) -> dict[str, TensorSpec]:
        """How the gradients of q, k and v lie."""
        each = ((n, f"d{n}", x) for n, x in zip("qkv", self.problem.specs, strict=False))
        lies = ((n, name, self.problem.lay(name, x.shape, x)) for n, name, x in each)
        return {name: self.own_spec(SIDES[n], x) for n, name, x in lies}

    def rounded(self, side: str, tile: int) -> int:
        """Rows or keys of all sequences, as the package rounds them up for its sums, at most."""
        p, T = self.problem, self.lying.totals.get(side)
        count = p.M if side == "rows" else p.N
        return p.B * -(-count // tile) * tile if T is None else T + (p.B + 2) * tile

    @property
    def most(self) -> dict[str, int]:
        """The most rows of a sequence of each packed side, as the package takes them."""
        sizes = {"rows": self.problem.M, "keys": self.problem.N}
        return {MOST[side]: sizes[side] for side in self.lying.totals}

    @cached_property
    def reads(self) -> list[TensorSpec]:
        """The specs of the tensors read by mask and modifiers."""
        return read_specs(self.problem)


def rows_first(spec: TensorSpec) -> TensorSpec:
    """[B,H,M,D] as the package has it, [B,M,H,D]."""
    (b, h, m, d), (sb, sh, sm, sd) = spec.shape, spec.strides
    return TensorSpec((b, m, h, d), spec.dtype, (sb, sm, sh, sd))


def plain_spec(spec: TensorSpec) -> list[Any]:  # Any: JSON
    """A spec as JSON."""
    return [[*spec.shape], [*spec.strides], NAMES[spec.dtype]]


def call_package(
    plain: Mapping[str, Any],  # Any: JSON, as `Fa4Call.plain` gives it
    tensors: Named,
    reads: Sequence[torch.Tensor],
    lists: Sequence[torch.Tensor],
) -> tuple[Any, ...]:  # Any: the package is untyped
    """Call the package. tensors: by its names, results among them. reads: as `as_read`.

    A backward returns its gradients, of sinks last.
    """
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    options: dict[str, Any] = {  # Any: the package's
        **plain["options"],
        **fixed_options(tuple(plain["texts"].items()), plain["shared"], tuple(plain["numbers"])),
        "aux_tensors": [*reads] or None,
    }
    if lists:
        tile = tuple(plain["tile"])
        options["block_sparse_tensors"] = BlockSparseTensorsTorch(*lists, block_size=tile)
    if not plain["backward"]:
        options.pop("score_mod_bwd", None)
        return interface._flash_attn_fwd(**tensors, **options)  # type: ignore[no-any-return]
    return interface._flash_attn_bwd(  # type: ignore[no-any-return]
        **tensors, **options, deterministic=plain["deterministic"]
    )


@remember
def fixed_options(
    texts: tuple[tuple[str, str], ...], shared: int, numbers: tuple[int, ...]
) -> dict[str, Any]:  # Any: the package is untyped
    """The package's arguments shared by all calls of a plan: its functions and their numbers."""
    from cutlass import Int32

    from attn_graph.lowering.fa4.functions import package_functions

    made = package_functions(dict(texts), shared)
    return {**made, "aux_scalars": tuple(map(Int32, numbers)) or None}
