"""Why a row is lost, and what would mend it: by suite, model and method."""

from __future__ import annotations

REUSE = (
    "code for a plan is made without Inductor's reuse of buffers, which is not in the books of the "
    "replay, so the same cut has a higher peak; reuse that the replay accounts for would mend it"
)

CAUSES: dict[tuple[str, str, str], str] = {
    ("cpu", "llama", "inductor"): REUSE,
    ("cpu", "lstm", "inductor"): (
        f"at the larger peak, {REUSE}; at the smaller, the search ends 5 % above it, and why is "
        "not yet known"
    ),
}
