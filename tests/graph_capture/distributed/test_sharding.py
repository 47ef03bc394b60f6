"""What data parallelism adds to a graph: shards, gathers, reductions, buckets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

import remat
from remat.budgets import unmodified
from remat.graph_capture.distributed.sharded_step import (
    COPY_IN,
    GATHER,
    REDUCE,
    RESHARD,
    UNSHARD,
    local_step,
)
from remat.graph_capture.distributed.sharding import UNTIMED, Sharding, element_bytes
from remat.graph_capture.errors import CaptureError, DeviceError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import trace
from remat.schedules.derived import in_chunks, unchunked
from remat.schedules.schedule import ChunkedRegion
from tests.block_models import ROWS, WIDTH, Stack, Words, rows

BATCH_BYTES = 4 * ROWS * WIDTH


def parameters_bytes(model: Stack) -> int:
    return sum(4 * p.numel() for p in model.parameters())


def test_ddp_has_buckets_for_all_gradients() -> None:
    model = Stack()
    resident = trace(model, (rows(),), sharding=Sharding("ddp", 4)).graph.resident
    assert resident.parameters_bytes == parameters_bytes(model)
    assert resident.communication_bytes == parameters_bytes(model)
    assert resident.total_bytes == 2 * parameters_bytes(model) + BATCH_BYTES


def test_fsdp2_divides_what_lasts_and_rounds_the_first_dimension_up() -> None:
    model, sharding = Stack(), Sharding("fsdp2", 3)
    resident = trace(model, (rows(),), optimizer="adamw", accumulate=True, sharding=sharding)
    own = [4 * -(-p.shape[0] // 3) * p[0].numel() for p in model.parameters()]
    found = resident.graph.resident
    assert found.parameters_bytes == found.gradients_bytes == sum(own)
    assert found.optimizer_bytes == 2 * sum(own) + 4 * len(own)


def test_a_model_sharded_as_one_is_gathered_for_the_whole_step() -> None:
    model = Stack()
    graph = remat.capture(model, (rows(),), sharding=Sharding("fsdp2", 2))
    said = [op.target for op in graph.ops if op.cost_origin == "estimated"]
    assert said == [GATHER, UNSHARD, RESHARD, RESHARD, COPY_IN, REDUCE]
    assert [op.target for op in graph.ops[:2]] == [GATHER, UNSHARD]
    assert graph.ops[-1].target == REDUCE
    assert graph.value_by_name["unsharded_forward_"].size_bytes == parameters_bytes(model)
    assert "unsharded_forward_" in graph.ops[-3].inputs
    shards = graph.value_by_name[graph.ops[-1].outputs[0]]
    assert shards.size_bytes == parameters_bytes(model) // 2
    assert graph.notes == (UNTIMED,)


def test_blocks_are_gathered_for_forward_and_for_backward_and_reduced_after_it() -> None:
    model = Stack()
    graph = remat.capture(model, (rows(),), sharding=Sharding("fsdp2", 2, "layers.*"))
    said = [(op.target, op.module) for op in graph.ops if op.target in (GATHER, REDUCE)]
    blocks = [f"layers.{i}" for i in range(4)]
    forward = [(GATHER, block) for block in ("", *blocks)]
    last_to_first = [(t, block) for block in reversed(blocks[1:]) for t in (GATHER, REDUCE)]
    backward = [(GATHER, ""), *last_to_first, (REDUCE, "layers.0"), (REDUCE, "")]
    assert said == [*forward, *backward]
    outside = [model.scale, *model.first.parameters()]
    assert graph.value_by_name["unsharded_forward_"].size_bytes == sum(
        4 * p.numel() for p in outside
    )


def test_more_ranks_need_less_memory_each() -> None:
    def peak_bytes(ranks: int) -> int:
        sharding = Sharding("fsdp2", ranks, "layers.*")
        return unmodified(remat.capture(Stack(), (rows(),), sharding=sharding)).peak_bytes

    assert peak_bytes(2) > peak_bytes(8) > peak_bytes(64)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "zero"}, "unknown sharding 'zero': choose none, ddp, zero1, replicate or fsdp2"),
    ({"kind": "ddp", "world_size": 1}, "name the number of ranks.*sharding ddp over 1 rank"),
    ({"kind": "none"}, "choose a kind of sharding for 4 ranks: ddp, zero1, replicate or fsdp2"),
    (
        {"kind": "ddp", "blocks": "layers.*"},
        "leave out blocks, or choose fsdp2 or replicate: sharding ddp",
    ),
    ({"kind": "ddp", "replicas": 2}, "leave out replicas, or choose fsdp2: sharding ddp"),
    ({"kind": "replicate", "reshard_after_forward": False}, "leave out reshard_after_forward"),
    ({"bucket_views": True}, "leave out bucket_views, or choose ddp or zero1: sharding fsdp2"),
    ({"kind": "zero1", "param_dtype": "bfloat16"}, "leave out param_dtype, .*: sharding zero1"),
    ({"kind": "replicate", "cpu_offload": True}, "leave out cpu_offload, .*: sharding replicate"),
    ({"kind": "ddp", "states_over": 2}, "leave out states_over, .*: sharding ddp"),
    ({"replicas": 3}, "number of replicas that divides 4 ranks: 3 does not"),
    ({"replicas": 0}, "number of replicas that divides 4 ranks: 0 does not"),
    ({"replicas": 4}, "leave shard groups of one rank, so nothing is sharded"),
    ({"reshard_after_forward": 3}, "reshard_after_forward .* 4 ranks.*: 3 does not divide"),
    (
        {"replicas": 2, "reshard_after_forward": 4},
        "divides 2 ranks, .* 4 does not divide a shard group",
    ),
    ({"reshard_after_forward": 1}, r"or no \(False\) to keep .*: 1 does not divide"),
    ({"reshard_after_forward": 0}, "0 does not divide a shard group"),
    ({"param_dtype": "float32"}, "choose bfloat16 or float16 for param_dtype.* 'float32'"),
    ({"reduce_dtype": "int8"}, "choose float32, bfloat16 or float16 for reduce_dtype.* 'int8'"),
    (
        {"replicas": 2, "states_over": 3},
        "choose states_over as a multiple of 2 that divides 4 ranks: 3 is not",
    ),
    ({"states_over": 2}, "choose states_over as a multiple of 4 that divides 4 ranks: 2 is not"),
    ({"kind": "zero1", "states_over": 3}, "choose states_over as .* 3 is not"),
]


@pytest.mark.parametrize(("asked", "text"), REFUSED)
def test_shardings_without_meaning_are_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(DeviceError, match=text):
        Sharding(**{"kind": "fsdp2", "world_size": 4, **asked})


def step_of(**asked: Any) -> TrainingGraph:
    """The step of one of four ranks."""
    found = {"kind": "fsdp2", "world_size": 4, "blocks": "layers.*", **asked}
    return remat.capture(Stack(), (rows(),), optimizer="adamw", sharding=Sharding(**found))


def test_on_one_rank_fully_shard_copies_but_gathers_nothing() -> None:
    values = step_of(world_size=1).value_by_name
    assert values["gathered_forward_layers.0"].size_bytes == 0
    copied = values["unsharded_forward_layers.0"].size_bytes
    assert values["reduced_layers.0"].size_bytes >= copied > 0
    assert values["gradient_shards_layers.0"].size_bytes >= copied


def targets(graph: TrainingGraph, module: str) -> list[str]:
    return [op.target for op in graph.ops if op.cost_origin == "estimated" and op.module == module]


def test_parameters_that_are_kept_are_gathered_once() -> None:
    kept = step_of(reshard_after_forward=False)
    assert targets(kept, "layers.2") == [GATHER, UNSHARD, RESHARD, COPY_IN, REDUCE]
    freed = next(op for op in kept.ops if op.name == "reshard_backward_layers.2")
    assert freed.inputs[0] == "unsharded_forward_layers.2"
    assert unmodified(kept).peak_bytes > unmodified(step_of()).peak_bytes


def test_a_part_is_kept_and_gathered_again() -> None:
    graph = step_of(reshard_after_forward=2)
    sizes = {value.name: value.size_bytes for value in graph.values}
    for path in ("", *(f"layers.{i}" for i in range(4))):
        assert sizes[f"part_{path}"] == sizes[f"gathered_backward_{path}"] // 2 > 0
    assert "part_layers.1" in graph.ops[graph.op_index["unshard_backward_layers.1"]].inputs


def test_the_root_is_resharded_only_where_it_is_asked_for() -> None:
    again = "all_gather_backward_"
    assert again not in step_of().op_index
    assert again in step_of(reshard_after_forward=True).op_index
    assert step_of(reshard_after_forward=4).ops == step_of(reshard_after_forward=True).ops


def test_replicas_of_a_shard_group_hold_the_same() -> None:
    two, four = step_of(replicas=2), step_of()
    assert two.resident.parameters_bytes == 2 * four.resident.parameters_bytes
    assert two.resident.optimizer_bytes > four.resident.optimizer_bytes
    finer = step_of(replicas=2, states_over=4)
    assert finer.resident.parameters_bytes == two.resident.parameters_bytes
    assert finer.resident.optimizer_bytes == four.resident.optimizer_bytes


def test_mixed_precision_gathers_half_and_reduces_whole() -> None:
    plain, mixed = step_of(), step_of(param_dtype="bfloat16", reduce_dtype="float32")
    sizes, halves = ({v.name: v.size_bytes for v in graph.values} for graph in (plain, mixed))
    for path in ("", "layers.1"):
        assert halves[f"gathered_forward_{path}"] == sizes[f"gathered_forward_{path}"] // 2
        assert halves[f"reduced_{path}"] == sizes[f"reduced_{path}"]
        assert halves[f"gradient_shards_{path}"] == sizes[f"gradient_shards_{path}"]
    assert mixed.resident.batch_bytes == plain.resident.batch_bytes * 3 // 2
    for held in ("parameters_bytes", "optimizer_bytes"):
        assert getattr(mixed.resident, held) == getattr(plain.resident, held)


def test_replicas_keep_what_they_reduce_in_another_dtype() -> None:
    graph = step_of(replicas=2, param_dtype="bfloat16")
    sizes = {value.name: value.size_bytes for value in graph.values}
    assert sizes["reduced_part_layers.1"] == sizes["gradient_shards_layers.1"] // 2
    assert "reduced_part_layers.1" in graph.outputs
    assert "reduced_part_layers.1" not in step_of(param_dtype="bfloat16").value_by_name


def test_a_device_holds_nothing_between_steps_that_is_offloaded() -> None:
    offloaded = Sharding("fsdp2", 4, "layers.*", cpu_offload=True)
    on_device = remat.capture(
        Stack(), (rows(),), optimizer="adamw", device="l4", sharding=offloaded
    )
    resident = on_device.resident
    assert resident.parameters_bytes == resident.optimizer_bytes == 0 < resident.batch_bytes
    assert not any(name.startswith("gradient_shards") for name in on_device.outputs)
    assert step_of(cpu_offload=True).resident == step_of().resident


def test_views_of_buckets_free_each_gradient() -> None:
    alone = step_of(kind="ddp", blocks="")
    views = step_of(kind="ddp", blocks="", bucket_views=True)
    assert views.resident == alone.resident
    assert sum(op.target == COPY_IN for op in views.ops) > 10
    assert unmodified(views).peak_bytes < unmodified(alone).peak_bytes


def test_zero1_counts_the_rank_that_holds_most() -> None:
    def states_bytes(**asked: Any) -> int:
        return step_of(blocks="", **asked).resident.optimizer_bytes

    every = states_bytes(kind="ddp")
    one, half = states_bytes(kind="zero1"), states_bytes(kind="zero1", states_over=2)
    assert every / 4 <= one < every / 3
    assert every / 2 <= half < every / 1.9


def test_replicate_holds_a_copy_for_the_step() -> None:
    graph = step_of(kind="replicate")
    assert targets(graph, "layers.2") == [UNSHARD, RESHARD, COPY_IN, REDUCE]
    copied = sum(v.size_bytes for v in graph.values if v.name.startswith("unsharded_forward"))
    assert copied == graph.resident.parameters_bytes


def test_blocks_that_are_not_there_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"pattern 'h\.\*' matches no module of a forward op"):
        remat.capture(Stack(), (rows(),), sharding=Sharding("fsdp2", 2, "h.*"))


def test_sizes_of_elements() -> None:
    names = ("float32", "bfloat16", "bool", "float8_e4m3fn", "complex64", "int64")
    assert [element_bytes(name) for name in names] == [4, 2, 1, 1, 8, 8]


def test_gradients_that_are_summed_before_they_are_reduced_are_held_whole() -> None:
    model = Stack()
    asked: dict[str, Any] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    for sharding, size in (
        (Sharding("fsdp2", 2, gradient_sync=False), 4),
        (Sharding("fsdp2", 2, gradient_sync=False, **asked), 4),
        (Sharding("fsdp2", 2, gradient_sync=False, param_dtype="bfloat16"), 2),
        (Sharding("ddp", 2, gradient_sync=False, bucket_views=True), 4),
    ):
        resident = trace(model, (rows(),), sharding=sharding).graph.resident
        assert resident.gradients_bytes == parameters_bytes(model) // 4 * size


def test_summed_gradients_are_in_no_output_of_the_step() -> None:
    asked = {"blocks": "layers.*", "gradient_sync": False}
    graph = step_of(**asked)
    made = {v.name for v in graph.values if v.kind == "gradient"}
    assert not made & {*graph.outputs}
    assert "remat.reduce_scatter" in targets(graph, "layers.0")


def test_a_head_in_chunks_runs_while_the_buffers_of_its_step_are_there() -> None:
    """Forward's gathered buffer goes, and parameters go back to shards, once it has run."""
    words = torch.randint(4096, (ROWS,))
    asked: dict[str, Any] = {"sharding": Sharding("fsdp2", 2), "split": "exact"}
    graph = remat.capture(Words(), (rows(), words), **asked)
    region = next(one for one in graph.regions if one.kinds == ("head",))
    chosen = (ChunkedRegion(region.name, region.choices[0].chunks, exact=True),)
    ops = in_chunks(graph, chosen).ops
    # As where chunks are timed later, once whole ops turn out not to fit.
    alone = remat.capture(Words(), (rows(), words), split="exact")
    later = local_step(unchunked(alone), asked["sharding"])
    assert in_chunks(msgspec.structs.replace(later, regions=alone.regions), chosen).ops == ops
    forward, backward = (i for i, op in enumerate(ops) if op.target == RESHARD)
    ours = [i for i, op in enumerate(ops) if "linear_cross_entropy" in op.target]
    assert ours[0] < forward < ours[-1] < backward
    gradients = next(op for op in ops if op.target == COPY_IN).inputs
    assert set(gradients) <= set(ops[backward].inputs)
    assert next(op for op in ops if op.target == REDUCE).inputs[-1] == gradients[-1]
