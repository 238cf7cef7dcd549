"""A modifier of your own: a step on the scores with a trained tensor, exact in both passes."""

from collections.abc import Mapping
from typing import Any, final

import torch
from attrs import field, frozen

import attn_graph as ag
from attn_graph.extend import Place


@final
@frozen
class Fade(ag.Modifier):
    """s -> s - fade[h] * d / (d + reach), d = |i - j|: far keys fade, but not without end."""

    additive = True  # s plus what does not depend on s, so the derivative by s is 1
    hides = False  # never -inf
    reach: float = field(converter=float)

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"fade": ag.Data("h", (torch.float32,))}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("fade",)

    def distance(self, at: Place) -> Any:  # Any: a tensor, or a symbol of generated code
        far = (at.i - at.j).abs().to(torch.float32)
        return far / (far + self.reach)

    def change(self, s: Any, at: Place) -> Any:  # Any: as above
        return s - at.load("fade", at.h) * self.distance(at)

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        """Adds this block's share to where it belongs; the sum over blocks is the gradient."""
        share = at.reading(totals).load("fade", at.h)
        share -= (ds * self.distance(at)).sum_to_size(share.shape)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
    fade = torch.linspace(0, 2, 8, requires_grad=True)

    def attend(q: ag.Value, k: ag.Value, v: ag.Value, fade: ag.Value) -> ag.Value:
        return ag.scores(q, k).then(Fade(64), fade).mask(ag.Causal()).softmax()[0].weigh(v)

    tensors = {"q": q, "k": k, "v": v, "fade": fade}
    graph = ag.graph(attend, **{name: ag.TensorSpec.like(x) for name, x in tensors.items()})
    plan = ag.compile(graph)
    plan(**tensors).square().sum().backward()  # type: ignore[union-attr]  # one output
    print(graph, plan.explain(), f"dfade: {fade.grad}", plan.verify(**tensors), sep="\n")


if __name__ == "__main__":
    main()
