"""The command line `attn-graph`, for terminals and scripts."""
