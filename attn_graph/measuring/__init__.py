"""Choices by measuring, and checks of kernels on their device."""
