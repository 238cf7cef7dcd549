"""Planning: the choice of a backend, its reasons, its cost, and the changes to get another."""
