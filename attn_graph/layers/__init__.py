"""Attention as modules, and a whole model's attention at once."""
