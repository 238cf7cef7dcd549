"""What planning knows of a machine, and the memory and caches that plans use on it."""
