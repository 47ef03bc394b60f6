"""Pipelines of several ranks: their actions, the judge of their time and bytes, and their file."""
