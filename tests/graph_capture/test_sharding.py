"""What data parallelism adds to a graph: shards, gathers, reductions, buckets."""

from __future__ import annotations

import pytest

import remat
from remat.budgets import unmodified
from remat.graph_capture.derived.one_rank import COPY_IN, GATHER, REDUCE, RESHARD, UNSHARD
from remat.graph_capture.derived.sharding import UNTIMED, Sharding, element_bytes
from remat.graph_capture.errors import CaptureError, DeviceError
from remat.graph_capture.tracing.trace import trace
from tests.block_models import ROWS, WIDTH, Stack, rows

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
    said = [op.target for op in graph.ops if op.price == "estimated"]
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


@pytest.mark.parametrize(
    ("kind", "ranks", "blocks", "text"),
    [
        ("zero", 2, "", "unknown sharding 'zero': choose none, ddp or fsdp2"),
        ("ddp", 1, "", "sharding ddp over 1 rank: name the number of ranks"),
        ("none", 4, "", "4 ranks and no sharding: choose ddp or fsdp2"),
        ("ddp", 2, "layers.*", "sharding ddp has no blocks"),
    ],
)
def test_shardings_without_meaning_are_refused(
    kind: str, ranks: int, blocks: str, text: str
) -> None:
    with pytest.raises(DeviceError, match=text):
        Sharding(kind, ranks, blocks)  # type: ignore[arg-type]


def test_blocks_that_are_not_there_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"pattern 'h\.\*' matches no module of a forward op"):
        remat.capture(Stack(), (rows(),), sharding=Sharding("fsdp2", 2, "h.*"))


def test_sizes_of_elements() -> None:
    names = ("float32", "bfloat16", "bool", "float8_e4m3fn", "complex64", "int64")
    assert [element_bytes(name) for name in names] == [4, 2, 1, 1, 8, 8]
