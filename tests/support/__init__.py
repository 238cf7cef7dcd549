"""What several tests use: drawn graphs, plain formulas, models of the runtime."""
