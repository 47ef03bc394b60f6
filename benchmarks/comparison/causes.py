"""Why a row is lost, and what would mend it: by suite, model and row."""

from __future__ import annotations

CAUSES: dict[tuple[str, str, str], str] = {}
