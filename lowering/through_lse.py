"""The gradient of lse from a kernel's own two passes."""

from __future__ import annotations

from collections.abc import Callable

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
Pulled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, *tuple[torch.Tensor | None, ...]]


def through_lse(
    attend: Callable[..., Pair], pull: Callable[..., Pulled],
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq and dk of lse alone, from a kernel's own two passes: q, k, v -> o, ...; do, q, k, v, o,
    lse -> dq, dk, dv, ...

    d lse_i / d s_ij = p_ij, so dq_i = scale dlse_i sum_j p_ij k_j: an attention over k in place of
    v, times scale dlse. And dk_j = scale sum_i p_ij dlse_i q_i: the gradient of v, with scale dlse
    q as the cotangent of o. p = exp(s - lse), by the given lse: if it is of more keys than these,
    weights add up to exp(own - lse). own is the lse of these keys alone.
    """
    mean, own = attend(q, k, k)[:2]
    weight = (scale * dlse)[..., None].to(q.dtype)
    dk = pull(q * weight, q, k, k, mean, lse)[2]
    share = torch.where(own == lse, 1.0, torch.exp(own - lse))[..., None]
    return mean.mul_(weight).mul_(share), dk
