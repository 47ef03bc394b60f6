"""Every trait a training step can have: bit-equal to eager, with the peak as predicted."""

from __future__ import annotations

import functools
import itertools

import msgspec
import pytest
import torch
from torch import nn

from remat import solver
from remat.graph_capture import Trace, TrainingGraph, capture, measure_costs, trace
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.schedules.schedule import Compute, Free
from remat.schedules.simulate import simulate
from tests.models import MODELS, Case, make
from tests.rows import rows
from tests.steps import FORMED_OUTSIDE, RNG_SLACK_BYTES, schedule_of


@functools.cache
def captured(name: str) -> tuple[Case, Trace, TrainingGraph]:
    """The first to rewrite takes the trace, as one call does; the others trace again."""
    model, args, kwargs, loss_fn, target = case = make(name)
    traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target)
    return case, traced, measure_costs(traced)


QUICK = ("plain", "dropout", "batch_norm_in_place_relu", "tied_weights", "in_place_views")
"""Models that are planned by a search by default too; all are by schedules without one."""
PLANS = rows(
    itertools.product(MODELS, ("store_all", "chen_sqrt", "cut")),
    lambda plan: plan[1] == "chen_sqrt" or plan[0] in QUICK,
)


@pytest.mark.parametrize(("name", "kind"), PLANS)
def test_equal_to_eager_with_the_predicted_peak(name: str, kind: str) -> None:
    (model, args, kwargs, loss_fn, target), traced, graph = captured(name)
    schedule = schedule_of(graph, kind)
    module = rewrite(model, schedule, trace=traced)
    found = check(model, module, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    assert found.differences == ()
    assert found.equal
    assert found.gradients == found.gradients_total > 0
    predicted = simulate(graph, schedule).peak_bytes
    if name not in FORMED_OUTSIDE:
        assert found.plan_peak_bytes <= predicted
        assert predicted <= 1.01 * found.plan_peak_bytes + RNG_SLACK_BYTES


def test_dropout_is_drawn_again_from_the_saved_state() -> None:
    model, args, kwargs, loss_fn, target = make("dropout")
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    schedule = schedule_of(graph, "chen_sqrt")
    again = {op for op, count in schedule.computations().items() if count > 1}
    assert any(op.startswith("native_dropout") for op in again)
    code = rewrite(model, schedule).backward_module.code
    assert "run_with_rng_state(rng_state_native_dropout" in code


@pytest.mark.parametrize("name", ["transformer_layers", "batch_norm_in_place_relu", "dropout"])
@pytest.mark.filterwarnings("ignore:aten.*:UserWarning")
def test_equal_to_eager_under_autocast(name: str) -> None:
    model, args, kwargs, loss_fn, target = make(name)
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target)
        module = rewrite(model, schedule_of(measure_costs(traced), "chen_sqrt"), trace=traced)
        found = check(model, module, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    assert found.differences == ()


def test_statistics_that_forward_keeps_stay_its_own_where_a_norm_runs_again() -> None:
    """Kept, they are saved for backward and fill memory there, as the schedule says."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), torch.randn(32, 64)
    graph = capture(model, (x,), loss_fn=lambda y: y.square().mean())
    stored = solver.make_solver("store_all").schedule(graph)
    normed, *statistics = graph.ops[graph.op_index["native_layer_norm"]].outputs
    steps = list(stored.steps)
    steps.insert(steps.index(Compute("tangents")), Free(normed))
    steps.insert(steps.index(Compute("mm_1")), Compute("native_layer_norm"))
    schedule = msgspec.structs.replace(stored, steps=tuple(steps))
    module = rewrite(model, schedule, loss_fn=lambda y: y.square().mean())
    taken = {node.name for node in module.backward_module.graph.find_nodes(op="placeholder")}
    assert taken.issuperset(statistics)
    assert normed not in taken
    found = check(model, module, (x,), loss_fn=lambda y: y.square().mean(), steps=1)
    assert found.differences == ()
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes
