"""Graphs from graphs or from text: derivatives, mapped axes, sizes bound, parts of an attention."""
