"""Attention over several devices: the parts of each rank, their messages, and running them."""
