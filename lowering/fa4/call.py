"""One call of FlashAttention 4: all that its kernels and its arguments depend on, as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.lowering.fa4.dialect import CuteCode, as_read, trace_problem
from attn_graph.lowering.fa4.lists import TileLists, backward_tile, forward_tile, make_lists
from attn_graph.lowering.problem import Problem, read_specs
from attn_graph.masks.places import Place
from attn_graph.spec import NAMES, TensorSpec, dense_strides, memory_order

DTYPES = {name: dtype for dtype, name in NAMES.items()}
Named = Mapping[str, torch.Tensor]


@final
@frozen
class NativeMask:
    """A mask that kernels have built in: a query keeps keys from `left` before to `right` after its
    place, counted from the bottom right corner; None: no such bound."""

    left: int | None = None
    right: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:  # Any: of two types
        """As the package takes it."""
        if self.left is None and self.right == 0:
            return {"causal": True}
        return {"window_size_left": self.left, "window_size_right": self.right}


def native_mask(problem: Problem) -> NativeMask | None:
    """The mask as a native one; None of others."""
    p, mask = problem, problem.node.mask
    if mask is None:
        return NativeMask()
    strip = None if mask.needs else mask.strip(Place(0, 0, 0, 0, p.H, p.M, p.N))
    if strip is None or strip.keys is not None or strip.rows is not None:
        return None
    corner = p.N - p.M
    left = None if strip.low is None else corner - strip.low
    right = None if strip.high is None else strip.high - corner
    sane = all(x is None or 0 <= x < 2**31 for x in (left, right))
    return NativeMask(left, right) if sane else None


@final
@frozen(eq=False)
class Fa4Call:
    """A problem as the package computes it.

    code: the functions of mask and modifiers. lists: of tiles; None: all are visited.
    """

    problem: Problem
    sm: int
    native: NativeMask | None
    code: CuteCode
    lists: TileLists | None
    deterministic: bool = False

    @classmethod
    def of(cls, problem: Problem, sm: int, deterministic: bool = False) -> Fa4Call:
        """Raises Untraceable where the mask or a modifier can't be made a kernel's."""
        native = native_mask(problem)
        code = trace_problem(problem, with_mask=native is None)
        in_order = deterministic and problem.grad is not None  # lists have no order of sums
        lists = None
        if native is None and not in_order:
            assert problem.node.mask is not None
            exact = not problem.node.mask.needs and not code.axes
            tile = forward_tile if problem.grad is None else backward_tile
            lists = make_lists(problem, tile(sm, problem), exact=exact)
        return cls(problem, sm, native, code, lists, in_order)

    @property
    def shared(self) -> int:
        """Query heads of a group where the backward for sm_90 says a score function another place:
        head h r + i % r and query i // r."""
        p = self.problem
        return p.H // p.G if p.grad is not None and self.sm // 10 == 9 else 1

    def plain(self, with_lse: bool) -> dict[str, Any]:  # Any: JSON
        """All that the kernels depend on, as JSON: sizes too, where they decide which one it is."""
        lists = self.lists
        mask = (self.native or NativeMask()).arguments
        return {
            "sm": self.sm,
            "backward": self.problem.grad is not None,
            "tensors": {n: plain_spec(x) for n, x in self.tensors(with_lse).items()},
            "reads": [plain_spec(x) for x in read_specs(self.problem)],
            "options": {"softmax_scale": self.problem.node.scale, **mask},
            "texts": dict(self.code.texts),
            "numbers": [*self.code.numbers],
            "shared": self.shared,
            "tile": lists and [*lists.tile],
            "lists": [[*x.shape] for x in lists.tensors] if lists else [],
            "deterministic": self.deterministic,
        }

    def tensors(self, with_lse: bool = True) -> dict[str, TensorSpec]:
        """The specs of operands and results as the package takes them, by its names."""
        p, own = self.problem, self.problem.by_role
        specs = {"q": own.q, "k": own.k, "v": own.v}
        o = TensorSpec(p.layout_of_o[0], p.dtype, p.layout_of_o[1])
        lse = TensorSpec((p.B, p.H, p.M), torch.float32)
        if p.grad is None:
            specs |= {"out": o}
        else:
            given = p.grad.split(p.specs)
            specs |= {"out": given.o, "dout": o}
            specs |= {f"d{n}": new_like(own) for n, own in zip("qkv", p.specs, strict=False)}
        named = {n: rows_first(x) for n, x in specs.items()}
        named |= {"lse": lse} if with_lse or p.grad is not None else {}
        if p.grad is not None and p.grad.with_dlse:
            named["dlse"] = lse
        return named | ({"learnable_sink": own.sinks} if own.sinks is not None else {})

    @cached_property
    def reads(self) -> list[TensorSpec]:
        """The specs of the tensors that mask and modifiers read."""
        return read_specs(self.problem)

    def view_reads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those tensors as generated code reads them."""
        return [as_read(x, spec) for x, spec in zip(tensors, self.reads, strict=True)]


def new_like(spec: TensorSpec) -> TensorSpec:
    """How the gradient of an operand lies: dense, in its memory order."""
    return TensorSpec(spec.shape, spec.dtype, dense_strides(spec.shape, memory_order(spec)))


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
    """Call the package. tensors: by its names, results among them. reads: as `view_reads`.

    What a backward returns is its gradients, that of sinks last.
    """
    from cutlass import Int32
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from attn_graph.lowering.fa4.functions import package_functions

    options: dict[str, Any] = {  # Any: the package's
        **plain["options"],
        **package_functions(plain["texts"], plain["shared"]),
        "aux_tensors": [*reads] or None,
        "aux_scalars": tuple(map(Int32, plain["numbers"])) or None,
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
