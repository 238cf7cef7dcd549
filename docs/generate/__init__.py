"""Writes the pages, or parts of pages, that come from the code."""
