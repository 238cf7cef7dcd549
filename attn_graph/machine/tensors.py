"""Real tensors checked against a plan's specs and device."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from attn_graph.errors import DECLARED, PlanMismatchError, PlanTargetError, show
from attn_graph.machine.target import Target
from attn_graph.printing.words import SAID, own_name, use
from attn_graph.spec import LAYOUTS, NAMES, TensorSpec, cast_code, layout_problem

ROOM = "out "  # before the name of a result, for a tensor of `out`
SEEDS = ("seed", "offset")  # inputs that dropout= adds
STARTS = ("q_starts", "kv_starts")  # inputs that say where packed sequences begin
STARTS_HINT = "; starts are one more than sequences, with 0 first"
OF_THE_GRAPH = (  # the edit of a call with more tensors than inputs
    "masks, numbers and other tensors belong to the graph: write attention(q, k, v, mask=...), or "
    "keep=, bias=, scale="
)
ROLES = ("query", "key", "value")  # PyTorch's names of q, k and v
DTENSORS = "torch.distributed.tensor"  # slow to import: whoever has a DTensor has imported it


def is_watched(t: object) -> bool:
    """True for a tensor of a class that sees each operation on it, as fake tensors do."""
    return (
        isinstance(t, torch.Tensor)
        and type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]  # of torch's stubs
    )


def read_array(x: Any) -> Any:  # Any: whatever is passed for a tensor
    """A tensor in the memory of an array with DLPack; anything else unchanged."""
    if isinstance(x, torch.Tensor) or not hasattr(x, "__dlpack__"):
        return x
    return torch.from_dlpack(x)  # type: ignore[attr-defined]  # missing in torch's stubs


def read_arrays(tensors: Sequence[Any]) -> tuple[Any, ...]:  # Any: as `read_array`
    """`read_array` of each, without a call if all are tensors."""
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            return tuple(map(read_array, tensors))
    return tuple(tensors)


def is_distributed(t: torch.Tensor) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(t, kind)


def dtensor_class() -> type | None:
    """The class of DTensors; None if it was never imported, so none can exist."""
    module = sys.modules.get(DTENSORS)
    return None if module is None else module.DTensor


dtensor_class._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result


def require_device(tensors: Sequence[object], target: Target) -> None:
    """Raise PlanTargetError for tensors on another kind of GPU than a plan's target."""
    if target.tensors_on == "cpu":
        return
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda}
    for device in devices:
        if Target.here(device) != target:
            raise PlanTargetError(
                f"the plan is for {target}, and {device} is {Target.here(device)}; "
                f"compile(graph, target=Target.here({str(device)!r})) plans for that"
            )
    if not devices and target.device is None:
        raise PlanTargetError(
            f"the plan is for {target} and this machine is {Target.here()}; "
            "it can be inspected here, and called there"
        )


def require_as_declared(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], target: Target
) -> None:
    """Raise PlanMismatchError unless tensors are as declared, and on one device."""
    differences = [x for n, t in tensors.items() for x in find_differences(n, specs[n], t, target)]
    if not differences and len({t.device for t in tensors.values()}) > 1:
        places = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        differences = [f"expected tensors on one device, got {places}"]
    if differences:
        named = all("; " in x for x in differences)
        raise PlanMismatchError(*differences, way_out="" if named else way_out_of(tensors, specs))


def way_out_of(tensors: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> str:
    """What to write for tensors other than their specs, by the cause of the difference."""
    given = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor) and not t.is_nested}
    if any(t.is_meta for t in given.values()):
        return (
            "tensors on meta hold no numbers: call attn_graph.nn.functional.attention, which "
            "gives results on meta"
        )
    rooms = {name: t for name, t in given.items() if name.startswith(ROOM)}
    if rooms and (way_out := way_out_of_rooms(rooms, specs)):
        return way_out
    casts = [cast_code(n, specs[n].dtype) for n, t in given.items() if t.dtype != specs[n].dtype]
    if not casts or any(t.shape != specs[n].shape for n, t in given.items()):
        return DECLARED
    if any(torch.is_autocast_enabled(t.device.type) for t in given.values()):
        return (
            f"plans do not cast under torch.autocast: write {', '.join(casts)}, or call "
            "attn_graph.nn.functional.attention, which casts"
        )
    return f"write {', '.join(casts)}, or compile a graph for these: TensorSpec.like(tensor)"


