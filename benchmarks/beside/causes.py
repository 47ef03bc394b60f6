"""Why a row is lost, and what would mend it: by suite, model and row."""

from __future__ import annotations

MASKS = (
    "a captured step keeps dropout's masks as bytes, where eager keeps floats: a tenth less "
    "memory, and products with bytes, which take two to three times as long; products with the "
    "byte made a float first, of the same bits, would mend most of it"
)
DONATED = (
    "torch's cut reaches this peak only with donated buffers: backward writes over what forward "
    "has saved, and cannot run twice. Plans do without. An option for steps whose backward runs "
    "once would mend it"
)
ORDER = (
    "code for a plan uses no buffer for another and fuses nothing across calls, so that its peak "
    "is known: the step that keeps everything is slower by such code than by torch's, by 1.2 % on "
    "the Llama and 2.3 % on the mixture of experts. Reuse of buffers that the replay takes into "
    "account should mend a part of it; how much is not measured"
)

CAUSES: dict[tuple[str, str, str], str] = {
    ("cpu", "gpt2-small", "eager"): MASKS,
    ("cpu", "vit-b", "eager"): MASKS,
    ("cpu", "llama", "inductor 1"): DONATED,
    ("cpu", "llama", "inductor 0.85"): ORDER,
    ("cpu", "moe", "inductor 0.85"): ORDER,
    ("cpu", "moe", "inductor 0.55"): ORDER,
    ("cpu", "moe", "inductor 0.4"): ORDER,
    ("cpu", "moe", "inductor 0.3"): ORDER,
}
