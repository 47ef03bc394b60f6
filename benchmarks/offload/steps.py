"""The steps that are planned with copies: the examples of this repository, on GPUs of the table.

Nothing runs: the models are captured, with costs of their device. A captured graph is kept as
those of `benchmarks.graphs` are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

import remat
from benchmarks.graphs import cache_folder, sources_hash
from examples import gpt, llama, resnet, unet
from remat.graph_capture.devices.known_devices import modelled_device
from remat.graph_capture.files import read_contents, write_contents
from remat.graph_capture.graph import Link, Links, TrainingGraph

DEVICES = ("h100", "rtx4090")
LINK_SHARE = 0.8
"""Of what the maker states of a link, what large copies are taken to reach."""
LATENCY_US = 10.0
HOST_BYTES = 128 << 30
FILE = ".json"
GB_S = 1e3
"""Bytes a microsecond."""


def _gpt(layers: int = 15) -> dict[str, Any]:
    sizes = gpt.Sizes(
        layers=layers, width=1024, heads=16, seq=1024, batch=8, vocab=8192, dropout=0.0
    )  # fmt: skip
    with torch.device("meta"):
        model = gpt.GPT(sizes).to(torch.bfloat16)
    tokens = torch.zeros(sizes.batch, sizes.seq, dtype=torch.long)
    return {"model": model, "args": (tokens, tokens.clone())}


def _llama() -> dict[str, Any]:
    sizes = llama.Sizes(layers=4, seq=4096, vocab=8192)
    with torch.device("meta"):
        model = llama.Llama(sizes).to(torch.bfloat16)
    ids = torch.zeros(sizes.batch, sizes.seq, dtype=torch.long)
    return {"model": model, "args": (ids,), "loss_fn": llama.next_token_loss, "target": ids}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt15": _gpt,
    "llama4": _llama,
    "resnet": resnet.factory,
    "unet": unet.factory,
}
DEEP: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt17": partial(_gpt, 17),
    "gpt67": partial(_gpt, 67),
    "gpt167": partial(_gpt, 167),
}
"""Of 500, 2,000 and 5,000 ops, of which first plans are timed."""
NAMES = tuple(f"{model}-{device}" for model in MODELS for device in DEVICES)
DEEP_NAMES = tuple(f"{model}-{DEVICES[0]}" for model in DEEP)


def step(name: str) -> TrainingGraph:
    """The graph of that name, or in a file MODEL-DEVICE.json, with the links of its device."""
    if name.endswith(FILE):
        stem = Path(name).stem
        read = TrainingGraph.from_json(read_contents(Path(name)), name)
        return msgspec.structs.replace(read, name=stem, links=links_of(stem))
    model, _, device = name.partition("-")
    path = cache_folder() / f"offload-{name}-{sources_hash()[:16]}.json"
    if path.exists():
        return TrainingGraph.from_json(read_contents(path))
    graph = remat.capture(**(MODELS | DEEP)[model](), device=device)
    linked = msgspec.structs.replace(graph, name=name, links=links_of(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_contents(path, linked.to_json())
    return linked


def links_of(name: str) -> Links:
    """The links of MODEL-DEVICE.

    Raises
    ------
    DeviceError : the table has no such device.
    """
    return links(link_gb_s(name.partition("-")[2]))


def link_gb_s(device: str) -> float:
    """What copies to and from a device of the table are taken to reach."""
    return LINK_SHARE * modelled_device(device).link_gb_s


def links(gb_s: float) -> Links:
    """The same rate both ways, and no NVMe."""
    link = Link(gb_s * GB_S, LATENCY_US)
    return Links(link, link, HOST_BYTES, source=f"{gb_s:g} GB/s each way")
