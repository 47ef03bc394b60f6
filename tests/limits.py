"""The time limit of searches whose outcome a test looks at."""

from __future__ import annotations

AMPLE_S = 600.0
"""Ends no search of the tests, on a busy machine neither: their gaps and their work do that."""
