"""Whole steps from Python: planned for a device of the table, refused in one line elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from remat.graph_capture.errors import BudgetError, CaptureError, DeviceError, RematError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.whole_step.step_planning import StepPlan, StepRequest, plan_step, planned_from
from tests.links import with_links


def chain() -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(8))
    return nn.Sequential(*layers)


def planned(model: nn.Module, **changed: Any) -> StepPlan:
    asked: dict[str, Any] = {"budget": "1GiB", "host": None, "nvme": None, **changed}
    request = StepRequest("rtx4090", optimizer="adamw", state="parameter", **asked)
    plan = plan_step(
        model, (torch.zeros(8, 32),), None, request, loss_fn=nn.functional.mse_loss,
        target=torch.zeros(8, 32),
    )  # fmt: skip
    if plan.shortage:
        raise BudgetError(plan.shortage)
    return plan


def test_a_whole_step_is_planned_and_judged() -> None:
    model = chain()
    plan = planned(model, host="1GiB", microbatches=3)
    assert plan.simulation.peak_bytes <= 1 << 30
    assert plan.found.lower_bound_us <= plan.simulation.time_us
    # torch keeps two moments in the parameters' own type, and no master copy.
    state = sum(v.size_bytes for v in plan.graph.values if v.kind == "optimizer")
    assert state == 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert simulate(plan.graph, plan.schedule) == plan.simulation
    assert "3 microbatches in" in repr(plan)


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"microbatches": 0, "host": "1GiB"}, BudgetError,
         "give 1 or more microbatches: 0 leave nothing to train on"),
        ({"microbatches": 2}, BudgetError, "give host='120GiB' too"),
        ({"microbatches": 2, "host": "1GiB", "budget": "50%"}, BudgetError,
         "'50%' only makes sense without microbatches"),
        ({"microbatches": 2, "host": "ten"}, BudgetError, "host 'ten'"),
        ({"microbatches": 2, "host": "1GiB", "budget": "16KiB"}, BudgetError,
         r"give budget='[\d.]+KiB': no plan of this step fits 16.0 KiB on the device"),
        ({"microbatches": 2, "host": "1KiB", "budget": "150KiB"}, BudgetError,
         r"give host='[\d.]+KiB' or more room on NVMe: no plan of this step fits 1.0 KiB on the h"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(
    changed: dict[str, Any], kind: type[RematError], says: str
) -> None:
    with pytest.raises(kind, match=says) as refused:
        planned(chain(), **changed)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "rooms",
    [
        {"budget": "16KiB", "host": "1GiB"},
        {"budget": 123_457, "host": "1KiB"},
        {"budget": "16KiB", "host": 150_000, "nvme": "/mnt/nvme:1GiB"},
    ],
)
def test_the_rooms_that_a_refusal_names_are_enough(rooms: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"microbatches": 4}
    with pytest.raises(BudgetError) as refused:
        planned(chain(), **asked, **rooms)
    named = dict(re.findall(r"(budget|host)='(\S+)'", str(refused.value)))
    assert named
    assert planned(chain(), **asked, **rooms | named).found.plan is not None


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"name an optimizer, sgd.*'none' has no update to plan"):
        StepRequest("rtx4090", 2, "none", host="1GiB")


def test_a_cpu_runs_whole_steps_in_python_alone() -> None:
    says = "name a device of the table .*run on a CPU with remat.rematerialize"
    with pytest.raises(DeviceError, match=says):
        StepRequest("cpu", 2, "adamw", host="1GiB")
    with pytest.raises(
        DeviceError,
        match=r"(?s)not cuda:0: .*\nOr train here without microbatches=",
    ):
        StepRequest("cuda:0", 2, "adamw", host="1GiB", is_run=True)


def test_nvme_without_a_rate_or_a_rate_without_nvme_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"give nvme=.*5 GB/s is the rate of NVMe"):
        StepRequest("rtx4090", 2, "adamw", host="1GiB", nvme_gb_s=5.0)
    with pytest.raises(BudgetError, match="and a rate above 0"):
        StepRequest("rtx4090", 2, "adamw", host="1GiB", nvme="/mnt/nvme:1GiB", nvme_gb_s=0.0)


def test_a_graph_without_links_is_refused() -> None:
    graph = TrainingGraph("Empty", (), ())
    asked = StepRequest("rtx4090", 2, "adamw", host="1GiB")
    with pytest.raises(BudgetError, match="the graph of Empty has no links to a host"):
        planned_from(graph, asked)
    assert with_links(graph).links is not None


def test_the_rate_that_is_asked_for_is_that_of_the_plan() -> None:
    asked = StepRequest("rtx4090", 2, "adamw", host="1GiB", nvme="/mnt/nvme:1GiB", nvme_gb_s=5.0)
    found = asked.links(with_links(TrainingGraph("Empty", (), ())).links)  # type: ignore[arg-type]
    assert found.write is not None
    assert found.read is not None
    assert found.write.bytes_per_us == found.read.bytes_per_us == 5e3
    assert found.source.endswith("NVMe 5 GB/s as asked for")
