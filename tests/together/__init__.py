"""Levers two by two and three by three: what each combination does, and what refuses it."""
