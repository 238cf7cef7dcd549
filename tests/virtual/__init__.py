"""Tests of virtual GPUs: the machine, what it reports, and our kernels on it."""
