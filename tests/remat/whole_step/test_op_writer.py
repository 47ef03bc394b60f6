"""Planned steps written out op by op: valid by `simulate`, and never above the plan of layers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from remat.graph_capture.devices.links import RankLinks
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Fetch
from remat.whole_step.layers import microbatch_of
from remat.whole_step.microbatch import ParameterUpdate, Ranks, Update
from remat.whole_step.op_writer import op_by_op
from remat.whole_step.planned_step import PlannedStep, StepTask, planned_step
from remat.whole_step.rank_share import in_shards
from remat.whole_step.step_config import Pass, StepConfig
from tests.graphs import UNLIMITED_BYTES
from tests.links import links
from tests.remat.whole_step.llama import captured, small_llama

COUNT = 3
BYTES = 2
"""Of one number of the model, which is in bfloat16."""


@pytest.fixture(scope="module")
def llama() -> TrainingGraph:
    return captured(**small_llama())


def task_of(graph: TrainingGraph, ranks: Ranks | None = None) -> StepTask:
    update = Update("adamw", "parameter", 60.0, 400.0)
    microbatch = microbatch_of(graph)
    if ranks is not None:
        microbatch = in_shards(ranks, microbatch, graph)
    return StepTask(microbatch, update, links(), UNLIMITED_BYTES, host_computes=False)


def updates_of(graph: TrainingGraph, task: StepTask) -> dict[str, ParameterUpdate]:
    ranks = task.microbatch.ranks

    def numbers(shape: tuple[int, ...]) -> int:
        return math.prod(shape) if ranks is None else ranks.shard_elements(shape)

    return {
        name: ParameterUpdate(2 * BYTES * numbers(graph.value_by_name[name].shape), 0)
        for group in task.microbatch.groups
        for name, gradient in group.gradient_of.items()
        if gradient
    }


def drawn(task: StepTask, draw: random.Random) -> StepConfig:
    passes = tuple(
        Pass(
            size,
            tuple(draw.randrange(len(layer.options)) for layer in task.microbatch.layers),
            draw.randrange(len(task.microbatch.layers)),
        )
        for size in draw.choice([[1, 1, 1], [3], [1, 2], [2, 1]])
    )
    groups = range(len(task.microbatch.groups))
    states: Any = tuple(draw.choice(("device", "host", "nvme")) for _ in groups)
    return task.feasible(
        StepConfig(
            passes, states, keeping=draw.choice(("stream", "near", "stay")),
            kept_gradients=tuple(at for at in groups if draw.random() < 0.3),
            slots=draw.choice((1, 2, 3)), prefetch=draw.random() < 0.7,
        )
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_setting_is_valid_op_by_op(llama: TrainingGraph, seed: int) -> None:
    task = task_of(llama)
    config = drawn(task, random.Random(seed))
    planned: Any = planned_step(task, config, "drawn")
    assert isinstance(planned, PlannedStep)
    found = op_by_op(llama, task, planned, updates_of(llama, task))  # the simulator refuses errors
    assert found.simulation.peak_bytes <= planned.simulation.peak_bytes
    assert found.simulation.host_peak_bytes <= planned.simulation.host_peak_bytes
    assert found.simulation.nvme_peak_bytes == planned.simulation.nvme_peak_bytes
    below = {v.name for v in found.graph.values if v.home not in (None, "device")}
    moved = {one.value for one in found.schedule.steps if isinstance(one, Fetch)}
    assert below <= moved


@pytest.mark.parametrize("keeps_whole", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_setting_of_a_rank_is_valid_op_by_op(
    llama: TrainingGraph, seed: int, keeps_whole: bool
) -> None:
    links_of_ranks = RankLinks(1.0, 1.0, 1.0, 1.0, 0.0, 1.0, "by hand")
    task = task_of(llama, Ranks(3, 3, links_of_ranks, keeps_whole=keeps_whole))
    planned: Any = planned_step(task, drawn(task, random.Random(seed)), "drawn")
    assert isinstance(planned, PlannedStep)
    found = op_by_op(llama, task, planned, updates_of(llama, task))
    assert found.simulation.peak_bytes <= planned.simulation.peak_bytes
    assert found.simulation.host_peak_bytes <= planned.simulation.host_peak_bytes
    runs = [one.op for one in found.schedule.steps if isinstance(one, Compute)]
    for name, gradient in found.parts.gradient_of.items():
        reduced = [run for run in runs if run.startswith(f"reduce:{name}.")]
        assert reduced == [f"reduce:{name}.{i}" for i in range(COUNT)]
        assert found.graph.value_by_name[f"{gradient}.0"].producer
        shard = found.graph.value_by_name[name].size_bytes
        assert shard == found.graph.value_by_name[f"G:{name}"].size_bytes
        assert 3 * shard >= found.graph.value_by_name[f"A:{name}"].size_bytes >= shard


def test_gradients_are_added_in_the_order_of_the_microbatches(llama: TrainingGraph) -> None:
    task = task_of(llama)
    for seed in range(4):
        planned: Any = planned_step(task, drawn(task, random.Random(seed)), "drawn")
        found = op_by_op(llama, task, planned, updates_of(llama, task))
        runs = [one.op for one in found.schedule.steps if isinstance(one, Compute)]
        for name in updates_of(llama, task):
            added = [run for run in runs if run.startswith(f"add:{name}.")]
            assert added == [f"add:{name}.{i}" for i in range(1, COUNT)]
            assert runs.index(f"update:{name}") > runs.index(added[-1])
