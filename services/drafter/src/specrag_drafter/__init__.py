"""Draft service: proposes tokens from a subset of the passages."""
