"""Levers around any solver: a problem is changed, solved, and its schedule changed back."""
