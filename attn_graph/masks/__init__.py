"""Masks as data: which places they keep, and which tiles of them can be skipped."""
