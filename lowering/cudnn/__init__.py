"""Attention by cuDNN's graphs."""
