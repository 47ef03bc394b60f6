"""Narrow layered graphs, which no solver was tuned on, and what `auto` makes of them."""
