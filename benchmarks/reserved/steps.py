"""Steps captured for an H100, at modelled costs; nothing runs on one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import remat
from benchmarks.networks.catalogue import NETWORKS
from examples import llama, resnet
from examples.gpt import GPT, Sizes
from remat.graph_capture.graph import TrainingGraph

DEVICE = "h100"
GPT12 = Sizes(layers=12, width=256, heads=4, batch=8, vocab=8192)


def _gpt12() -> dict[str, Any]:
    tokens = torch.zeros(GPT12.batch, GPT12.seq, dtype=torch.long)
    return {"model": GPT(GPT12), "args": (tokens, tokens.clone())}


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "resnet50": NETWORKS["resnet50"],
    "unet": NETWORKS["unet"],
    "gpt12 (example)": _gpt12,
    "resnet (example)": resnet.factory,
    "moe": NETWORKS["moe"],
    "lstm": NETWORKS["lstm"],
    "Llama 3 8B (example)": llama.factory,
}


@functools.cache
def captured(name: str) -> TrainingGraph:
    """The step of that name."""
    made = STEPS[name]()
    model, args = made.pop("model"), made.pop("args")
    return remat.capture(model, args, device=DEVICE, split="none", **made)
