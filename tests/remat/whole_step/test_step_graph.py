"""The graph of a whole step, and the rules for values with a home and ops on the host."""

from __future__ import annotations

import msgspec
import pytest

from remat.graph_capture.errors import GraphError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.whole_step.microbatch import Update
from remat.whole_step.step_graph import GroupPlace, optimizer_step
from tests.links import links
from tests.remat.whole_step.hand_steps import layered

UPDATE = Update("adamw", "float32", 0.14, 100.0)
ON_HOST, ON_DEVICE = GroupPlace("host", "host", "host"), GroupPlace("host", "nvme")


def whole(count: int, *places: GroupPlace) -> TrainingGraph:
    return optimizer_step(layered(2), UPDATE, ((0, 0),) * count, places, links())


def test_each_microbatch_has_its_ops_and_each_group_one_update() -> None:
    graph = whole(2, ON_DEVICE, ON_HOST)
    assert [op.name for op in graph.ops] == [
        "forward.0.0", "turn.1.0", "backward.0.0", "forward.0.1", "turn.1.1", "backward.0.1",
        "sum.1.1", "update.0", "update.1",
    ]  # fmt: skip
    values = graph.value_by_name
    assert {name: values[name].home for name in ("W.0", "O.0", "W.1", "O.1")} == {
        "W.0": "host", "O.0": "nvme", "W.1": "host", "O.1": "host",
    }  # fmt: skip
    assert values["O.0"].size_bytes == 600
    assert TrainingGraph.from_json(graph.to_json()) == graph


def test_gradients_are_added_in_place_on_the_device_or_on_the_host() -> None:
    ops = {op.name: op for op in whole(2, ON_DEVICE, ON_HOST).ops}
    first, second = ops["backward.0.0"], ops["backward.0.1"]
    assert "G.0" in first.outputs
    assert first.updates == ()
    assert second.updates == ("G.0",)
    assert "G.0" in second.inputs
    # The first releases its gradient; later ones hold a new one while they add it.
    assert second.workspace_bytes == first.workspace_bytes + 100
    assert ops["turn.1.1"].outputs[-1] == "G.1.1"
    assert ops["sum.1.1"].inputs == ("G.1", "G.1.1")
    assert ops["sum.1.1"].updates == ("G.1",)
    assert ops["update.0"].updates == ("O.0", "W.0")


def test_the_batch_is_resident_once_for_each_microbatch() -> None:
    microbatch = layered(2)
    resident = msgspec.structs.replace(microbatch.resident, batch_bytes=7, buffers_bytes=3)
    batched = msgspec.structs.replace(microbatch, resident=resident)
    step = optimizer_step(batched, UPDATE, ((0, 0),) * 3, (ON_HOST, ON_HOST), links())
    assert step.resident.total_bytes == 3 * 7 + 3


def test_a_shape_of_another_step_is_refused() -> None:
    with pytest.raises(GraphError, match="one microbatch or more"):
        whole(0, ON_HOST, ON_HOST)
    with pytest.raises(GraphError, match="the step has 2 layers and 2 groups"):
        whole(1, ON_HOST)


def test_only_what_is_there_before_the_step_has_a_home() -> None:
    values = (Value("a", 1, "op", home="host"),)
    with pytest.raises(GraphError, match="value a has a home on the host but is made by op op"):
        TrainingGraph("Bad", (Op("op", "t", "forward", (), ("a",)),), values)


@pytest.mark.parametrize("cost_us", [-1.0, float("nan"), float("inf")])
def test_a_cost_on_the_host_is_a_cost(cost_us: float) -> None:
    op = Op("op", "t", "update", (), (), host_cost_us=cost_us)
    with pytest.raises(GraphError, match="op op has a negative or undefined cost on the host"):
        TrainingGraph("Bad", (op,), ())


def test_an_op_updates_what_it_reads() -> None:
    op = Op("op", "t", "update", (), (), updates=("w",))
    with pytest.raises(GraphError, match="op op updates w but does not read it"):
        TrainingGraph("Bad", (op,), (Value("w", 1, home="host"),))
