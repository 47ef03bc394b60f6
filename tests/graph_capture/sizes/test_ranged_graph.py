"""One capture over a range of sizes: its graphs, its guards, its refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, GraphError, SignatureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.ranged_graph import RangedGraph, structure_of
from remat.graph_capture.sizes.symbols import RangeError, Symbol, generic_sizes
from tests.rows import rows
from tests.sized_models import SIZED, resnet


def captured(name: str) -> RangedGraph:
    sized = SIZED[name]()
    batch = sized.batch(**sized.sizes[1])
    return remat.capture(sized.model, batch, dynamic=sized.dynamic, device="h100")


def sizes_of(graph: TrainingGraph) -> list[tuple[str, tuple[int, ...], int]]:
    """Dtype, shape and bytes of all values. Names differ where a trace has symbols."""
    return sorted((v.dtype, v.shape, v.size_bytes) for v in graph.values)


@pytest.mark.parametrize("name", rows(["experts", "lstm", "u_net"], lambda one: one == "experts"))
def test_at_a_size_it_is_the_graph_of_a_capture_at_that_size(name: str) -> None:
    sized, graph = SIZED[name](), captured(name)
    for sizes in sized.sizes[:3]:
        own = remat.capture(sized.model, sized.batch(**sizes), device="h100")
        at = graph.at(**sizes)
        assert structure_of(at) == structure_of(graph.top)
        assert [op.target for op in at.ops] == [op.target for op in own.ops]
        assert sizes_of(at) == sizes_of(own)
        assert at.inputs == own.inputs
        assert at.resident == own.resident
        assert at.time_us == pytest.approx(own.time_us, rel=0.1)


def test_it_is_kept_in_a_file_and_printed_with_its_sizes_as_expressions() -> None:
    graph = captured("experts")
    assert RangedGraph.from_json(graph.to_json()) == graph
    assert "tokens from 4 to 300" in repr(graph)
    assert "tokens·32·4 B" in str(graph)
    with pytest.raises(GraphError, match="schema version"):
        RangedGraph.from_json(
            msgspec.json.encode(msgspec.to_builtins(graph) | {"schema_version": 9})
        )
    with pytest.raises(GraphError, match="not a graph over a range of this release"):
        RangedGraph.from_json("{")


def test_a_size_out_of_the_range_is_refused() -> None:
    graph = captured("experts")
    for sizes in ({"tokens": 3}, {"tokens": 301}, {}, {"tokens": 8, "other": 2}):
        with pytest.raises(SignatureError, match="tokens"):
            graph.at(**sizes)


def test_a_range_in_which_an_op_chooses_is_refused_with_the_parts_that_hold() -> None:
    sized = resnet()
    dynamic = {name: {0: ("batch", 2, 40)} for name in ("x", "y")}
    with pytest.raises(RangeError, match="batch of 2 to 15 or 16 to 40") as refused:
        remat.capture(sized.model, sized.batch(batch=4), dynamic=dynamic, device="h100")
    assert "aten.convolution" in str(refused.value)
    assert "sized_models.py:" in str(refused.value)
    assert refused.value.parts == ((2, 15), (16, 40))


class Wide(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.how == "branch" and x.shape[1] > 30:
            y = y.relu()
        if self.how == "written":
            y = y.view(-1, 48, 8)
        if self.how == "values" and y.sum() > 0:
            y = y * 2
        if self.how == "int":
            y = y * float(x.shape[1])
        return y.sum()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("branch", r"the model's code .*test_ranged_graph.py:\d+.* chooses by seq > 30|seq <= 30"),
        ("written", r"sizes that the model hard-codes .*test_ranged_graph.py:\d+"),
        ("values", "depends on tensor data"),
    ],
)
def test_a_size_that_the_model_fixes_or_looks_at_is_refused_with_its_line(
    how: str, said: str
) -> None:
    with pytest.raises(CaptureError, match=said):
        remat.capture(Wide(how), (torch.randn(4, 48, 8),), dynamic={"x": {1: ("seq", 16, 100)}})


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"x": {1: ("seq", 1, 100)}}, "begin the range at 2"),
        ("x", "give sizes by argument and dimension"),
        ({"x": 3}, "give sizes by argument and dimension"),
        ({"x": {1: 5}}, "a name, "),
        ({"x": {"seq": ("seq", 2, 9)}}, "dimension 'seq'"),
        ({"x": {1: ("seq", 0, 100)}}, "begin the range at 2"),
        ({"x": {1: ("seq", 50, 50)}}, "not a range"),
        ({"x": {1: ("seq", 6, 50, 4)}}, "multiples of 4"),
        ({"x": {1: ("seq", 4.0, 50)}}, "whole numbers"),
        ({"x": {1: ("a b", 4, 50)}}, "a name, "),
        ({"x": {7: "seq"}}, "dimension 7"),
        ({"y": {1: "seq"}}, "name one of x.*not a tensor of the batch"),
        ({"x": {}}, "names no dimension"),
        ({"x": {0: ("n", 2, 5), 1: ("n", 2, 6)}}, "one range to a name"),
    ],
)
def test_what_dynamic_cannot_mean_is_refused(dynamic: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        remat.capture(Wide(""), (torch.randn(4, 48, 8),), dynamic=dynamic)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_range_of_a_rank_is_its_step_at_each_size(kind: Any) -> None:
    sized = SIZED["gpt"]()
    sharding = remat.Sharding(kind, 2, "blocks.*" if kind == "fsdp2" else "")
    sizes = {"batch": 3, "seq": 20}
    asked: dict[str, Any] = {"sharding": sharding, "device": "h100"}
    graph = remat.capture(sized.model, sized.batch(**sizes), dynamic=sized.dynamic, **asked)
    own = remat.capture(sized.model, sized.batch(**sizes), **asked)
    at = graph.at(**sizes)
    assert [op.target for op in at.ops] == [op.target for op in own.ops]
    assert ("remat.all_gather" in {op.target for op in at.ops}) is (kind == "fsdp2")
    assert sizes_of(at) == sizes_of(own)
    assert (at.resident, at.notes) == (own.resident, own.notes)
    communication = [op.workspace_bytes for op in own.ops if op.target.startswith("remat.")]
    assert [op.workspace_bytes for op in at.ops if op.target.startswith("remat.")] == communication


def test_sizes_to_trace_with_are_like_no_others() -> None:
    found = generic_sizes([Symbol("a", 2, 64), Symbol("b", 2, 64)], {11, 13, 7})
    assert len({*found.values(), 11, 13, 7}) == 5
    steps = generic_sizes([Symbol("side", 16, 64, 8)], {})["side"]
    assert steps % 8 == 0


def test_random_states_of_a_modelled_device_are_smaller_than_a_cpus() -> None:
    sized = SIZED["gpt"]()
    graph = remat.capture(
        sized.model, sized.batch(batch=2, seq=20), dynamic=sized.dynamic, device="h100"
    )
    assert min(extra for one in graph.points for extra in one.extra_bytes.values()) < -1
    alone = remat.capture(sized.model, sized.batch(batch=3, seq=129), device="h100", split="none")
    assert [value.size_bytes for value in graph.at(batch=3, seq=129).values] == [
        value.size_bytes for value in alone.values
    ]
