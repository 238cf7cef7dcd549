"""Calls that leave for other runtimes, with tensors of any sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import attn_graph as ag
from attn_graph.ir.graph import Graph
from attn_graph.nn.calls import OPTIONS, SEGMENTS, make_graph
from attn_graph.nn.functional import attention
from attn_graph.testing import expect_outputs

H, G, D, E = 4, 2, 16, 8
TRACED, LARGER = (2, 6, 10), (4, 12, 20)  # B, M, N of the export and of another call
LAST = ag.Causal("bottom_right")
Tensors = Sequence[Tensor]
Sizes = tuple[int, int, int]
LOWEST = torch.finfo(torch.float32).min
STILL = ("alibi", "sinks", "keep_blocks", "table")  # have sizes of their own


def no_tensors(sizes: Sizes) -> dict[str, Tensor]:
    return {}


@frozen
class Case:
    """Options of a call, and its tensors beside q, k and v. opset: of ONNX's Attention, from which
    on that says the same; None: never. dynamic: the axes of the traced sizes may have others."""

    name: str
    options: Mapping[str, Any] = field(factory=dict)  # Any: of `attention`
    more: Callable[[Sizes], dict[str, Tensor]] = no_tensors
    opset: int | None = 23
    dynamic: bool = True

    def __str__(self) -> str:
        return self.name

    def tensors(self, sizes: Sizes, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The tensors of a call, by name."""
        torch.manual_seed(0)
        B, M, N = sizes
        shapes = {"q": (B, H, M, D), "k": (B, G, N, D), "v": (B, G, N, E)}
        more = self.more(sizes)
        made = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
        return made | {n: x.to(dtype) if n in ("bias", "sinks") else x for n, x in more.items()}

    def graph(self, tensors: Mapping[str, Tensor]) -> Graph:
        specs = {name: ag.TensorSpec.like(t) for name, t in tensors.items()}
        return make_graph(specs, dict.fromkeys(OPTIONS) | DEFAULTS | dict(self.options))

    def check(self, tensors: Mapping[str, Tensor], results: Tensors, who: str) -> None:
        """Raise AssertionError unless the results are those of the formula, by the rule."""
        graph = self.graph(tensors)
        order = [tensors[i.name] for i in graph.inputs]
        for due, x in zip(expect_outputs(graph, order), results, strict=True):
            due.check(x, f"{who}: ")

    def export(self, *, dynamic: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        """The program of a call at the traced sizes. Any: an ExportedProgram."""
        tensors = self.tensors(TRACED, dtype)
        model = Call(tuple(tensors)[3:], dict(self.options))
        shapes = {"tensors": tuple(axes_of(n, t) for n, t in tensors.items())} if dynamic else None
        return torch.export.export(model, tuple(tensors.values()), dynamic_shapes=shapes)


DEFAULTS: dict[str, Any] = {  # Any: options of `attention`, but for those of None
    "alibi": False,
    "finite_pages": False,
    "all_rows": False,
    "dropout": 0.0,
    "stats": False,
    "modifiers": (),
    "avoid": (),
    "deterministic": False,
    "on_fallback": "ignore",
    "batch_invariant": False,
}


def axes_of(name: str, t: Tensor) -> dict[int, Any]:  # Any: a size of torch.export
    """The axes of a tensor that have other sizes in other calls."""
    last = range(t.ndim) if name not in STILL else ()
    return {
        axis: Dim.AUTO for axis in last if t.shape[axis] in TRACED and (axis != 1 or t.ndim < 4)
    }


class Call(nn.Module):
    def __init__(self, names: tuple[str, ...], options: dict[str, Any]) -> None:  # Any: as above
        super().__init__()
        self.names, self.options = names, options

    def forward(self, *tensors: Tensor) -> Any:  # Any: o, or a tuple
        q, k, v, *more = tensors
        named: dict[str, Any] = dict(zip(self.names, more, strict=True))  # Any: as above
        return attention(q, k, v, **self.options, **named)


def as_results(results: Any) -> list[Tensor]:  # Any: a tensor or several
    return [results] if isinstance(results, Tensor) else [*results]


def operators(program: ExportedProgram) -> set[Any]:  # Any: operators of PyTorch
    calls = {n.target for n in program.graph.nodes if n.op == "call_function"}
    return {op for op in calls if isinstance(op, torch._ops.OpOverload)}


# In ONNX. Any: its models, which have no types


def to_onnx(
    program: Any, opset: int, **options: Any
) -> Any:  # a model of onnx  # Any: a program or a module
    exported = torch.onnx.export(
        program, dynamo=True, verbose=False, opset_version=opset, **options
    )
    assert exported is not None
    return exported.model_proto


def run_onnxruntime(model: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return run_by_name(lambda feeds: session.run(None, feeds), model, tensors)


def run_by_name(
    call: Callable[[dict[str, Any]], Sequence[Any]], model: Any, tensors: Sequence[Tensor]
) -> list[Tensor]:
    names = [i.name for i in model.graph.input]
    feeds = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
    return [torch.tensor(x) for x in call(feeds)]


# Tensors of the cases


def lengths(**of: float) -> Callable[[Sizes], dict[str, Tensor]]:
    """Lengths of the traced entries in shares of M and N, again and again."""

    def made(sizes: Sizes) -> dict[str, Tensor]:
        B, M, N = sizes
        full = {"q_lengths": M, "kv_lengths": N}
        most = {name: full[name] for name in of}
        return {
            name: torch.tensor([int(n * of[name]), n - 1]).repeat(B // 2)
            for name, n in most.items()
        }

    return made


def kept(sizes: Sizes) -> dict[str, Tensor]:
    """A mask tensor in which one row sees nothing."""
    B, M, N = sizes
    keep = torch.rand(B, 1, M, N) > 0.4
    keep[:, :, 2] = False
    return {"keep": keep}


def padding(sizes: Sizes) -> dict[str, Tensor]:
    B, _, N = sizes
    return {"keep": (torch.arange(N) >= torch.arange(B)[:, None])[:, None, None]}


def bias(sizes: Sizes) -> dict[str, Tensor]:
    _, M, N = sizes
    return {"bias": torch.randn(1, H, M, N)}


def hiding_bias(sizes: Sizes) -> dict[str, Tensor]:
    """A bias with -inf, and with the lowest number in part of a row and in a whole one."""
    _, M, N = sizes
    x = torch.randn(1, H, M, N).masked_fill(torch.rand(1, H, M, N) > 0.8, -torch.inf)
    x[:, :, 0], x[:, :, 1, :4], x[:, :, 2] = LOWEST, LOWEST, -torch.inf
    return {"bias": x}


def segments(sizes: Sizes) -> dict[str, Tensor]:
    B, M, N = sizes
    names = zip(SEGMENTS, (M, N), strict=True)
    return {name: torch.randint(3, (B, n)) for name, n in names}


def blocks(sizes: Sizes) -> dict[str, Tensor]:
    return {"keep_blocks": torch.rand(1, 1, 3, 2) > 0.3}


def per_head(name: str) -> Callable[[Sizes], dict[str, Tensor]]:
    return lambda _: {name: torch.rand(H) + 0.1}


def documents(sizes: Sizes) -> dict[str, Tensor]:
    _, M, N = sizes
    return {"page_i": torch.arange(M) // 4, "page_j": torch.arange(N) // 4}


def table(sizes: Sizes) -> dict[str, Tensor]:
    return {"table": torch.randn(H, 7)}


PAGES = ag.Formula("page_i >= page_j", (("page_i", "i"), ("page_j", "j")))
CASES = (
    Case("plain"),
    Case("causal from the top left", {"mask": ag.Causal("top_left")}),
    Case("causal to the bottom right", {"mask": LAST}),
    Case("causal by align", {"mask": ag.Causal(), "align": "bottom_right"}),
    Case("window", {"mask": ag.Window(3, 1, "bottom_right")}),
    Case("window from the top left", {"mask": ag.Window(3, 1, "top_left")}),
    Case("window ahead of its query", {"mask": ag.Window(-1, 3, "top_left")}),
    Case("band", {"mask": ag.Band(-3, 0)}),
    Case("join", {"mask": LAST & (ag.Window(2, 0, "bottom_right") | ag.Prefix(2))}),
    Case("two bands", {"mask": ag.Causal("top_left") & ag.Window(2, 1, "top_left")}),
    Case("not", {"mask": ~ag.Causal("top_left")}),
    Case("keep", more=kept),
    Case("padding", more=padding),
    Case("keep or prefix", {"mask": ag.Keep() | ag.Prefix(1)}, kept),
    Case("bias", more=bias),
    Case("hiding bias", more=hiding_bias),
    Case("bias and causal", {"mask": LAST, "soft_cap": 2.0}, bias),
    Case("soft cap", {"mask": LAST, "soft_cap": 3.0}),
    Case("scale", {"scale": 0.3}),
    Case("negative scale", {"scale": -0.3}, opset=None),
    Case("scale of 0", {"scale": 0.0}, opset=None),
    Case("key lengths", {}, lengths(kv_lengths=0.4)),
    Case("key lengths of 0", {}, lengths(kv_lengths=0.0)),
    Case("key lengths and causal", {"mask": LAST}, lengths(kv_lengths=0.4)),
    Case("key lengths, top left", {"mask": ag.Causal("top_left")}, lengths(kv_lengths=0.4)),
    Case("key lengths, window", {"mask": ag.Window(3, 0, "bottom_right")}, lengths(kv_lengths=0.4)),
    Case("key lengths or causal", {"mask": ag.KeyLengths() | LAST}, lengths(kv_lengths=0.4), None),
    Case("query lengths", {}, lengths(q_lengths=0.5)),
    Case("both lengths", {"mask": LAST}, lengths(kv_lengths=0.4, q_lengths=0.5)),
    Case("segments", {}, segments),
    Case("blocks", {"mask": ag.KeepBlocks(2, 5)}, blocks, dynamic=False),
    Case("formula", {"mask": ag.Formula("i // 3 >= j // 4")}),
    Case("formula of tensors", {"mask": PAGES}, documents),
    Case("statistics", {"mask": LAST, "stats": ("lse", "max")}, opset=None),
    Case("statistics of blind rows", {"stats": ("lse", "max")}, kept, opset=None),
    Case("alibi", {"mask": ag.Causal(), "alibi": True, "align": "bottom_right"}, opset=None),
    Case("slopes", {"align": "bottom_right"}, per_head("alibi"), opset=None),
    Case("sinks", {"mask": LAST, "stats": ("lse",)}, per_head("sinks"), opset=None),
    Case("table", {"modifiers": (ag.RelativeBias(7, "bottom_right"),)}, table, opset=None),
    Case("addend", {"modifiers": (ag.Addend("real(j - i) / 8"),)}, opset=None),
    Case("factor", {"modifiers": (ag.Factor("0.5 + real(h)"),)}, opset=None),
)
