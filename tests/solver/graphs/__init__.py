"""Graphs that tests of solvers are run on."""
