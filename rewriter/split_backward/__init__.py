"""Backward in two parts: gradients of inputs first, those of weights when there is time."""
