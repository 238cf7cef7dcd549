"""Declare attention once, see what will run, run it forward and backward, with lse."""

import torch

import attn_graph as ag


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 512, 64, requires_grad=True) for _ in "qkv")

    x = ag.TensorSpec((2, 8, 512, 64), torch.float32)  # batch, heads, positions, head size
    mask = ag.Causal() & (ag.Window(64) | ag.Prefix(4))  # 64 positions back, and the first four
    graph = ag.attention(x, x, x, mask=mask, stats=True)  # a value: ==, hash, print, parse
    plan = ag.compile(graph)  # checked, chosen, lowered, cached: no tensor was seen so far
    o, lse = plan(q, k, v)
    (dq,) = torch.autograd.grad(o.square().mean() + lse.mean(), q)  # lse has a gradient, like o

    print(graph)
    print(plan.explain())
    print(plan.verify(q, k, v))
    print(f"o {list(o.shape)}, lse {list(lse.shape)}, dq {list(dq.shape)}")


if __name__ == "__main__":
    main()
