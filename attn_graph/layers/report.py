"""A table of a model's attention calls and their backends, as text, HTML and data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from attn_graph.errors import TORCH, NoBackendError, user_frame
from attn_graph.measuring.timing import Time, run_timed
from attn_graph.plan import Plan
from attn_graph.printing.text import align_columns
from attn_graph.spec import NAMES

MOST_TIMES = 100  # of a row: its first calls, so that a long run takes no memory
HEAD = ("call site", "calls", "query", "key", "value", "mask", "run by", "ms", "first ms")

Result = TypeVar("Result")


@final
@frozen
class Usage:
    """One kind of call: its site, function, tensors and backend.

    query, key, value: dtype and shape. backend: None for PyTorch itself. backward: None without a
    gradient. reasons: why PyTorch runs it.
    """

    site: str
    function: str
    query: str
    key: str
    value: str
    mask: str
    backend: str | None
    backward: str | None
    reasons: tuple[str, ...]

    @classmethod
    def of(
        cls,
        function: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: str,
        plan: Plan | None,
        reasons: tuple[str, ...],
    ) -> Usage:
        """The kind of this call, at the nearest line outside PyTorch and this package."""
        (file, line), tensors = user_frame(TORCH), (query, key, value)
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        backward = None
        if plan and trains and plan.graph.has_gradient:
            try:
                backward = plan.training_vjp.backend
            except NoBackendError:
                backward = "nobody"
        shapes = ("nested" if x.is_nested else [*x.shape] for x in tensors)
        types = (NAMES.get(x.dtype, x.dtype) for x in tensors)
        q, k, v = (f"{name}{shape}" for name, shape in zip(types, shapes, strict=True))
        site, backend = f"{file}:{line}", plan and plan.backend
        return cls(site, function, q, k, v, mask, backend, backward, reasons)

    @property
    def who(self) -> str:
        """The backend, as a cell of a table."""
        if self.backend is None:
            return "PyTorch"
        same = self.backward in (None, self.backend)
        return self.backend if same else f"{self.backend}, backward {self.backward}"


@final
@frozen
class Row:
    """Calls of one kind. seconds: the median of the first hundred forward passes.

    first: of the first call, which plans. None: not timed, as under CUDA graph capture.
    """

    usage: Usage
    calls: int
    seconds: float | None
    first: float | None

    def cells(self) -> tuple[str, ...]:
        u = self.usage
        site = "/".join(Path(u.site).parts[-2:])  # with the last folder alone
        name = f"{site} {u.function}"
        times = ("" if x is None else f"{1e3 * x:.3f}" for x in (self.seconds, self.first))
        return name, str(self.calls), u.query, u.key, u.value, u.mask, u.who, *times

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        names = ("site", "function", "query", "key", "value", "mask", "backend", "backward")
        texts = {name: getattr(self.usage, name) for name in names}
        figures = {"calls": self.calls, "seconds": self.seconds, "first": self.first}
        return texts | {"reasons": [*self.usage.reasons]} | figures


@final
@define(eq=False)
class Tally:
    """The number of calls, and the times of the first of them."""

    calls: int = 0
    times: list[Time] = field(factory=list)


@final
@define(eq=False)
class Report:
    """The attention of a model under `replace_sdpa(report=True)`, call site by call site.

    Prints as text, shows as HTML in a notebook, and exports by `to_dict()`. It grows while the
    block runs; reading it waits for the times of GPUs.
    """

    tallies: dict[Usage, Tally] = field(factory=dict, init=False)
    meets_flex: bool = field(default=False, init=False)  # True after a call of flex_attention

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row for each kind of call, in the order of first use."""
        rows: list[Row] = []
        for usage, tally in [*self.tallies.items()]:
            times = [each() for each in [*tally.times]]  # waits for GPUs that still run
            tally.times[: len(times)] = [lambda x=x: x for x in times]  # type: ignore[misc]  # bound now
            median, first = (statistics.median(times), times[0]) if times else (None, None)
            rows.append(Row(usage, tally.calls, median, first))
        return tuple(rows)

    def time(self, usage: Usage, device: torch.device, job: Callable[[], Result]) -> Result:
        """The result of a job, which is counted and timed."""
        tally = self.tallies.setdefault(usage, Tally())
        tally.calls += 1
        if len(tally.times) >= MOST_TIMES:
            return job()
        result, seconds = run_timed(job, device)
        if seconds is not None:
            tally.times.append(seconds)
        return result

    def lines(self) -> Iterator[str]:
        """A summary, the table, and the reasons for the calls left to PyTorch."""
        rows = self.rows
        left = [row for row in rows if row.usage.backend is None]
        yield f"{count_calls(rows)} calls of attention, {count_calls(left)} left to PyTorch"
        if rows:
            yield from align_columns([HEAD, *(row.cells() for row in rows)])
        if self.meets_flex:
            yield "flex_attention stays PyTorch's; from_flex translates its mods"
        for row in left:
            yield f"{row.usage.site} stays PyTorch's, because"
            yield from (f"  - {reason}" for reason in row.usage.reasons)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Plain numbers, texts, lists and dicts."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "flex_attention": self.meets_flex,
        }

    def _repr_html_(self) -> str:
        """For notebooks: the table as HTML."""
        from attn_graph.printing import html

        rows = [
            (*cells[:6], html.verdict(cells[6], row.usage.reasons), *map(html.Number, cells[7:]))
            for row in self.rows
            for cells in [row.cells()]
        ]
        summary = next(self.lines())
        return html.page(html.element("p", summary), html.table(rows, HEAD))


def count_calls(rows: Sequence[Row]) -> int:
    return sum(row.calls for row in rows)
