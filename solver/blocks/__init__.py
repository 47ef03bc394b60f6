"""Solvers that plan repeated blocks once and choose among their options."""
