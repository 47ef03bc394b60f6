"""Why another's row beats ours, and what would mend it: by suite, model and row.

`document` makes no page while a lost row has no cause here.
"""

from __future__ import annotations

CAUSES: dict[tuple[str, str, str], str] = {}
