"""Solvers that cut forward into segments and compute each again as a whole."""
