"""Functions of flash-linear-attention, and its own definitions in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, final

import torch
import torch.nn.functional as F
from attrs import frozen

B, T, H, K, V = 1, 70, 2, 32, 32  # T is two chunks of 64, one ragged
Shape = tuple[int, ...]


@final
@frozen
class Case:
    """A function and its definition, as `module:name` behind fla.ops, of named operands.

    operands: the shape and how it is made of normal numbers. heads_first: the definition's axes.
    dtype: of the function's operands. trains: it has gradients.
    """

    function: str
    due: str | Callable[..., Any]
    operands: Mapping[str, tuple[Shape, Callable[[torch.Tensor], torch.Tensor]]]
    options: Mapping[str, Any] = {}
    due_options: Mapping[str, Any] = {}
    heads_first: bool = False
    dtype: torch.dtype = torch.float32
    trains: bool = True


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def unit(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=-1)


def decay(x: torch.Tensor) -> torch.Tensor:
    return F.logsigmoid(x)


KEYS, VALUES, ROWS = (B, T, H, K), (B, T, H, V), (B, T, H)
QKV = {"q": (KEYS, same), "k": (KEYS, same), "v": (VALUES, same)}
DELTA = {"q": (KEYS, same), "k": (KEYS, unit), "v": (VALUES, same)}
SCALED = {"scale": K**-0.5}


def with_(base: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**base, **more}


def gla(g: torch.Tensor, **given: torch.Tensor) -> object:
    """The definition, whose decays have another name."""
    return find("gla.naive:naive_recurrent_gla")(**given, gk=g)


CASES: dict[str, Case] = {
    "linear, chunks": Case(
        "linear_attn:chunk_linear_attn",
        "linear_attn.naive:naive_recurrent_linear_attn",
        QKV,
        {"normalize": False},
        {"normalize": False},
    ),
    "linear, steps": Case(
        "linear_attn:fused_recurrent_linear_attn",
        "linear_attn.naive:naive_recurrent_linear_attn",
        QKV,
        {"normalize": False},
        {"normalize": False},
    ),
    "gla, chunks": Case("gla:chunk_gla", gla, with_(QKV, g=(KEYS, decay))),
    "gla, steps": Case(
        "gla:fused_recurrent_gla", "gla.naive:naive_recurrent_gla", with_(QKV, gk=(KEYS, decay))
    ),
    "simple gla, chunks": Case(
        "simple_gla:chunk_simple_gla",
        "simple_gla.naive:naive_recurrent_simple_gla",
        with_(QKV, g=(ROWS, decay)),
    ),
    "simple gla, steps": Case(
        "simple_gla:fused_recurrent_simple_gla",
        "simple_gla.naive:naive_recurrent_simple_gla",
        with_(QKV, g=(ROWS, decay)),
    ),
    "simple gla, parallel": Case(
        "simple_gla:parallel_simple_gla",
        "simple_gla.naive:naive_parallel_simple_gla",
        with_(QKV, g=(ROWS, decay)),
    ),
    "delta, chunks": Case(
        "delta_rule:chunk_delta_rule",
        "delta_rule.naive:delta_rule_recurrence",
        with_(DELTA, beta=(ROWS, torch.sigmoid)),
        heads_first=True,
        dtype=torch.bfloat16,
    ),
    "delta, steps": Case(
        "delta_rule:fused_recurrent_delta_rule",
        "delta_rule.naive:delta_rule_recurrence",
        with_(DELTA, beta=(ROWS, torch.sigmoid)),
        {},
        {},
        heads_first=True,
    ),
    "gated delta, chunks": Case(
        "gated_delta_rule:chunk_gated_delta_rule",
        "gated_delta_rule.naive:naive_recurrent_gated_delta_rule",
        with_(DELTA, g=(ROWS, decay), beta=(ROWS, torch.sigmoid)),
    ),
    "gated delta, steps": Case(
        "gated_delta_rule:fused_recurrent_gated_delta_rule",
        "gated_delta_rule.naive:naive_recurrent_gated_delta_rule",
        with_(DELTA, g=(ROWS, decay), beta=(ROWS, torch.sigmoid)),
        trains=False,
    ),
    "kda, chunks": Case(
        "kda:chunk_kda",
        "kda.naive:naive_recurrent_kda",
        with_(DELTA, g=(KEYS, decay), beta=(ROWS, torch.sigmoid)),
    ),
    "kda, steps": Case(
        "kda:fused_recurrent_kda",
        "kda.naive:naive_recurrent_kda",
        with_(DELTA, g=(KEYS, decay), beta=(ROWS, torch.sigmoid)),
        trains=False,
    ),
    "hgrn, chunks": Case(
        "hgrn:chunk_hgrn",
        "hgrn.naive:naive_recurrent_hgrn",
        {"x": ((B, T, 64), same), "g": ((B, T, 64), decay)},
    ),
    "hgrn, steps": Case(
        "hgrn:fused_recurrent_hgrn",
        "hgrn.naive:naive_recurrent_hgrn",
        {"x": ((B, T, 64), same), "g": ((B, T, 64), decay)},
    ),
    "retention, chunks": Case(
        "retention:chunk_retention", "retention.naive:naive_retention", QKV, {}, {}, True
    ),
    "retention, parallel": Case(
        "retention:parallel_retention", "retention.naive:naive_retention", QKV, {}, {}, True
    ),
    "based": Case(
        "based:parallel_based",
        "based.naive:naive_parallel_based",
        {"q": ((B, T, H, 16), same), "k": ((B, T, H, 16), same), "v": (VALUES, same)},
        {"use_norm": False},
        {"use_norm": False},
        True,
    ),
    "attention": Case("attn:parallel_attn", "attn.naive:naive_parallel_attn", QKV),
    "forgetting attention": Case(
        "forgetting_attn:parallel_forgetting_attn",
        "forgetting_attn.naive:naive_forgetting_attn",
        with_(QKV, g=(ROWS, decay)),
    ),
    "gsa, steps": Case(
        "gsa:fused_recurrent_gsa",
        "gsa.naive:naive_recurrent_gsa",
        with_(QKV, s=((B, T, H, 16), same), g=((B, T, H, 16), decay)),
    ),
    "gsa, chunks": Case(
        "gsa:chunk_gsa",
        "gsa.naive:naive_recurrent_gsa",
        with_(QKV, s=((B, T, H, 16), same), g=((B, T, H, 16), decay)),
    ),
}


def find(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"fla.ops.{module}"), function)
    return found


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    """New tensors, the same each time."""
    made = torch.Generator().manual_seed(0)
    drawn = ((x, y[1](torch.randn(y[0], generator=made))) for x, y in case.operands.items())
    return {name: x.to(case.dtype).detach().requires_grad_(case.trains) for name, x in drawn}


def results(case: Case, is_due: bool) -> list[torch.Tensor]:
    """The output and all gradients, of the function or by its definition."""
    tensors = tensors_of(case)
    chosen = case.due if is_due else case.function
    function = find(chosen) if isinstance(chosen, str) else chosen
    turned = is_due and case.heads_first
    given = {n: x.float() if is_due else x for n, x in tensors.items()}
    given = {n: x.transpose(1, 2) if turned else x for n, x in given.items()}
    made = function(**given, **(case.due_options if is_due else case.options))
    o: torch.Tensor = made[0] if isinstance(made, tuple) else made
    o = o.transpose(1, 2) if turned else o
    if not case.trains:
        return [o]
    (o.float() * torch.linspace(1, 2, o.numel()).view(o.shape)).sum().backward()
    return [o.detach(), *(x.grad for x in tensors.values() if x.grad is not None)]
