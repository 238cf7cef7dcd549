"""Attentions that people train and serve, by model and phase, and who runs each on which GPU.

`python -m benchmarks.catalogue` writes docs/reports/choices.md: for every graph and GPU the backend
with the least published price. Nothing is run, and no GPU is needed. Shapes are those of models'
configurations; batches and lengths are ours. A row is one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from attrs import evolve, field, frozen

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.lowering.rates import read_rates
from attn_graph.lowering.request import Options, Request
from attn_graph.planner.choose import choose, format_rough, price_all
from attn_graph.planner.forms.views import core_of
from docs.generate.pages import table

GPUS = ("a100", "h100", "h200", "b200", "rtx4090", "rtx5090")
LIBRARIES = (  # of every target, whatever this machine has
    ("triton", "3.7.1"),
    ("nvidia-cudnn-frontend", "1.28.0"),
    ("nvidia-cudnn-cu13", "9.20.0.48"),
    ("flash-attn-4", "4.0.0b36"),
)
PAGE = Path(__file__).parents[1] / "docs" / "reports" / "choices.md"
BF16, INT = torch.bfloat16, torch.int32
CAUSAL = ag.Causal()
Specs = tuple[ag.TensorSpec, ag.TensorSpec, ag.TensorSpec]
ENOUGH = 0.85  # of the graphs that FlashAttention 4 supports
DATACENTER = ("h200", "b200")  # for which it is made
PAGE_TEXT = """\
# Who runs what, by price

Written by `python -m benchmarks.catalogue`, without a GPU: {count} attentions that people train and
serve, and the backend that the planner chooses on each GPU, with its predicted time. The prices are
published figures, by `lowering/rates.toml`, and no line was measured by us. Shapes are those of the
models' configurations; batches and lengths are ours. All targets have {libraries}.

A row is one layer. "packed" rows are sequences one after another, "pages" a cache in pages of 16
rows, "finite pages" the same with `finite_pages=True`. Times leave out launches that all backends
have, and take packed sequences to be as few and as long as they may be. A backend without a time
has no published figure.

## FlashAttention 4

The graphs of this page that it supports, and how many of them it runs.

{shares}

Where that is below {enough:.0f} %, another backend is predicted to be faster. Our calls of it
divide no keys among programs, so steps of decoding leave multiprocessors idle, and under lengths it
needs a copy of v: both are in its price. On sm_100 cuDNN is ahead of it by a few percent in
NVIDIA's runs of both, with 8 query heads to a key head; with one each its authors have 1209 TFLOP/s
causal and 1360 full for its gradients (2280). "0 %" are equal prices: then the backend whose
programs move fewer bytes goes first.

{ahead}

## Choices

{choices}

## Sources

