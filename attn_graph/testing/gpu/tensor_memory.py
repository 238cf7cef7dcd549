"""Tensor memory, and the tensor cores that work in it. PTX ISA 9.7.16."""
