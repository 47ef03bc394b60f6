"""Layers of captured models: all that is in the graph, once, and a step with the graph's peak."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.whole_step.layers import microbatch_of
from remat.whole_step.microbatch import Update
from remat.whole_step.planned_step import PlannedStep, StepTask, planned_step
from remat.whole_step.step_config import Pass, StepConfig
from tests.graphs import UNLIMITED_BYTES
from tests.links import links
from tests.remat.whole_step.llama import captured, small_llama


@pytest.fixture(scope="module")
def llama() -> TrainingGraph:
    return captured(**small_llama())


def test_layers_are_the_modules_and_hold_all_of_the_graph(llama: TrainingGraph) -> None:
    found = microbatch_of(llama)
    names = [layer.name for layer in found.layers]
    assert names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm, head"]
    assert [layer.turns for layer in found.layers] == [False] * 4 + [True]
    assert found.least_us == pytest.approx(llama.time_us)
    assert found.n_tokens == 32
    assert not found.draws
    parameters = [v for v in llama.values if v.kind == "parameter"]
    assert sum(g.parameter_bytes for g in found.groups) == sum(v.size_bytes for v in parameters)
    numbers = 3 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 2 * 64 * 96 + 64
    assert sum(g.trained for g in found.groups) == numbers
    assert sum(g.gradient_bytes for g in found.groups) == sum(
        g.parameter_bytes for g in found.groups
    )


def test_equal_layers_have_equal_options_which_trade_bytes_for_time(llama: TrainingGraph) -> None:
    first, second, third = microbatch_of(llama).layers[1:4]
    assert first.options == second.options == third.options
    assert len(first.options) > 3
    assert first.options[0].extra_us == 0
    assert first.options[0].saved_bytes > 0
    assert min(option.saved_bytes for option in first.options) == 0


@pytest.mark.parametrize("option", [0, -1])
def test_a_step_of_one_microbatch_has_the_peak_of_its_graph(
    llama: TrainingGraph, option: int
) -> None:
    """All on the device: what a layer takes inside is its workspace, so the coarse graph knows it.

    It counts what a layer reads until the layer ends, so it may be above, and a little only.
    """
    found, assert_above = microbatch_of(llama), option == 0
    update = Update.on("rtx4090", "sgd", "parameter")
    task = StepTask(found, update, links(), UNLIMITED_BYTES)
    options = tuple(option % len(layer.options) for layer in found.layers)
    config = StepConfig((Pass(1, options),), ("device",) * len(found.groups))
    plan = planned_step(task, config, "test")
    assert isinstance(plan, PlannedStep)
    # A step updates each layer after its backward, and gradients go with that.
    gradients = {value.name for value in llama.values if value.kind == "gradient"}
    freeing = replace(llama, outputs=tuple(v for v in llama.outputs if v not in gradients))
    fine = solve_within(freeing, UNLIMITED_BYTES, "store_all")
    assert fine.schedule is not None
    fine_bytes = simulate(freeing, fine.schedule).peak_bytes
    if assert_above:
        assert fine_bytes <= plan.simulation.peak_bytes <= 1.2 * fine_bytes
    else:
        assert plan.simulation.peak_bytes < fine_bytes


def test_parameters_of_two_layers_are_a_group_of_their_own() -> None:
    made = small_llama()
    made["model"].head.weight = made["model"].embedding.weight
    found = microbatch_of(captured(**made))
    shared = [at for at, group in enumerate(found.groups) if " and " in group.name]
    assert [found.groups[at].name for at in shared] == ["embedding and norm, head"]
    assert [found.groups[at].trained for at in shared] == [64 * 96]
    # Backward ends in the embedding, which adds both terms of the gradient.
    assert [layer.name for layer in found.layers if shared[0] in layer.gives] == ["embedding"]
    assert [layer.name for layer in found.layers if shared[0] in layer.groups] == [
        "embedding", "norm, head",
    ]  # fmt: skip
    trained = sum(parameter.numel() for parameter in made["model"].parameters())
    assert sum(group.trained for group in found.groups) == trained


def test_a_model_without_layers_is_refused() -> None:
    graph = captured(
        nn.Linear(4, 4), (torch.zeros(2, 4),), nn.functional.mse_loss, torch.zeros(2, 4)
    )
    with pytest.raises(SolverError, match=r"^leave out .* repeat too seldom to be cut"):
        microbatch_of(graph)
