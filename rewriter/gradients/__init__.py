"""Gradients that leave backward one by one: handed over, or used for updates at once."""
