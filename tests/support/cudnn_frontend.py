"""cudnn-frontend in each of its minor versions, as far as it is called to load and run plans.

What a version has not is not there, and what it does to the machine is written down, by the
sources of 1.28: with a handle, loading a plan captures the handle's stream and takes memory.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, final

from attrs import define, field

FIRST_WITH_HANDLES = 28
MINORS = range(18, 33)


@final
@define
class Machine:
    """A GPU that plans are loaded on: what was done to it, and how it is."""

    device: str  # its description, in JSON
    is_full: bool = False  # of its memory
    captures: bool = False  # its current stream
    loads: list[bytes] = field(factory=list)
    runs: list[tuple[Any, Any]] = field(factory=list)  # by which handle, on which stream

    def warm_up(self) -> None:
        """As the frontend does where it loads by a handle: if it fails, the capture goes on."""
        self.captures = True
        if self.is_full:
            raise RuntimeError("cudaMalloc: out of memory")
        self.captures = False


class Handle:
    def __init__(self, backend_handle: int, stream: int = 0) -> None:
        self.backend_handle, self.stream = backend_handle, stream


class Properties:
    def __init__(self, text: str) -> None:
        self.text = text

    def serialize(self) -> str:
        return self.text


def stand_in(minor: int, machine: Machine) -> ModuleType:
    """The module `cudnn` of version 1.`minor` on a machine."""
    found: Any = ModuleType("cudnn")
    has_handles = minor >= FIRST_WITH_HANDLES

    class Graph:
        def __init__(self, **told: Any) -> None:
            self.told = told

        def deserialize(self, *given: Any) -> None:
            *handle, data = given
            if not handle and (not has_handles or "device_property" not in self.told):
                raise TypeError("deserialize(): incompatible function arguments")
            machine.loads.append(bytes(data))
            if handle:
                machine.warm_up()

        def execute(self, pack: Any, workspace: Any, handle: Any) -> None:
            assert isinstance(handle, Handle if has_handles else int)
            machine.runs.append((handle, getattr(handle, "stream", None)))

    def set_stream(handle: Any, stream: int) -> None:
        if has_handles:
            handle.stream = stream

    found.__version__ = f"1.{minor}.0"
    found.cudnnGraphNotSupportedError = type("cudnnGraphNotSupportedError", (Exception,), {})
    found.backend_version = lambda: 92000
    found.create_device_properties = lambda device: Properties(machine.device)
    found.create_handle = lambda: Handle(1) if has_handles else 1
    found.destroy_handle = lambda handle: None
    found.set_stream = set_stream
    found.pygraph = Graph
    if has_handles:
        found.Handle = Handle
    return found  # type: ignore[no-any-return]  # a module
