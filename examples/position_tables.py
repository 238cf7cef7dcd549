"""Swin's trained tables of positions, read inside the attention: no bias [H,M,N] is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import SwinConfig, SwinModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.swin.modeling_swin import SwinRelativePositionBias

import attn_graph as ag
from attn_graph.nn.functional import attention

CONFIG = {
    "image_size": 64,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "drop_path_rate": 0.0,
}


def attend_windows(
    module: Any,  # Any: a SwinAttention
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """q, k, v [windows,H,M,D]; mask: of shifted windows [windows,1,M,M], or one zero."""
    own, M = module.relative_position_bias, q.shape[2]
    table = own.relative_position_bias_table.T  # [H,entries]; as it lies, without a copy
    o = attention(
        *(q, k, v),
        scale=scaling,
        bias=mask if mask.ndim else None,
        modifiers=(ag.RelativeBias(table.shape[1], places=True),),
        table=table,
        places=own.relative_position_index.view(M, M),
    )
    assert isinstance(o, torch.Tensor)
    return o.transpose(1, 2), None


@contextmanager
def tables_within() -> Iterator[None]:
    """Swin models made with attn_implementation="tables" read their tables themselves."""
    ALL_ATTENTION_FUNCTIONS.register("tables", attend_windows)
    with patch.object(SwinRelativePositionBias, "forward", lambda self: torch.zeros(())):
        yield


def gradients(model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:  # Any: a SwinModel
    """The features of images, and the gradient of each parameter by their sum of squares."""
    features = model(images).last_hidden_state
    features.square().sum().backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"features": features.detach()} | grads


def main() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 64, 64)
    eager = SwinModel(SwinConfig(**CONFIG))
    eager.config._attn_implementation = "eager"
    own = SwinModel(SwinConfig(**CONFIG))
    own.load_state_dict(eager.state_dict())
    own.config._attn_implementation = "tables"
    due = gradients(eager, images)
    with tables_within():
        made = gradients(own, images)
    tables = [name for name in due if name.endswith("bias_table")]
    errors = [float((made[n] - due[n]).abs().max() / due[n].abs().max()) for n in tables]
    print(f"{len(tables)} tables, gradients within {max(errors):.1e} of eager")


if __name__ == "__main__":
    main()
