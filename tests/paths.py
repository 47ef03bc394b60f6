"""Where the repository lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCH = ROOT.parent / "shared" / "bench"
"""The reference instances, which not every checkout has beside it."""
