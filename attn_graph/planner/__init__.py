"""Who runs a graph and why, what that costs, and what would have to change."""
