"""Targets with the libraries that every backend needs, whatever this machine has."""

from __future__ import annotations

from attrs import evolve

from attn_graph.machine.target import Target

LIBRARIES = (
    ("triton", "3.7.1"),
    ("nvidia-cudnn-frontend", "1.28.0"),
    ("nvidia-cudnn-cu13", "9.20.0.48"),
)


def equip(name: str) -> Target:
    """A target by its name."""
    return evolve(Target.of(name), libraries=LIBRARIES)
