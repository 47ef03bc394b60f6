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
CAPTURED = (
    "nothing is computed again: the rewritten step itself takes that much longer than eager's in "
    "this process; by how much differs from process to process. Measuring such rows in several "
    "processes would tell it from what the step takes beyond its ops"
)
ONE_PROCESS = (
    "the unmodified step took 404 ms in this row's process and 380 in that of ours, 258.2 MB each: "
    "ratios of two processes differ by as much. Measuring such rows in several processes would "
    "mend it; that plans forgo reuse of buffers explains at most 4 %"
)
NOT_PROVED = (
    "the plan that is found in 10 s, with the other rows' work beside it, may be up to 24 % off "
    "the fastest by its own bound, and takes 57 % where 51 % were planned. More time to solve, and "
    "prices of results that are made again in long stretches, should mend it; neither is measured"
)

CAUSES: dict[tuple[str, str, str], str] = {
    ("cpu", "llama", "inductor 1"): DONATED,
    ("cpu", "vit-b", "eager"): CAPTURED,
    ("cpu", "resnet-50", "inductor 1"): ONE_PROCESS,
    ("cpu", "lstm", "checkpoint 1"): NOT_PROVED,
    ("cpu", "moe", "inductor 0.7"): FUSED,
    ("cpu", "moe", "inductor 0.55"): FUSED,
    ("cpu", "moe", "inductor 0.4"): FUSED,
    ("cpu", "moe", "inductor 0.3"): FUSED,
}
