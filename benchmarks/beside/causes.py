"""Why a row is lost, and what would mend it: by suite, model and row."""

from __future__ import annotations

REUSE = (
    "code for a plan is made without Inductor's reuse of buffers, which is not in the books of the "
    "replay, so the same cut has a higher peak; reuse that the replay accounts for would mend it"
)

CAUSES: dict[tuple[str, str, str], str] = {
    ("cpu", "llama", "inductor 1"): REUSE,
    ("cpu", "lstm", "inductor 1"): REUSE,
    ("cpu", "lstm", "inductor 0.85"): (
        "the search for a compiled plan ended at 32.6 MiB, 10 % above this peak; why is not yet "
        "known, nor what would mend it"
    ),
}
