"""Graphs: what they are made of, how they are written, read, rewritten and differentiated."""
