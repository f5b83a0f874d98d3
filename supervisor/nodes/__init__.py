"""A mesh of several nodes: who may join, what must agree, and what supervisors tell one another."""
