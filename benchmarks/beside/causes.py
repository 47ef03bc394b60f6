"""Why a row is lost, and what would mend it: by suite, model and row."""

from __future__ import annotations

DONATED = (
    "torch's cut reaches this peak only with donated buffers: backward writes over what forward "
    "has saved, and cannot run twice. Plans do without. An option for steps whose backward runs "
    "once would mend it"
)
FUSED = (
    "torch's cut fuses what is computed again into kernels that read the same, so that it costs "
    "no traffic; in code for a plan nothing is fused across a call, so that its peak is known, "
    "and each such kernel reads and writes for itself. Plans that put kernels of the same inputs "
    "between the same calls should mend a part of it; how much is not measured"
)
CAUSES: dict[tuple[str, str, str], str] = {
    ("cpu", "llama", "inductor 1"): DONATED,
    ("cpu", "moe", "inductor 0.7"): FUSED,
    ("cpu", "moe", "inductor 0.55"): FUSED,
    ("cpu", "moe", "inductor 0.4"): FUSED,
    ("cpu", "moe", "inductor 0.3"): FUSED,
    ("cpu", "moe", "inductor 0.2"): FUSED,
    ("cpu", "moe", "inductor 0.1"): FUSED,
}
