"""Graphs in other forms: as text, with sizes by name, with mapped axes."""
