"""Gradients: in which layout autograd keeps them, and when they are handed over."""
