"""The machine as planning sees it, and the memory and caches of plans on it."""
