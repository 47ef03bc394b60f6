"""Settings of a whole step drawn at random: each trains as eager does, with the judged peak."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from remat.graph_capture.devices.memory_events import measure_regions
from remat.graph_capture.spill_files import HOST_FOLDER
from remat.schedules.schedule import Compute
from remat.whole_step.on_this_device import StepHere
from remat.whole_step.planned_step import PlannedStep, StepTask, planned_step
from remat.whole_step.step_config import Pass, StepConfig, full_recompute
from remat.whole_step.step_planning import StepRequest
from tests.remat.whole_step.loops import Training, chain, gpt, same

COUNT, STEPS, AMPLE_BYTES = 3, 3, 1 << 24


@functools.cache
def captured(name: str, folder: str, count: int = COUNT) -> tuple[Training, StepHere]:
    training = {"chain": chain, "gpt": gpt}[name](count, STEPS + 1)
    args, target = training.calls[0]
    request = StepRequest(
        "cpu", count, "adamw", AMPLE_BYTES, "64MiB", f"{folder}:64MiB", "parameter", is_run=True
    )
    found = StepHere(
        training.model, args, None, request, training.optimizer, loss_fn=training.loss_fn,
        target=target,
    )  # fmt: skip
    return training, found


def drawn(task: StepTask, seed: int) -> StepConfig:
    """Any config whose bits are eager's."""
    draw, microbatch = random.Random(seed), task.microbatch
    sizes = [1] * COUNT if microbatch.draws else draw.choice([[1, 1, 1], [3], [1, 2], [2, 1]])
    passes = tuple(
        Pass(
            size,
            tuple(draw.randrange(len(layer.options)) for layer in microbatch.layers),
            draw.randrange(len(microbatch.layers)),
        )
        for size in sizes
    )
    groups = range(len(microbatch.groups))
    return task.feasible(
        StepConfig(
            passes,
            tuple(draw.choice(("device", "host", "nvme")) for _ in groups),
            kept_gradients=tuple(at for at in groups if draw.random() < 0.3),
            keeping=draw.choice(("stream", "near", "stay")),
            window=draw.choice((0, 0, 2)),
            prefetch=draw.random() < 0.7,
            slots=draw.choice((1, 2, 3)),
        )
    )


def tightest(task: StepTask, config: StepConfig) -> PlannedStep:
    """The config at the least budget that it fits, where all copies are crowded."""
    found: Any = planned_step(task.with_rooms({"device": 1}), config, "drawn")
    found = planned_step(task.with_rooms({"device": found.need_bytes}), config, "drawn")
    assert isinstance(found, PlannedStep)
    return found


@pytest.mark.parametrize("name", ["chain", "gpt"])
@pytest.mark.parametrize("seed", range(4))
def test_a_setting_trains_as_in_eager(
    name: str, seed: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path_factory.getbasetemp()))
    training, here = captured(name, str(tmp_path_factory.getbasetemp()))
    config = drawn(here.task, seed)
    planned = tightest(here.task, config) if seed % 2 else planned_step(here.task, config, "")
    assert isinstance(planned, PlannedStep)
    step, other = here.ready(planned), training.twin()
    assert step.simulation.peak_bytes <= planned.simulation.peak_bytes
    torch.manual_seed(seed)
    losses = other.eager(0, STEPS)
    torch.manual_seed(seed)
    found = training.whole(step, 0, STEPS - 1)
    measured = measure_regions([lambda: found.extend(training.whole(step, STEPS - 1, 1))])[0]
    assert all(map(torch.equal, found, losses))
    assert same(training, other)
    assert measured.peak_bytes == step.simulation.peak_bytes - step.resting_bytes
    step.close()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_layers_that_take_all_microbatches_before_the_next_layer(
    count: int, tier: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    monkeypatch.setenv(HOST_FOLDER, folder)
    training, here = captured("chain", folder, count)
    options = full_recompute(here.task.microbatch)
    states = (tier,) * len(here.task.microbatch.groups)
    config = here.task.feasible(StepConfig((Pass(count, options, 3),), states, keeping="stream"))
    step, other = here.ready(tightest(here.task, config)), training.twin()
    runs = [one.op for one in step.schedule.steps if isinstance(one, Compute)]
    turns = [k for k, name in enumerate(runs) if name.startswith("tangents")]
    assert len(turns) == count
    first = {name.rpartition(".")[2] for name in runs[: turns[0]]}
    assert first == set(map(str, range(count)))
    losses = other.eager(0, STEPS)
    assert all(map(torch.equal, training.whole(step, 0, STEPS), losses))
    assert same(training, other)
    step.close()
