"""`python -m attn_graph` is `attn-graph`."""

from attn_graph.cli.main import main

if __name__ == "__main__":
    main()
