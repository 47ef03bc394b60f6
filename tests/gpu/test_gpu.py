"""On a CUDA device: bit-equal to eager, the peak and the time as predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import remat
from remat.graph_capture import TrainingGraph, capture
from remat.graph_capture.devices.cuda import PROBE
from remat.graph_capture.devices.placement import meter_of
from remat.job.factory import Loaded, load_model
from remat.rewriter.checking.check import Check, check
from remat.rewriter.rewriting import rewrite
from remat.schedules.simulate import simulate
from remat.solver import make_solver

PEAK_ERROR, TIME_ERROR = 0.02, 0.10
EXAMPLES = Path(__file__).parents[2] / "examples"
LARGE = {"WIDTH": "1024", "HEADS": "16", "SEQ": "512", "BATCH": "16", "VOCAB": "8192"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def loaded(name: str) -> Loaded:
    return load_model(f"{EXAMPLES / name}.py:factory").on("cuda")


def captured(model: Loaded) -> TrainingGraph:
    return capture(
        model.model, model.args, model.kwargs, loss_fn=model.loss_fn, target=model.target
    )


def ran(model: Loaded, graph: TrainingGraph, kind: str) -> tuple[int, Check]:
    """The predicted peak of the plan of a solver, and what its module did."""
    schedule = make_solver(kind).schedule(graph)
    module = rewrite(model.model, schedule)
    found = check(
        model.model, module, model.args, model.kwargs, loss_fn=model.loss_fn, target=model.target
    )
    return simulate(graph, schedule).peak_bytes, found


@pytest.mark.parametrize("kind", ["store_all", "chen_sqrt"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_a_plan_trains_as_eager_with_the_predicted_peak(name: str, kind: str) -> None:
    model = loaded(name)
    graph = captured(model)
    assert graph.device == "cuda:0"
    predicted_bytes, found = ran(model, graph, kind)
    assert found.differences == ()
    assert found.rng_equal
    assert abs(predicted_bytes / found.plan_peak_bytes - 1) <= PEAK_ERROR


def test_dropout_is_drawn_again_on_the_device() -> None:
    model = loaded("gpt")
    schedule = make_solver("chen_sqrt").schedule(captured(model))
    again = {op for op, count in schedule.computations().items() if count > 1}
    assert any("dropout" in op for op in again)
    assert "run_with_rng_state" in rewrite(model.model, schedule).code


def test_a_step_takes_the_sum_of_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in LARGE.items():
        monkeypatch.setenv(f"GPT_{key}", value)
    model = loaded("gpt")
    graph = captured(model)
    _, found = ran(model, graph, "store_all")
    assert abs(graph.time_us / found.plan_step_us - 1) <= TIME_ERROR


def test_a_budget_of_what_is_free_holds_everything() -> None:
    model = loaded("gpt")
    result = remat.solve(captured(model), "auto")
    assert result.overhead == pytest.approx(0.0, abs=1e-9)


def test_a_profile_names_the_device() -> None:
    model = loaded("resnet")
    batch = {"loss_fn": model.loss_fn, "target": model.target}
    profile = remat.profile(model.model, model.args, model.kwargs, **batch)
    assert (profile.device, profile.title) == ("cuda", torch.cuda.get_device_name())
    assert profile.versions["cuda"] == torch.version.cuda
    assert all(one.cost_us > 0 for one in profile.ops.values())


def test_what_libraries_keep_is_counted_once() -> None:
    meter = meter_of("cuda:0")
    kept_bytes = meter.library_bytes()
    assert kept_bytes >= 0
    x = torch.ones(PROBE, PROBE, device="cuda", requires_grad=True)
    found = meter.step_memory(lambda: (x @ x).sum().backward())
    assert found.peak_bytes < 8 * x.nbytes
