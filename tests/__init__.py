"""Tests: one file a module, and the walls around the modules."""
