"""Which backend would run a graph, why the others can't, and what it needs, without running it."""

import torch

import attn_graph as ag

X = ag.TensorSpec((1, 8, 1024, 64), torch.float32)
HALF = ag.TensorSpec((1, 8, 1024, 64), torch.float16)
STEP = ag.TensorSpec((1, 8, 1, 64), torch.float32)  # one new query
LENGTHS = ag.TensorSpec((1,), torch.int64)
GRAPHS = {
    "causal": ag.attention(X, X, X, mask=ag.Causal()),
    "causal, in float16": ag.attention(HALF, HALF, HALF, mask=ag.Causal()),
    "one step": ag.attention(STEP, X, X, mask=ag.Causal("bottom_right")),
    "window": ag.attention(X, X, X, mask=ag.Causal() & ag.Window(128)),
    "padding": ag.attention(X, X, X, kv_lengths=LENGTHS),
    "soft cap": ag.attention(X, X, X, mask=ag.Causal(), soft_cap=30.0),
}


def show_who_runs_what() -> None:
    """One line a graph: the backend, how it runs, and the most memory at one time."""
    for name, graph in GRAPHS.items():
        plan = ag.compile(graph)
        how = "; ".join(plan.executable.notes)
        print(f"{name}: {plan.backend}, {plan.memory().peak / 2**20:.3g} MiB: {how}")


def show_a_refusal() -> None:
    """Insist on one backend: every reason against comes back."""
    try:
        ag.compile(GRAPHS["causal"], backends=("cudnn",))
    except ag.NoBackendError as error:
        print(error)


def main() -> None:
    show_who_runs_what()
    print("\nthe window, in full:")
    print(ag.compile(GRAPHS["window"]).explain())
    print("\ncuDNN alone, on this machine:")
    show_a_refusal()
    print("\nthe window on an H200, planned without one:")
    print(ag.compile(GRAPHS["window"], target="h200").explain())


if __name__ == "__main__":
    main()
