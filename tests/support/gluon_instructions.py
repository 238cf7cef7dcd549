"""What Gluon kernels call, on the machine of tests/support/gluon_machine.py.

`run_kernel` runs one program of a kernel: the Python functions under its `jit`, and all that they
call, with the names that come from Triton bound to the functions here.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from inspect import signature
from math import prod
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from attrs import frozen
from triton.runtime.jit import KernelInterface

from tests.support.gluon_machine import (
    HERE,
    Access,
    Agent,
    Barrier,
    Barriers,
    Event,
    Fault,
    Machine,
    Product,
    Shared,
    join_clocks,
    pause,
)
from tests.support.gluon_values import (
    ARRAYS,
    FUNCTIONS,
    Memory,
    Pointer,
    Value,
    value,
    values_in_range,
)


def program_id(axis: int) -> Value:
    """The number of this program along an axis of the grid."""
    return value(HERE.agent.machine.program[axis])


def num_programs(axis: int) -> Value:
    """The size of an axis of the grid."""
    return value(HERE.agent.machine.programs[axis])


def allocate(dtype: Any, shape: Sequence[Any], layout: Any = None, value: Any = None) -> Any:
    """Shared memory, all NaN; mbarriers where the layout is theirs."""
    machine: Machine = HERE.agent.machine
    if type(layout).__name__ == "MBarrierLayout":
        return allocate_barriers(int(shape[0]))
    data = np.full([int(n) for n in shape], np.nan, dtype=ARRAYS[dtype.name])
    memory = Shared(f"buffer {len(machine.memories)}", data, dtype, [])
    machine.memories.append(memory)
    if value is not None:
        memory.store(value)
    return memory


def allocate_barriers(count: int) -> Barriers:
    """mbarriers, not initialised."""
    machine: Machine = HERE.agent.machine
    first = len(machine.barriers)
    added = tuple(Barrier(f"barrier {first + n}") for n in range(count))
    machine.barriers += added
    return Barriers(added)


def allocate_mbarrier(batch: Any = None, **cluster: Any) -> Barrier | Barriers:
    """One mbarrier, or several."""
    barriers = allocate_barriers(1 if batch is None else int(batch))
    return barriers.all[0] if batch is None else barriers


def warp_specialize(
    parts: Sequence[tuple[Any, Sequence[Any]]], warps: Sequence[int], registers: Any = None
) -> Any:
    """Run all partitions beside each other, and go on when all have ended."""
    if len(warps) != len(parts) - 1:
        raise Fault(f"{len(parts)} partitions, and warps for {len(warps)} beside the first")
    parent = pause()
    parent.tick()
    machine, first = parent.machine, len(parent.machine.agents)
    for n, (function, args) in enumerate(parts):
        name = f"{function.__name__} {first + n - 1}"
        machine.agents.append(Agent(name, machine, function, tuple(args), dict(parent.clock)))
    children = machine.agents[first:]
    pause(lambda: all(child.done for child in children), "its partitions")
    for child in children:
        join_clocks(parent.clock, child.clock)
    return children[0].result


def init(barrier: Barrier, count: Any) -> None:
    """Initialise an mbarrier: a phase ends after `count` arrivals."""
    pause()
    if barrier.count:
        raise Fault(f"{barrier.name} is initialised twice")
    barrier.count = barrier.pending = int(count)


def invalidate(barrier: Barrier) -> None:
    """Give up an mbarrier. Raises Fault in the middle of a phase."""
    pause()
    if not barrier.is_idle:
        raise Fault(f"{barrier.name} is given up, and {barrier.pending} are due")
    barrier.count = barrier.pending = 0


def arrive(barrier: Barrier, *, count: Any = 1, pred: Any = True) -> None:
    """Arrive; what this agent did before is known to who waits for this phase."""
    agent = pause()
    if pred:
        barrier.change(int(count), 0, agent.clock, agent.name)
        agent.tick()


def expect(barrier: Barrier, bytes_per_cta: Any = None, pred: Any = True) -> None:
    """Expect bytes, and arrive once."""
    agent = pause()
    if pred:
        barrier.change(1, int(bytes_per_cta), agent.clock, agent.name)
        agent.tick()


def wait(barrier: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    """Wait until the phase of this parity has ended."""
    if not pred:
        return
    parity = int(phase)
    if not barrier.count or parity not in (0, 1):
        raise Fault(f"a wait for parity {parity} of {barrier.name}, which takes {barrier.count}")
    agent = pause(
        lambda: barrier.has_ended(parity), f"{barrier.name}, whose phase is {barrier.phase}"
    )
    join_clocks(agent.clock, barrier.released)


def fence(cluster: bool = False) -> None:
    """Show asynchronous instructions what this agent has stored to shared memory."""
    agent = pause()
    for memory in agent.machine.memories:
        for access in memory.accesses:
            access.fenced |= access.agent == agent.name


@frozen(eq=False)
class Block:
    """The type of what a descriptor copies at once."""

    shape: tuple[int, ...]
    element_ty: Any

    @property
    def nbytes(self) -> int:
        """Its size in shared memory."""
        return prod(self.shape) * int(self.element_ty.primitive_bitwidth) // 8


@frozen(eq=False)
class Descriptor:
    """A tensor in global memory, and the block of it that TMA copies at once."""

    first: Pointer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: list[int]
    layout: Any = None

    @property
    def memory(self) -> Memory:
        """Where the tensor lies."""
        return self.first.memory

    @property
    def name(self) -> str:
        """That of the tensor."""
        return self.memory.name

    @property
    def dtype(self) -> Any:
        """That of the tensor's elements."""
        return self.memory.dtype

    @property
    def block_type(self) -> Block:
        """The type of a block."""
        return Block(tuple(self.block_shape), self.dtype)

    @property
    def nbytes_per_cta(self) -> int:
        """The bytes of a block."""
        return self.block_type.nbytes

    def places(self, coord: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Which elements of a block lie in the tensor, and where in memory; 0 for the others."""
        if len(coord) != len(self.shape):
            raise Fault(f"{len(coord)} coordinates for {self.name}, which has {len(self.shape)}")
        grid = np.indices(self.block_shape)
        axes = [x + int(c) for x, c in zip(grid, coord, strict=True)]
        inside = np.logical_and.reduce(
            [(x >= 0) & (x < n) for x, n in zip(axes, self.shape, strict=True)]
        )
        at = self.first.offsets + sum(x * s for x, s in zip(axes, self.strides, strict=True))
        return inside, np.where(inside, at, 0)

    def read(self, coord: Sequence[Any]) -> np.ndarray:
        """A block, 0 outside of the tensor."""
        inside, at = self.places(coord)
        return np.where(inside, self.memory.data[at], 0)


def copy_in(
    source: Descriptor, coord: Sequence[Any], barrier: Barrier, result: Shared,
    pred: Any = True, multicast: bool = False,
) -> None:  # fmt: skip
    """Start a copy to shared memory. When it lands, its bytes count at the mbarrier."""
    agent = pause()
    if not pred:
        return
    if tuple(result.shape) != tuple(source.block_shape):
        raise Fault(f"{source.name}: blocks {source.block_shape} do not fit into {result.shape}")
    machine, coord = agent.machine, [int(c) for c in coord]
    machine.copies += 1
    name = f"copy {machine.copies}"
    clock = agent.clock | {name: 1}
    result.touch(name, agent.clock, 1, True, f"{source.name} {coord}", direct=False)
    result.data[...] = np.nan

    def land() -> None:
        result.data[...] = source.read(coord)
        barrier.change(0, -source.nbytes_per_cta, clock, f"a copy of {source.name}")

    machine.add(Event(f"copy of {source.name}", land))


def copy_out(target: Descriptor, coord: Sequence[Any], source: Shared) -> None:
    """Start a copy from shared to global memory."""
    agent = pause()
    access = source.touch(agent.name, agent.clock, None, False, direct=False)
    inside, at = target.places(coord)

    def land() -> None:
        target.memory.data[at[inside]] = source.data[inside]
        np.add.at(target.memory.writes, at[inside], 1)

    agent.stores.append((agent.machine.add(Event(f"copy to {target.name}", land)), access))


def store_wait(pendings: Any) -> None:
    """Wait until at most so many copies to global memory are under way."""
    agent: Agent = HERE.agent
    count = max(0, len(agent.stores) - int(pendings))
    ending = agent.stores[:count]
    pause(lambda: all(event.done for event, _ in ending), "its copies to global memory")
    end_accesses(agent, [access for _, access in ending])
    del agent.stores[:count]


def end_accesses(agent: Agent, accesses: Sequence[Access]) -> None:
    """A wait has ended these: from now on they have happened."""
    for access in accesses:
        access.epoch = agent.clock[agent.name]


def mma(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Any:  # fmt: skip
    """Start acc + a b; without is_async wait for it."""
    agent = pause()
    if a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        raise Fault(f"a product of {a.dtype} {a.shape} and {b.dtype} {b.shape}")
    agent.machine.multiplied.append((agent.name, name_operand(a), name_operand(b)))
    shared = [x for x in (a, b) if isinstance(x, Shared)]
    reads = [x.touch(agent.name, agent.clock, None, False, direct=False) for x in shared]
    product = Product(Event(f"product of {agent.name}", bool), reads)
    if agent.products:
        product.event.after = agent.products[-1].event

    def end() -> None:
        with np.errstate(all="ignore"):  # rows past the last key may hold what is not finite
            total = a.data.astype(np.float32) @ b.data.astype(np.float32)
        before: Any = acc.result if isinstance(acc, Product) else acc
        product.result = Value(total + before.data, before.dtype) if use_acc else value(total)

    product.event.happen = end
    agent.products.append(product)
    agent.machine.add(product.event)
    return product if is_async else mma_wait(0, [product])


def name_operand(x: Any) -> str:
    """What an operand of a product is."""
    return x.label() if isinstance(x, Shared) else "registers"


def mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
    """Wait until at most so many products are under way; their results are values from then on."""
    agent: Agent = HERE.agent
    count = max(0, len(agent.products) - int(num_outstanding))
    ending = agent.products[:count]
    pause(lambda: all(product.event.done for product in ending), "its products")
    for product in ending:
        product.ended = True
        end_accesses(agent, product.reads)
    del agent.products[:count]
    results = tuple(map(read_result, deps))
    return results[0] if len(results) == 1 else results


def read_result(x: Any) -> Any:
    """The value of what a wait is given. Raises Fault for a product that the wait did not end."""
    if not isinstance(x, Product):
        return x
    if not x.ended:
        raise Fault(f"the result of a {x.event.name} is read, and no wait has ended it")
    return x.result


# The kernel's functions, with these in place of Triton's.

BY_MODULE: dict[str, dict[str, Callable[..., Any]]] = {
    "mbarrier": {
        "init": init,
        "invalidate": invalidate,
        "arrive": arrive,
        "expect": expect,
        "wait": wait,
        "allocate_mbarrier": allocate_mbarrier,
    },
    "tma": {
        "async_copy_global_to_shared": copy_in,
        "async_load": copy_in,
        "async_copy_shared_to_global": copy_out,
        "store_wait": store_wait,
    },
    "": FUNCTIONS
    | {
        "allocate_shared_memory": allocate,
        "warp_specialize": warp_specialize,
        "program_id": program_id,
        "num_programs": num_programs,
        "fence_async_shared": fence,
        "warpgroup_mma": mma,
        "warpgroup_mma_init": lambda x: x,
        "warpgroup_mma_wait": mma_wait,
        "barrier": lambda **cluster: None,
    },
}
CLASSES = ("range", "static_range", "constexpr")  # of Triton's, which kernels call
ours: dict[Any, FunctionType] = {}


def stand_in(real: Any) -> Any:
    """What stands here for a function of Triton's. Raises NotImplementedError where none does."""
    place = real.__module__.rpartition(".")[2]
    known = BY_MODULE.get(place, BY_MODULE[""])
    if real.__name__ not in known:
        raise NotImplementedError(f"the emulated machine has no {real.__module__}.{real.__name__}")
    return known[real.__name__]


@frozen(eq=False)
class Facade:
    """A module of Triton's, its functions replaced by ours."""

    module: ModuleType

    def __getattr__(self, name: str) -> Any:
        return translate(getattr(self.module, name))


def translate(x: Any) -> Any:
    """An object that a kernel names or is given, as it is on this machine."""
    if isinstance(x, KernelInterface):
        function: Any = vars(x)["fn"]
        is_theirs = function.__module__.startswith("triton.")
        return stand_in(function) if is_theirs else plain_function(function)
    if isinstance(x, ModuleType) and x.__name__.startswith("triton"):
        return Facade(x)
    if type(x).__name__ == "constexpr":
        return translate(x.value)
    is_called = isinstance(x, FunctionType) or getattr(x, "__name__", "") in CLASSES
    if is_called and x.__module__.startswith("triton."):
        return stand_in(x)
    return x


def names_in(code: CodeType) -> set[str]:
    """The global names that a function and those inside it may read."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def plain_function(f: FunctionType) -> FunctionType:
    """A kernel's function as Python runs it."""
    if f not in ours:
        names: dict[str, Any] = {"__builtins__": vars(builtins) | {"range": values_in_range}}
        ours[f] = FunctionType(f.__code__, names, f.__name__, f.__defaults__, f.__closure__)
        ours[f].__kwdefaults__ = f.__kwdefaults__
        known = {name: f.__globals__[name] for name in names_in(f.__code__) & f.__globals__.keys()}
        names |= {name: translate(x) for name, x in known.items()}
    return ours[f]


def as_argument(x: Any) -> Any:
    """What a kernel is called with, as its parameter: numbers become values."""
    if isinstance(x, tuple):
        return tuple(map(as_argument, x))
    return value(x) if isinstance(x, int | float) else x


def run_kernel(machine: Machine, kernel: Any, **arguments: Any) -> None:
    """One program of a kernel. Raises Fault, or what the kernel raises."""
    parameters = signature(kernel.fn).parameters.values()
    constants = {p.name for p in parameters if "constexpr" in str(p.annotation)}
    given = {n: translate(x) if n in constants else as_argument(x) for n, x in arguments.items()}
    machine.run(lambda: plain_function(kernel.fn)(**given))
