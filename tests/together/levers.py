"""The levers by their letters: how each is asked for, and what shows that it took part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import remat
from remat.rewriter.user_module.ranged import RangedModule
from remat.schedules.schedule import Fetch, Offload, Schedule
from tests.sized_models import Block, Residual

WORDS, WIDTH, ROWS = 512, 32, 4
LENGTHS = (64, 48, 23)
SIDE, CHANNELS, LAYERS, POOLED = 32, 12, 4, 8


class Language(nn.Module):
    """A transformer with a head as large as its blocks; the loss, or the loss and the logits."""

    def __init__(self, *, returns_logits: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 4) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale, self.returns_logits = 1.5, returns_logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.words(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "logits": logits} if self.returns_logits else loss


class Convolutional(nn.Module):
    """Residual blocks with batch norm under a linear head, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(CHANNELS) for _ in range(LAYERS)])
        self.scale, side = 1.5, SIDE // POOLED
        self.head = nn.Linear(CHANNELS * side * side, 10)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = block(x)
        x = functional.avg_pool2d(x, POOLED)
        return functional.cross_entropy(self.head(x.flatten(1)), targets)


def batch(number: int, *, is_text: bool, length: int = LENGTHS[0]) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    if is_text:
        tokens = torch.randint(WORDS, (ROWS, length + 1), generator=made)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randn(ROWS, 3, SIDE, SIDE, generator=made)
    return images, torch.randint(10, (ROWS,), generator=made)


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})


def mesh_of(letters: str) -> Any:
    """Of all ranks; of two dimensions where another lever shares the ranks with tensor parallel."""
    n_ranks = dist.get_world_size()
    if "T" in letters and set("GZ") & set(letters):
        return init_device_mesh("cpu", (n_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("tp" if "T" in letters else "dp",))


@dataclasses.dataclass
class Trained:
    """What a combination made, and what was seen while it trained."""

    model: nn.Module
    fast: nn.Module
    modules: dict[str, str]  # of ops, where one schedule is of the whole step
    schedules: dict[str, tuple[Schedule, ...]]  # by block; "" for the whole step
    wrapped: Any = None
    arena: Any = None
    lengths: set[int] = dataclasses.field(default_factory=set[int])
    scales: set[float] = dataclasses.field(default_factory=set[float])
    held_back: int = 0
    left_out: str = ""
    in_chunks: bool = False
    left_gradients: bool = False

    def runs(self, path: str = "") -> list[int]:
        """How often each op below a module runs; for "", each op that no pin names."""
        found: list[int] = []
        for block, schedules in self.schedules.items():
            for op, n in (item for one in schedules for item in one.computations().items()):
                own = block or self.modules.get(op, "")
                if own.startswith(path) if path else not own.startswith((KEPT, AGAIN)):
                    found.append(n)
        return found

    def moves(self, kind: type[Any], to: str) -> bool:
        every = (one for schedules in self.schedules.values() for one in schedules)
        return any(isinstance(step, kind) and step.to == to for one in every for step in one.steps)


KEPT, AGAIN = "blocks.0", "blocks.1"


def _is_compiled(it: Trained) -> bool:
    kind: Any = type(it.fast)
    if isinstance(it.fast, RangedModule):  # of which each size has its own code
        return len(kind._remat_members.code._modules) == len(LENGTHS)
    return kind._remat_compiled_step.by_inductor


def _has_dtensors(it: Trained) -> bool:
    return any(type(p).__name__ == "DTensor" for p in it.fast.parameters())


def _pins_hold(it: Trained) -> bool:
    kept, again = it.runs(KEPT), it.runs(AGAIN)
    return bool(kept) and set(kept) == {1} and any(n > 1 for n in again)


def _optimizer(model: nn.Module) -> dict[str, Any]:
    return {"optimizer_in_backward": torch.optim.AdamW(model.parameters())}


_LENGTH = {1: ("length", 16, LENGTHS[0])}


class Lever(NamedTuple):
    """`options` are those of `remat.rematerialize` by which it is asked for."""

    name: str
    options: tuple[str, ...]
    given: Callable[[nn.Module], dict[str, Any]]
    took_part: Callable[[Trained], bool]


def _ranks(kind: Any) -> dict[str, Any]:
    n_ranks = max(2, dist.get_world_size())
    return {"sharding": remat.Sharding(kind, n_ranks), "group": dist.group.WORLD}


LEVERS: dict[str, Lever] = {
    "R": Lever("recomputation", (), lambda _: {}, lambda it: any(n > 1 for n in it.runs())),
    "H": Lever(
        "host memory", ("host",), lambda _: {"host": "1GiB"}, lambda it: it.moves(Fetch, "device")
    ),
    "N": Lever(
        "NVMe", ("host", "nvme"), lambda _: {"host": "256KiB", "nvme": "/tmp:512KiB"},
        lambda it: it.moves(Offload, "nvme"),
    ),
    "S": Lever(
        "head in chunks", ("split",), lambda _: {"split": "exact"},
        lambda it: it.in_chunks,
    ),
    "U": Lever(
        "updates in backward", ("optimizer_in_backward",), _optimizer,
        lambda it: not it.left_gradients,
    ),
    "A": Lever(
        "accumulation", ("accumulate",), lambda _: {"accumulate": True},
        lambda it: it.held_back > 0,
    ),
    "F": Lever(
        "numbers as inputs", ("float_inputs",), lambda _: {"float_inputs": ["scale"]},
        lambda it: len(it.scales) > 2,
    ),
    "D": Lever(
        "sizes", ("dynamic",), lambda _: {"dynamic": {"tokens": _LENGTH, "targets": _LENGTH}},
        lambda it: it.lengths == set(LENGTHS),
    ),
    "C": Lever("Inductor's code", ("compile",), lambda _: {"compile": True}, _is_compiled),
    "G": Lever(
        "DDP", ("sharding", "group"), lambda _: _ranks("ddp"),
        lambda it: type(it.wrapped).__name__ == "DistributedDataParallel",
    ),
    "Z": Lever(
        "FSDP2", ("blocks", "sharding", "group"),
        lambda _: {"blocks": "blocks.*", **_ranks("fsdp2")},
        lambda it: _has_dtensors(it) and len(it.schedules) == LAYERS,
    ),
    "T": Lever(
        "tensor parallel", ("group",), lambda _: {"group": dist.group.WORLD}, _has_dtensors
    ),
    "X": Lever("arena", ("use_arena",), lambda _: {}, lambda it: it.arena.counts.hits > 0),
    "P": Lever(
        "pins", ("keep", "recompute"), lambda _: {"keep": KEPT, "recompute": AGAIN}, _pins_hold
    ),
    "B": Lever(
        "partial outputs", ("outputs",), lambda _: {"outputs": ("loss",)},
        lambda it: "logits" in it.left_out,
    ),
}  # fmt: skip
RANKS = frozenset("GZT")
OF_TEXT = frozenset("SDFBTZ")
"""Levers for which the model is the language model; the other one serves the rest."""
EXCLUDED = {"GZ": "both share gradients out over the same ranks"}
"""Pairs that exclude each other by their nature, and why."""
