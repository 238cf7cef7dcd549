"""The command line `attn-graph`: what the library tells, for terminals and scripts."""