{sources}
"""


@final
@frozen
class Model:
    """The attention of a decoder. H, G, D, E: heads, and their sizes. more: options of all its
    graphs. window: how many positions a query sees, its own among them."""

    H: int
    G: int
    D: int
    E: int | None = None
    window: int | None = None
    more: Mapping[str, Any] = field(factory=dict)  # Any: options of ag.attention

    @property
    def mask(self) -> ag.Mask:
        return CAUSAL if self.window is None else ag.Window(self.window - 1)

    def lay(self, make: Callable[[int, int], ag.TensorSpec]) -> Specs:
        """q, k and v. make: a spec of so many heads of a size."""
        return make(self.H, self.D), make(self.G, self.D), make(self.G, self.E or self.D)

    def options(self) -> dict[str, Any]:  # Any: options of ag.attention
        """`more`, with a tensor [H] for "H"."""
        return {
            n: spec(self.H, dtype=torch.float32) if x == "H" else x for n, x in self.more.items()
        }


def spec(*shape: int, dtype: torch.dtype = BF16) -> ag.TensorSpec:
    return ag.TensorSpec(shape, dtype)


CAP, SINKS = {"soft_cap": 50.0}, {"sinks": "H"}
DECODERS: dict[str, Model] = {
    "GPT-2": Model(12, 12, 64),
    "Llama 2 7B": Model(32, 32, 128),
    "Llama 3.2 1B": Model(32, 8, 64),
    "Llama 3.2 3B": Model(24, 8, 128),
    "Llama 3 8B": Model(32, 8, 128),
    "Llama 3 70B": Model(64, 8, 128),
    "Llama 4 Scout": Model(40, 8, 128),
    "Mistral 7B": Model(32, 8, 128, window=4096),
    "Qwen 2.5 7B": Model(28, 4, 128),
    "Qwen 3 30B-A3B": Model(32, 4, 128),
    "Qwen 3 32B": Model(64, 8, 128),
    "Qwen 3.5 (full)": Model(32, 2, 256),
    "Gemma 2 9B (local)": Model(16, 8, 256, window=4096, more=CAP),
    "Gemma 2 9B (global)": Model(16, 8, 256, more=CAP),
    "Gemma 3 27B (local)": Model(32, 16, 128, window=1024),
    "gpt-oss 20B (local)": Model(64, 8, 64, window=128, more=SINKS),
    "gpt-oss 20B (global)": Model(64, 8, 64, more=SINKS),
    "DeepSeek V3": Model(128, 128, 192, 128),
    "Phi-3 mini": Model(32, 32, 96, window=2048),
    "Phi-4": Model(40, 10, 128),
    "OLMo 2 7B": Model(32, 32, 128),
    "SmolLM 3": Model(16, 4, 128),
    "GLM 4.5": Model(96, 8, 128),
    "BLOOM": Model(112, 112, 128, more={"alibi": True}),
}


def within(model: Model, B: int, S: int) -> ag.Graph:
    """A sequence and itself: training, or a prompt."""
    q, k, v = model.lay(lambda heads, size: spec(B, heads, S, size))
    return ag.attention(q, k, v, mask=model.mask, **model.options())


def packed(model: Model, T: int, longest: int) -> ag.Graph:
    """Documents one after another."""
    q, k, v = model.lay(lambda heads, size: spec(T, heads, size))
    own: dict[str, Any] = {"q_starts": spec(T // 1024 + 1, dtype=INT)}
    own["max_lengths"] = longest, longest
    return ag.attention(q, k, v, mask=model.mask, **own, **model.options())


def step(model: Model, B: int, N: int, M: int = 1) -> ag.Graph:
    """New tokens of each sequence, and a cache."""
    q, (_, k, v) = spec(B, model.H, M, model.D), model.lay(lambda heads, d: spec(B, heads, N, d))
    own: dict[str, Any] = {"kv_lengths": spec(B, dtype=INT)}
    return ag.attention(q, k, v, mask=model.mask, align="bottom_right", **own, **model.options())


def paged(
    model: Model,
    B: int,
    N: int,
    rows: tuple[int, int] | None = None,
    finite: bool = False,
    queries: int = 1,
) -> ag.Graph:
    """A cache in pages of 16, all of them in use. rows: of packed queries, in all and of a sequence
    at most; None: so many queries a sequence, not packed. finite: no row of the pools holds NaN."""
    pages = N // 16
    _, k, v = model.lay(lambda heads, size: spec(B * pages, 16, heads, size))
    own: dict[str, Any] = {"pages": spec(B, pages, dtype=INT), "kv_lengths": spec(B, dtype=INT)}
    own["finite_pages"] = finite
    q = spec(B, model.H, queries, model.D)
    if rows is not None:
        q, most = spec(rows[0], model.H, model.D), (rows[1], None)
        own |= {"q_starts": spec(B + 1, dtype=INT), "max_lengths": most}
    return ag.attention(q, k, v, mask=model.mask, align="bottom_right", **own, **model.options())


PHASES: dict[str, Callable[[Model], ag.Graph]] = {
    "training, 4 x 4096": partial(within, B=4, S=4096),
    "training, 1 x 32768": partial(within, B=1, S=32768),
    "training, packed 16384": partial(packed, T=16384, longest=8192),
    "prompt, 1 x 2048": partial(within, B=1, S=2048),
    "step, 1 x 32768": partial(step, B=1, N=32768),
    "step, 32 x 4096": partial(step, B=32, N=4096),
    "4 tokens, 16 x 8192": partial(step, B=16, N=8192, M=4),
    "step, pages, 64 x 8192": partial(paged, B=64, N=8192),
    "step, finite pages, 64 x 8192": partial(paged, B=64, N=8192, finite=True),
    "step, pages, packed, 256 x 2048": partial(paged, B=256, N=2048, rows=(256, 1)),
    "4 tokens, pages, packed, 64 x 8192": partial(paged, B=64, N=8192, rows=(256, 4)),
    "prompts, pages, packed, 8 x 4096": partial(paged, B=8, N=4096, rows=(8192, 2048)),
    "prompt of 2048 and 64 steps, pages, packed, 65 x 8192": partial(
        paged, B=65, N=8192, rows=(2112, 2048)
    ),
}


def latent(B: int, N: int, pages: bool) -> ag.Graph:
    """A step of absorbed latent attention: all heads read one cache of 512 and 64."""
    q, lengths, count = spec(B, 128, 1, 576), spec(B, dtype=INT), N // 64
    if not pages:
        return ag.attention(q, spec(B, 1, N, 576), 512, kv_lengths=lengths)
    pool, table = spec(B * count, 64, 1, 576), spec(B, count, dtype=INT)
    return ag.attention(q, pool, 512, pages=table, kv_lengths=lengths)


def across(B: int, H: int, M: int, N: int, D: int, **more: Any) -> ag.Graph:  # Any: options
    """Queries and other keys, of as many heads."""
    return ag.attention(spec(B, H, M, D), spec(B, H, N, D), spec(B, H, N, D), **more)


def patched(T: int, H: int, D: int, longest: int) -> ag.Graph:
    """Pictures of many sizes, packed: each sees itself."""
    x, starts = spec(T, H, D), spec(17, dtype=INT)
    return ag.attention(x, x, x, q_starts=starts, max_lengths=(longest, longest))


OTHERS: dict[str, Callable[[], ag.Graph]] = {  # and their gradients where a name says training
    "DeepSeek V3, latent: step, 32 x 4096": partial(latent, 32, 4096, pages=False),
    "DeepSeek V3, latent: step, pages of 64, 128 x 8192": partial(latent, 128, 8192, pages=True),
    "BERT base: training, 64 x 512": lambda: across(
        64, 12, 512, 512, 64, kv_lengths=spec(64, dtype=INT)
    ),
    "ModernBERT (local): training, packed 16384": lambda: ag.attention(
        spec(16384, 12, 64), spec(16384, 12, 64), spec(16384, 12, 64),
        q_starts=spec(33, dtype=INT), max_lengths=(8192, 8192), mask=ag.Window(64, 64),
    ),
    "T5 base encoder: training, 32 x 512": lambda: across(
        32, 12, 512, 512, 64, scale=1.0, bias=spec(1, 12, 512, 512)
    ),
    "Whisper large, encoder: prompt, 8 x 1500": partial(across, 8, 20, 1500, 1500, 64),
    "Whisper large, to sound: step, 8 x 1500": partial(across, 8, 20, 1, 1500, 64),
    "Whisper large, to sound: training, 8 x 448 x 1500": partial(across, 8, 20, 448, 1500, 64),
    "ViT base: training, 64 x 197": partial(across, 64, 12, 197, 197, 64),
    "ViT large: training, 32 x 577": partial(across, 32, 16, 577, 577, 64),
    "SigLIP so400m: training, 32 x 729": partial(across, 32, 16, 729, 729, 72),
    "DINOv3 7B: prompt, 8 x 1029": partial(across, 8, 32, 1029, 1029, 128),
    "Qwen 2.5 VL, pictures: prompt, packed 16384": partial(patched, 16384, 16, 80, 4096),
    "Stable Diffusion 1.5: training, 8 x 4096": partial(across, 8, 8, 4096, 4096, 40),
    "Stable Diffusion XL: prompt, 2 x 4096": partial(across, 2, 10, 4096, 4096, 64),
    "Stable Diffusion XL, to text: prompt, 2 x 4096 x 77": partial(across, 2, 10, 4096, 77, 64),
    "Stable Diffusion 3: prompt, 2 x 4429": partial(across, 2, 24, 4429, 4429, 64),
    "Flux: prompt, 1 x 4608": partial(across, 1, 24, 4608, 4608, 128),
    "Wan 2.2: prompt, 1 x 32760": partial(across, 1, 40, 32760, 32760, 128),
    "LTX 2: prompt, 1 x 13376": partial(across, 1, 32, 13376, 13376, 128),
    "HunyuanVideo: prompt, 1 x 55296": partial(across, 1, 24, 55296, 55296, 128),
    "AlphaFold 3, pairs: training, 64 x 384": lambda: across(
        64, 4, 384, 384, 32, bias=spec(1, 4, 384, 384)
    ),
    "ESM-2 650M: training, 16 x 1024": partial(across, 16, 20, 1024, 1024, 64),
}  # fmt: skip


@final
@frozen
class Row:
    """A graph as backends see it, with a name of model and phase."""

    name: str
    pass_: Literal["forward", "backward"]
    graph: ag.Graph

    @property
    def model(self) -> str:
        return self.name.partition(": ")[0]

    @property
    def phase(self) -> str:
        return self.name.partition(": ")[2]


def rows() -> Iterator[Row]:
    """All graphs, gradients of training after their forwards."""
    named = {
        f"{name}: {phase}": partial(make, model)
        for name, model in DECODERS.items()
        for phase, make in PHASES.items()
    }
    for name, make in (named | OTHERS).items():
        graph = simplify(make())
        yield Row(name, "forward", core_of(graph))
        if ": training" in name:
            gradient = training_gradient(graph, through_lse=False)
            yield Row(f"{name}, backward", "backward", core_of(gradient))


@cache
def target_of(gpu: str) -> ag.Target:
    """The GPU with all libraries."""
    return evolve(ag.Target.of(gpu), libraries=LIBRARIES)


@final
@frozen
class Choice:
    """Who runs a graph on a GPU, and the price of each that can, in seconds."""

    backend: str
    prices: Mapping[str, float]

    def __str__(self) -> str:
        price = self.prices.get(self.backend)
        return self.backend if price is None else f"{self.backend} {format_rough(price)}"

    def ahead_of(self, name: str) -> float:
        """By how much the choice is faster than another: 0.1 if that takes a tenth longer."""
        return self.prices[name] / self.prices[self.backend] - 1


def choose_on(gpu: str, graph: ag.Graph) -> Choice:
    """The planner's choice."""
    target = target_of(gpu)
    request = Request(graph, target, Options())
    made = choose(request)
    prices, able = price_all(request), {made.backend.name, *made.also}
    known = {n: x.seconds for n, x in prices.items() if n in able and x.is_known}
    return Choice(made.backend.name, known)


