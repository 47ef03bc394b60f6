"""Graphs over ranges of sizes: symbols, expressions, and what varies with them."""
