"""Steps of round numbers for tests: layers, links and configs."""

from __future__ import annotations

import random

from remat.graph_capture.graph import Link, Links, Resident
from remat.whole_step.microbatch import Layer, LayerOption, Microbatch, Update, UpdateGroup
from remat.whole_step.planned_step import StepTask
from remat.whole_step.step_config import Pass, StepConfig

WEIGHT_BYTES, TRAINED, BETWEEN_BYTES = 100, 50, 10
"""Of each group, its numbers in two bytes each, and what goes from layer to layer."""
FORWARD_US, BACKWARD_US, AGAIN_US = 10.0, 20.0, 8.0
FREE = 1 << 60


def layered(n_layers: int, saved_bytes: int = 40) -> Microbatch:
    """Equal layers in a chain; the last one turns. Each saves all, or nothing for more time."""
    layers = []
    for at in range(n_layers):
        turns = at == n_layers - 1
        options = (LayerOption(0, 0.0, 0, 130),) if turns else (
            LayerOption(saved_bytes, 0.0, 5, 120), LayerOption(0, AGAIN_US, 5, 160)
        )  # fmt: skip
        reads = () if at == 0 else (f"x{at}",)
        back_makes = () if at == 0 else (f"d{at}",)
        makes, back_reads = ((), ()) if turns else ((f"x{at + 1}",), (f"d{at + 1}",))
        layers.append(
            Layer(
                f"layers.{at}", (at,), (at,), FORWARD_US, BACKWARD_US, reads, makes, back_reads,
                back_makes, options, turns,
            )
        )  # fmt: skip
    names = [f"{kind}{at}" for at in range(1, n_layers) for kind in "xd"]
    group = UpdateGroup("layers", TRAINED, WEIGHT_BYTES, WEIGHT_BYTES, item_bytes=2)
    return Microbatch(
        "Chain", tuple(layers), (group,) * n_layers, dict.fromkeys(names, BETWEEN_BYTES), (),
        Resident(), "rtx4090", ("ids: int64[1, 64] on cpu",), "modelled", draws=False,
    )  # fmt: skip


def task_of(
    microbatch: Microbatch, *, budget_bytes: int = FREE, host_bytes: int = FREE,
    bytes_per_us: float = 10.0, nvme_per_us: float = 0.0, host_gb_s: float = 0.14,
) -> StepTask:  # fmt: skip
    """A machine for it: 28 bytes a number are touched in an update, 10 us a group at 0.14 GB/s."""
    link = Link(bytes_per_us)
    drive = Link(nvme_per_us) if nvme_per_us else None
    links = Links(link, link, host_bytes, drive, drive, FREE if drive else 0)
    update = Update("adamw", "float32", host_gb_s, 100.0)
    return StepTask(microbatch, update, links, budget_bytes)


def random_config(seed: int, microbatch: Microbatch) -> StepConfig:
    """Any choice that a plan may make, with one to four microbatches."""
    rng = random.Random(seed)
    n = len(microbatch.layers)
    passes = tuple(
        Pass(
            rng.randint(1, 2),
            tuple(rng.randrange(len(layer.options)) for layer in microbatch.layers),
            rng.randrange(n),
        )
        for _ in range(rng.randint(1, 2))
    )
    return StepConfig(
        passes,
        tuple(rng.choice(("device", "host", "host", "nvme")) for _ in range(n)),
        sums=rng.choice(("device", "host")),
        kept_gradients=tuple(at for at in range(n) if rng.random() < 0.3),
        keeping=rng.choice(("stream", "near", "stay")),
        window=rng.choice((0, 0, 1, 2)),
        prefetch=rng.random() < 0.8,
        slots=rng.randint(1, 3),
        device_updates=rng.choice((0, 0, 1, 2)),
    )