Chosen = Mapping[str, Choice]  # by GPU


def choose_all(graph: ag.Graph) -> Chosen:
    return {gpu: choose_on(gpu, graph) for gpu in GPUS}


def cells(name: str, chosen: Chosen) -> tuple[str, ...]:
    """A line of the page's table."""
    return (name, *map(str, chosen.values()))


Cases = Sequence[tuple[Row, Choice]]


def cases_of_fa4(made: Mapping[Row, Chosen], gpu: str, pass_: str) -> Cases:
    """The graphs of a pass that FlashAttention 4 supports on a GPU, and who runs them."""
    each = ((row, chosen[gpu]) for row, chosen in made.items() if row.pass_ == pass_)
    return [(row, choice) for row, choice in each if "fa4" in choice.prices]


def shares_of_fa4(made: Mapping[Row, Chosen]) -> str:
    """The share of graphs that FlashAttention 4 runs among those that it supports."""
    lines: list[tuple[object, ...]] = []
    for gpu in DATACENTER:
        for pass_ in ("forward", "backward"):
            cases = cases_of_fa4(made, gpu, pass_)
            runs = sum(choice.backend == "fa4" for _, choice in cases)
            lines.append((gpu, pass_, len(cases), runs, f"{100 * runs / len(cases):.0f} %"))
    return table(("GPU", "pass", "supported", "runs", "share"), lines)


