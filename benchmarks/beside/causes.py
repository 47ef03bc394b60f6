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
SAME_OPS = (
    "the plan computes nothing again, so that its step is that which keeps everything: here they "
    "differ by 0.7 % by the clock, and the unmodified step from itself by 0.4 %. The rest is the "
    "1 % between generated code and eager's. Longer runs would tell which part is real"
)
CAUSES: dict[tuple[str, str, str], str] = {
    ("cpu", "llama", "inductor 1"): DONATED,
    ("cpu", "vit-b", "eager"): SAME_OPS,
    ("cpu", "moe", "inductor 0.85"): FUSED,
}
