"""Decisions around any solver, as a change of graph with the way back: pieces, updates at once."""