def way_out_of_rooms(rooms: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> str:
    """What to write for tensors of `out` other than the results; "" if they are as those are."""
    odd = [n for n, t in rooms.items() if (t.shape, t.dtype) != (specs[n].shape, specs[n].dtype)]
    if odd:
        made = (f"torch.empty({specs[n].shape}, dtype={specs[n].dtype})" for n in odd)
        return f"pass {', '.join(made)}"
    lying = {n: t for n, t in rooms.items() if TensorSpec.like(t) != specs[n]}
    codes = [f'"{n.removeprefix(ROOM)}": {layout_code(t)}' for n, t in lying.items()]
    told = f"declare how results lie, outputs={{{', '.join(codes)}}} in attention(q, k, v, ...)"
    return f"{told}, or pass others" if codes else ""


def layout_code(tensor: torch.Tensor) -> str:
    """The layout of a result that lies like a tensor, as `outputs=` takes it."""
    spec = TensorSpec.like(tensor)
    for name in LAYOUTS if tensor.ndim == 4 else ():
        if TensorSpec(spec.shape, spec.dtype, layout=name) == spec:
            return f'"{name}"'
    return "TensorSpec.like(out)"


def find_differences(name: str, spec: TensorSpec, tensor: object, target: Target) -> list[str]:
    """The differences between a tensor and its spec."""
    if not isinstance(tensor, torch.Tensor):
        way_out = ""
        if spec.shape == () and isinstance(tensor, int):
            way_out = f"; pass torch.tensor({tensor}{place_code(target.tensors_on)})"
        elif spec.dtype.is_floating_point and {*spec.shape} == {1} and isinstance(tensor, float):
            way_out = f"; pass {full_code(spec.shape, tensor, target.tensors_on)}"
        return [f"{name}: expected a tensor {spec}, got {show(tensor)}{way_out}"]
    if is_distributed(tensor):
        return [
            f"{name}: expected a tensor of this process, got a DTensor; pass {name}.to_local(), or "
            "call attn_graph.nn.functional.attention, which takes DTensors"
        ]
    if problem := layout_problem(tensor):
        return [f"{name}: expected {spec}, and the tensor {problem}"]
    differences = []
    if tensor.dtype not in NAMES or TensorSpec.like(tensor) != spec:
        got = TensorSpec.like(tensor) if tensor.dtype in NAMES else tensor.dtype
        hint = shape_hint(name, spec, tensor)
        differences.append(f"{name}: expected {spec}, got {got}{hint}")
    if tensor.device.type != target.tensors_on:
        differences.append(
            f"{name}: expected a tensor on {target.tensors_on}, got one on {tensor.device}"
        )
    if tensor.is_neg():
        differences.append(
            f"{name}: expected its numbers in memory, got a view with the negative bit, whose "
            f"memory holds them negated; pass {name}.resolve_neg()"
        )
    return differences


def shape_hint(name: str, spec: TensorSpec, tensor: torch.Tensor) -> str:
    """The likely slip in the shape of a tensor; "" for other differences."""
    due, shape = spec.shape, tuple(tensor.shape)
    if name in STARTS and len(due) == len(shape) == 1 and due[0] == shape[0] + 1:
        return STARTS_HINT
    if len(due) != len(shape) or due == shape or name.startswith(ROOM):
        return ""
    for a, b in combinations(range(len(due)), 2):
        turned = tensor.transpose(a, b)
        if tuple(turned.shape) == due:
            code = f"{name}.transpose({a}, {b})"
            lies = TensorSpec(due, spec.dtype, turned.stride()) == spec
            declared = "" if lies else f"declare TensorSpec.like({code}) and "
            return f"; if axes {a} and {b} are exchanged, {declared}pass {code}"
    return ""


def full_code(shape: Sequence[int], number: float, device: str) -> str:
    """The code of a tensor with one number everywhere, in float32."""
    return f"torch.full(({', '.join(map(str, shape))}), {float(number)}{place_code(device)})"


def place_code(device: str) -> str:
    return "" if device == "cpu" else f', device="{device}"'


def arrange(
    specs: Mapping[str, TensorSpec],
    tensors: Sequence[torch.Tensor],
    named: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Positional and named tensors in the order of the specs. Raises PlanMismatchError."""
    known = ", ".join(specs)
    given = dict(zip(specs, tensors, strict=False))
    both = {**given, **named}
    differences = [f"{n}: given twice, by position and by name" for n in named if n in given]
    strangers = [n for n in named if n not in specs]
    if strangers and {*strangers} <= {*ROLES}:
        text = f"{', '.join(strangers)}: not inputs; the inputs are {known}"
        raise PlanMismatchError(text, way_out="write plan(q, k, v)")
    differences += [stranger_problem(n, specs) for n in strangers]
    meant = {own_name(n, specs) for n in strangers}
    missing = [(n, spec) for n, spec in specs.items() if n not in both and n not in meant]
    differences += [f"{name}: expected {spec}, got nothing" for name, spec in missing]
    if len(tensors) > len(specs):
        differences += [f"expected {len(specs)} tensors ({known}), got {len(tensors)}"]
    if differences:
        seeds = [f"{name}=torch.tensor({n})" for n, (name, _) in enumerate(missing)]
        only = len(seeds) == len(differences) and {*dict(missing)} <= {*SEEDS}
        way_out = f"dropout= adds seed and offset: pass {', '.join(seeds)}" if only else DECLARED
        foreign = [n for n in strangers if not own_name(n, specs)]
        if len(tensors) > len(specs):
            way_out = OF_THE_GRAPH
        elif strangers and len(strangers) == len(differences):
            way_out = way_out_of_strangers(foreign)
        raise PlanMismatchError(*differences, way_out=way_out)
    return tuple(both[name] for name in specs)


def stranger_problem(name: str, own: Iterable[str]) -> str:
    """The message for a name of no input: the input meant by it, or all."""
    meant = own_name(name, own)
    return f"{name}: is not an input; " + (
        f"write {meant}=" if meant else f"the inputs are {', '.join(own)}"
    )


def way_out_of_strangers(foreign: Sequence[str]) -> str:
    """The edit for names of no input of a plan, in any words; "" without names."""
    if not foreign:
        return ""
    edit = use(SAID[foreign[0]]) if foreign[0] in SAID else f"{foreign[0]}="
    return f"the graph declares its inputs: in attention(q, k, v, ...), {edit}"


def as_it_lies(declared: TensorSpec, tensor: torch.Tensor) -> TensorSpec:
    """A declared spec with the strides of its tensor, handed back by autograd."""
    if tensor.shape != declared.shape:
        return declared
    return TensorSpec(declared.shape, declared.dtype, tensor.stride())


def copy_laid_as(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    room = torch.empty_strided(spec.shape, spec.strides, dtype=x.dtype, device=x.device)
    return room.copy_(x)


def lay_as(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x, or a copy of x if its layout differs from the spec."""
    return x if TensorSpec.like(x) == spec else copy_laid_as(x, spec)


def lay_in_order(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """x, or a copy without gaps: axes lie in this order, from the outermost."""
    ordered = x.permute(tuple(order))
    if ordered.is_contiguous():
        return x
    back = tuple(map(order.index, range(len(order))))
    return ordered.contiguous().permute(back)