def ahead_of_fa4(made: Mapping[Row, Chosen]) -> str:
    """The graphs that FlashAttention 4 supports and another runs, by phase, where it runs fewer
    than ENOUGH of them."""
    lines: list[tuple[object, ...]] = []
    for gpu in DATACENTER:
        for pass_ in ("forward", "backward"):
            cases = cases_of_fa4(made, gpu, pass_)
            others = [(row, choice) for row, choice in cases if choice.backend != "fa4"]
            if len(others) > (1 - ENOUGH) * len(cases):
                lines += [(gpu, *line) for line in group_cases(gpu, others)]
    return table(("GPU", "phase", "models", "runs", "ahead by", "source"), lines)


def group_cases(gpu: str, cases: Cases) -> Iterator[tuple[str, ...]]:
    """A line for each phase and backend."""
    groups: dict[tuple[str, str], list[tuple[Row, Choice]]] = {}
    for row, choice in cases:
        groups.setdefault((row.phase, choice.backend), []).append((row, choice))
    for (phase, backend), group in groups.items():
        figures = sorted(100 * choice.ahead_of("fa4") for _, choice in group)
        span = dict.fromkeys(f"{x:.0f} %" for x in (figures[0], figures[-1]))
        source = read_rates().gpus[backend, target_of(gpu).sm].source
        yield phase, ", ".join(row.model for row, _ in group), backend, " to ".join(span), source


