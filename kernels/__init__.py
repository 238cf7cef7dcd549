"""Kernels: each computes one piece of attention and knows nothing of graphs."""

if __name__ != "attn_graph.kernels":
    # At a checkout's root this folder comes before Hugging Face's package `kernels`. So it gives
    # way to the package or, without one, stays without place and version: transformers takes the
    # module for one not installed.
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path
    from typing import NoReturn

    elsewhere = [p for p in sys.path if not (Path(p) / "attn_graph" / "kernels").is_symlink()]
    spec = PathFinder.find_spec(__name__, elsewhere)
    if spec is not None and spec.loader is not None and spec.has_location:
        sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])
    else:
        del __file__, __path__

        def __getattr__(name: str) -> NoReturn:
            raise AttributeError(f"no {name} in kernels: import attn_graph.kernels, not kernels")
