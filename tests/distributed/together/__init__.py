"""Pairs of levers on two ranks."""