def sources() -> str:
    """What the names of sources mean, and the source of each rate."""
    names = "\n".join(f"- {name}: {text}." for name, text in read_rates().sources.items())
    lines: list[tuple[object, ...]] = [
        (", ".join(x.backends), ", ".join(map(str, x.sm)), x.source)
        for x in dict.fromkeys(read_rates().gpus.values())
    ]
    return f"{names}\n\n{table(('backends', 'sm', 'TFLOP/s'), lines)}"


def count_phases(gpu: str) -> str:
    """How many graphs of each phase each backend runs."""
    counts: dict[str, Counter[str]] = {}
    for row in rows():
        counts.setdefault(row.phase, Counter())[choose_on(gpu, row.graph).backend] += 1
    return "\n".join(
        f"{phase}: {', '.join(f'{name} {n}' for name, n in sorted(by.items()))}"
        for phase, by in counts.items()
    )


def write_page() -> str:
    """The page."""
    made = {row: choose_all(row.graph) for row in rows()}
    lines: list[tuple[object, ...]] = [cells(row.name, x) for row, x in made.items()]
    choices = table(("graph", *GPUS), lines)
    libraries = ", ".join(" ".join(x) for x in LIBRARIES)
    return PAGE_TEXT.format(
        count=len(made), libraries=libraries, shares=shares_of_fa4(made), enough=100 * ENOUGH,
        ahead=ahead_of_fa4(made), choices=choices, sources=sources(),
    )  # fmt: skip


def main() -> None:
    PAGE.write_text(write_page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
