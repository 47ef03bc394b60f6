"""Solvers that prove an optimum by an integer program, constraint program or search."""
