"""How operands lie in memory: packed, paged, quantised, viewed."""
