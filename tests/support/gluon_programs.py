"""Programs of Gluon kernels on the emulated multiprocessor: their tensors, lists and mistakes."""

from __future__ import annotations

import inspect
import linecache
from types import ModuleType

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.tile_lists import HEAD, list_at_once
from attn_graph.testing.mask_formula import Places, evaluate_mask
from tests.support.gluon_instructions import Descriptor
from tests.support.gluon_values import Memory, Pointer

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32,
          torch.int32: gl.int32, torch.int64: gl.int64, torch.bool: gl.int1}  # fmt: skip
WIDTH = 16  # of a tile


def memory(name: str, x: torch.Tensor) -> Pointer:
    """A tensor in the machine's memory."""
    whole = x.untyped_storage().nbytes() // x.itemsize
    flat = x.as_strided((whole,), (1,), 0)
    data = (flat.float() if x.dtype == torch.bfloat16 else flat).numpy()
    return Pointer(Memory(name, data, DTYPES[x.dtype]), np.asarray(x.storage_offset()))


def descriptor(name: str, x: torch.Tensor, rows: int) -> Descriptor:
    """What copies `rows` rows of a head at once."""
    at = memory(name, x)
    return Descriptor(at, tuple(x.shape), x.stride(), [1, 1, rows, WIDTH])


def tile_kinds(
    problem: Problem,
    tensors: dict[str, torch.Tensor],
    block_m: int,
    block_n: int,
    by_keys: bool = False,
) -> torch.Tensor:
    """2 for a tile whose every place is kept, 1 for some, 0 for none [B,H,M blocks,N blocks].

    Places past the last query are kept, or, by_keys, those past the last key."""
    p = problem
    sizes = p.B, p.H, p.M, p.N
    mask = p.node.mask
    whole = torch.ones((), dtype=torch.bool)
    keep = whole if mask is None else evaluate_mask(mask, Places(sizes, tensors))
    keep = keep.expand(sizes)
    columns = -p.N % block_n
    rows = -p.M % block_m
    kept = torch.nn.functional.pad(keep.byte(), (0, columns, 0, rows)).unfold(2, block_m, block_m)
    some = kept.unfold(3, block_n, block_n).amax((-1, -2))
    filled = torch.nn.functional.pad(keep.byte(), (0, 0, 0, rows), value=int(not by_keys))
    filled = torch.nn.functional.pad(filled, (0, columns), value=int(by_keys))
    whole = filled.unfold(2, block_m, block_m).unfold(3, block_n, block_n).amin((-1, -2))
    return some.int() + whole.int()


def lists_of(kinds: torch.Tensor) -> torch.Tensor:
    """The list of tiles of each block; behind it lies a number that no tile has."""
    flat = kinds.flatten(0, 2)
    lists = list_at_once(flat)
    lists[:, 0] = torch.arange(len(flat)) % kinds.shape[2]
    counts = HEAD + lists[:, 1:2] + lists[:, 2:3]
    lists = torch.where(torch.arange(lists.shape[1]) < counts, lists, 2**20)
    return lists.reshape(*kinds.shape[:3], -1)


def edited(source: ModuleType, text: str, by: str) -> ModuleType:
    """A kernel's module with one text replaced."""
    whole = inspect.getsource(source)
    assert whole.count(text) == 1, f"{text!r} stands {whole.count(text)} times in the kernel"
    changed = whole.replace(text, by)
    name = f"<{source.__name__} with {by!r} for {text!r}>"
    linecache.cache[name] = (len(changed), None, changed.splitlines(keepends=True), name)
    module = ModuleType(source.__name__)
    exec(compile(changed, name, "exec"), module.__dict__)
    return module
