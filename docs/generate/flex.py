"""FlexAttention's kernels for a GPU that is not there, out of the installed PyTorch's templates.

Inductor fills the templates when it compiles for a GPU; here they are filled with the same tiles
and options, and with the steps that Inductor writes for the masks and modifiers of the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final
from unittest.mock import patch

import torch
from attrs import frozen
from jinja2 import Environment, StrictUndefined
from torch._inductor.kernel.flex.common import load_flex_template
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.codegen.machine_code import MachineCode, compile_for, inspect_compiled
from attn_graph.spec import dense_strides
from docs.generate.sass import Body, read_body

SPARSE = 128  # queries and keys of a block of its block masks
FORWARD = ("flex_attention", "utilities", "common")
BACKWARD = ("flex_backwards", "utilities")
HEAD = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"
BLOCKS = torch.int32  # of numbers and indices of blocks
MASKS = {  # of places m, n
    "no mask": "tl.full([1], True, tl.int1)",
    "soft cap": "tl.full([1], True, tl.int1)",
    "causal": "m >= n",
    "window": "(m >= n) & (m - n <= 255)",
}
CAPPED = "30.0 * libdevice.tanh({score} / 30.0)"
SLOPE = "{ds} * (1 - libdevice.tanh({score} / 30.0) * libdevice.tanh({score} / 30.0))"


@final
@frozen
class FlexCase:
    """A kernel to compile, for B, H, S and D of all tensors, in bfloat16."""

    sm: int
    shape: tuple[int, int, int, int]
    variant: str

    @property
    def has_full_blocks(self) -> bool:
        """Whether some blocks need no mask: what has no mask is one block that might."""
        return self.variant in ("causal", "window")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all arguments that a template asks the shape of."""
        B, H, S, _ = self.shape
        blocks = -(-S // SPARSE) if self.has_full_blocks else 1
        large = dict.fromkeys(("Q", "K", "V", "DO", "DQ", "DV", "DK"), self.shape)
        counts = [f"{x}{y}_NUM_BLKS" for x in ("", "FULL_") for y in ("KV", "Q")]
        indices = [f"{x}{y}_IDX" for x in ("", "FULL_") for y in ("KV", "Q")]
        return {
            **large,
            **dict.fromkeys(("LSE", "DELTA", "MAX"), (B, H, S)),
            **dict.fromkeys(counts, (1, 1, blocks)),
            **dict.fromkeys(indices, (1, 1, blocks, blocks)),
        }

    def options(self, tiles: Mapping[str, int]) -> dict[str, Any]:  # Any: numbers, texts, flags
        """The constants of a kernel. tiles: sizes of blocks by name."""
        D = self.shape[3]
        return {
            **tiles,
            "PRESCALE_QK": False,
            "ROWS_GUARANTEED_SAFE": False,
            "BLOCKS_ARE_CONTIGUOUS": False,
            "WRITE_DQ": True,
            "OUTPUT_LOGSUMEXP": True,
            "OUTPUT_MAX": False,
            "FLOAT32_PRECISION": "'ieee'",
            "IS_DIVISIBLE": True,
            "SM_SCALE": D**-0.5,
            "GQA_SHARED_HEADS": 1,
            "HAS_FULL_BLOCKS": self.has_full_blocks,
            "QK_HEAD_DIM": D,
            "QK_HEAD_DIM_ROUNDED": D,
            "V_HEAD_DIM": D,
            "V_HEAD_DIM_ROUNDED": D,
            "SAFE_HEAD_DIM": True,
            "USE_TMA": False,
            "SPARSE_Q_BLOCK_SIZE": SPARSE,
            "SPARSE_KV_BLOCK_SIZE": SPARSE if self.has_full_blocks else 2**30,
            "INDEX_DTYPE": "tl.int32",
        }

    def step(self, subgraph_number: int, output_name: str | None, **names: Any) -> str:
        """A line of a mask or a modifier: 0 changes scores, 3 writes gradients of what it reads."""
        capped = self.variant == "soft cap"
        if subgraph_number == 3:
            return "pass"
        if output_name == "mask_mod_output":
            return f"mask_mod_output = {MASKS[self.variant]}"
        if subgraph_number == 0:
            score = CAPPED.format(**names) if capped else names["score"]
            return f"{output_name} = {score}"
        ds = names["grad_score_mod"]
        return f"{output_name} = {SLOPE.format(ds=ds, score=names['score']) if capped else ds}"

    def fill(self, templates: tuple[str, ...], options: Mapping[str, Any]) -> tuple[str, list[str]]:
        """The source of a kernel, and the names of its arguments."""
        shapes, names = self.shapes(), list[str]()
        defines = "\n".join(f"{name}: tl.constexpr = {x}" for name, x in options.items())

        def define(*arguments: str) -> str:
            names.extend((*arguments, "OUT"))
            lines = [*defines.splitlines(), *(f"{name} = arg_{name}" for name in names)]
            body = (f"    {line}" for line in lines)
            return "\n".join(("@triton.jit", f"def kernel({given()}):", *body))

        def given() -> str:
            return ", ".join(f"arg_{name}" for name in names)

        def stride(name: str, axis: int | None = None) -> str:
            strides = dense_strides(shapes[name])
            return str(strides if axis is None else strides[axis])

        def store(index: tuple[str, ...], value: str, mask: str, **_: object) -> str:
            places = zip(index, dense_strides(self.shape), strict=True)
            at = " + ".join(f"{i} * {n}" for i, n in places)
            return f"tl.store(OUT + {at}, {value}, {mask})"

        environment = Environment(undefined=StrictUndefined)
        environment.filters["indent_except_first"] = indent_rest
        text = "\n".join(map(load_flex_template, templates))
        source = environment.from_string(text).render(
            def_kernel=define,
            gen_argdefs=given,
            gen_defines=lambda: defines,
            stride=stride,
            size=lambda name, axis: str(shapes[name][axis]),
            modification=self.step,
            store_output=store,
            **options,
        )
        return HEAD + source, names

    def compile(
        self, templates: tuple[str, ...], tiles: Mapping[str, int], warps: int, stages: int
    ) -> MachineCode:
        """What the machine code of a kernel needs."""
        from triton.runtime.jit import MockTensor

        source, names = self.fill(templates, self.options(tiles))
        dtypes = {"LSE": torch.float32, "MAX": torch.float32, "DELTA": torch.float32}
        dtypes |= {name: BLOCKS for name in names if name.endswith(("_BLKS", "_IDX"))}
        tensors = [MockTensor(dtypes.get(name, torch.bfloat16)) for name in names]
        with kernel_of(source) as kernel, compile_for(self.sm):
            compiled = kernel.warmup(*tensors, grid=(1,), num_warps=warps, num_stages=stages)
        return inspect_compiled(compiled, "flex", warps)

    def compile_pass(self, pass_: str) -> tuple[Tiling, MachineCode, Body]:
        """The tile, the machine code and the loops of a pass; dq, dk and dv are of one kernel.

        Its loops are in our order, which is full tiles first.
        """
        if pass_ == "forward":
            (c,) = self.heuristic("fwd")
            tile = Tiling(c.block_m, c.block_n, c.num_warps, c.num_stages)
            sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
            machine = self.compile(FORWARD, sizes, *tile.options)
            return tile, machine, reverse_loops(read_body(machine.sass))
        (c,) = self.heuristic("bwd")
        sizes = {f"BLOCK_{x}": getattr(c, f"block_{x.lower()}") for x in ("M1", "N1", "M2", "N2")}
        machine = self.compile(BACKWARD, sizes, c.num_warps, c.num_stages)
        by_keys = pass_ == "key_gradient"
        both = read_body(machine.sass)
        half = len(both.loops) // 2
        loops = both.loops[half:] if by_keys else both.loops[:half]
        body = reverse_loops(Body(loops, both.outside // 2))
        rows, keys = (c.block_m1, c.block_n1) if by_keys else (c.block_m2, c.block_n2)
        return Tiling(rows, keys, c.num_warps, c.num_stages), machine, body

    def heuristic(self, side: str) -> list[Any]:  # Any: Inductor's own
        """Inductor's tiles for a GPU of this compute capability, where it does not try several."""
        with patch("torch.cuda.get_device_capability", lambda *_: divmod(self.sm, 10)):
            choose = getattr(CUDAConfigHeuristic(), f"get_flex_attn_{side}_configs")
            # PyTorch 2.15 asks for the rows too.
            rows = {"seq_len": self.shape[2]} if "seq_len" in signature(choose).parameters else {}
            configs: list[Any] = choose(self.shape[3], dtype=torch.bfloat16, **rows)
        return configs


def indent_rest(text: str, times: int) -> str:
    """All lines but the first, indented by so many times four spaces."""
    return text.replace("\n", "\n" + " " * 4 * times)


def reverse_loops(body: Body) -> Body:
    """Flex walks tiles that need a mask first."""
    return Body(body.loops[::-1], body.outside)


@contextmanager
def kernel_of(source: str) -> Iterator[Any]:  # Any: Triton's
    """The kernel in a text; Triton reads it from a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "flex_kernel.py")
        path.write_text(source, encoding="utf-8")
        spec = spec_from_file_location("flex_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.kernel
