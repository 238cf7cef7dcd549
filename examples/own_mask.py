"""A mask of your own: what it says is checked, and tiles are skipped on every backend of ours."""

from typing import Any, final

import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.extend import Place


@final
@frozen
class Blocks(ag.Mask):
    """Positions are cut into blocks of `size`; a query sees its own block and the one before."""

    size: int

    def keep(self, at: Place) -> Any:  # Any: an int, a tensor, or a symbol of generated code
        back = at.i // self.size - at.j // self.size
        return (back >= 0) & (back <= 1)


def dense(S: int, size: int, sinks: int) -> torch.Tensor:
    i, j = torch.arange(S)[:, None], torch.arange(S)
    near = (i // size == j // size) | (i // size == j // size + 1)
    return (j <= i) & (near | (j < sinks))


def main() -> None:
    S, size, sinks = 1024, 64, 4
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, S, 64).unbind()

    x = ag.TensorSpec.like(q)
    mask = ag.Causal() & (Blocks(size) | ag.Prefix(sinks))
    plan = ag.compile(ag.attention(x, x, x, mask=mask, stats=True))
    o, _ = plan(q, k, v)

    allowed = dense(S, size, sinks)
    by_hand = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    print(plan.graph)
    print(f"the mask keeps {allowed.float().mean():.1%} of the scores; {plan.backend} computes in")
    print("; ".join(plan.executable.notes))
    print(f"largest difference from the dense mask: {(o - by_hand).abs().max():.1e}")
    print(plan.verify(q, k, v))


if __name__ == "__main__":
    main()
