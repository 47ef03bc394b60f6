"""Solvers for chains: forward cut where at most one value crosses."""
