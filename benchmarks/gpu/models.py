"""The models of a visit, and small ones of the same kinds for a rehearsal without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.comparison.models import (
    CPU,
    GPU,
    Entry,
    gpt2,
    llama_like,
    resnet,
    unet,
    vit,
)

_gpt = partial(gpt2, width=32, heads=2, seq=64, vocab=64)
_llama = partial(llama_like, width=32, heads=4, kv_heads=2, hidden=64, seq=64, vocab=64)
REHEARSED = {
    "gpt2-small": Entry(partial(_gpt, layers=1), 8),
    "llama-1b": Entry(partial(_llama, layers=1), 8),
    "resnet-50": Entry(partial(resnet, counts=(1, 1), image=32), 4),
    "vit-l": Entry(partial(vit, layers=1, width=32, heads=2, image=32), 4),
    "unet": Entry(partial(unet, width=16, levels=1, image=8), 4),
    "gpt2-medium": Entry(partial(_gpt, layers=1), 8),
    "resnet-152": Entry(partial(resnet, counts=(1,), image=32), 4),
}
"""By the names of the large ones, in the order of the table."""
TABLE = {name: GPU[name] for name in REHEARSED}
TABLE["resnet-50"] = replace(GPU["resnet-50"], batch=256)
COMPILED, REHEARSED_COMPILED = ("gpt2-small", "vit-l", "llama-1b"), ("gpt2-small",)
DEMO, DEMO_BATCH = "llama-1b", 16
LEVERS = {
    "gpt": CPU["gpt2-small"], "resnet": CPU["resnet-50"], "unet": CPU["unet"],
    "head": Entry(partial(gpt2, layers=1, width=192, heads=3, seq=128, vocab=32768), 8),
    "mlp": Entry(partial(gpt2, layers=1, width=256, heads=4, seq=512, vocab=64), 8),
}  # fmt: skip
"""Small ones: a lever is shown, not timed."""
REHEARSED_LEVERS = {
    "gpt": REHEARSED["gpt2-medium"], "resnet": REHEARSED["resnet-152"], "unet": REHEARSED["unet"],
    "head": Entry(partial(gpt2, layers=1, width=16, heads=1, seq=16, vocab=2048), 4),
    "mlp": Entry(partial(gpt2, layers=1, width=16, heads=1, seq=64, vocab=32), 4),
}  # fmt: skip


def table_entry(name: str, *, rehearse: bool) -> Entry:
    """A model of the table."""
    return (REHEARSED if rehearse else TABLE)[name]


def lever_entry(name: str, *, rehearse: bool) -> Entry:
    """A model that a lever is shown on."""
    return (REHEARSED_LEVERS if rehearse else LEVERS)[name]


def demo_entry(*, rehearse: bool) -> Entry:
    """The model that is too large for the device as it is."""
    entry = table_entry(DEMO, rehearse=rehearse)
    return entry if rehearse else replace(entry, batch=DEMO_BATCH)
