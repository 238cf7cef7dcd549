"""How operands lie in memory: packed sequences, pages, quantised numbers."""
