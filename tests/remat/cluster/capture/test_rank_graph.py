"""The graph of one rank: its sizes, its collectives and their costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collective
from torch import Tensor, fx, nn
from torch.nn import functional

from remat.cluster.capture.model_chain import chain_of
from remat.cluster.capture.rank_graph import BORDER, behind_graph_on_rank, block_graph_on_rank
from remat.cluster.capture.tokens_over_ranks import HeadsOverRanks
from remat.cluster.capture.watching import watch
from remat.graph_capture.costs.cache import work_of
from remat.graph_capture.devices.known_devices import datasheet_links
from remat.graph_capture.distributed.collectives import FakeGroups, fake_ranks
from remat.graph_capture.distributed.ring_attention import ring_attention
from remat.graph_capture.distributed.sharding import is_ring
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph
from tests.remat.cluster.capture import chains

LINKS = datasheet_links("h100", 8)
SEQ, WIDTH, HEADS = 32, 64, 4


@pytest.fixture(scope="module")
def groups() -> Iterator[FakeGroups]:
    with fake_ranks() as made:
        yield made


def block(tp: int, cp: int, groups: FakeGroups) -> TrainingGraph:
    built = chains.small_llama(batch=2, seq=SEQ // cp)
    chain = chain_of(built["model"], built["args"], {}, built["loss_fn"], built["target"])
    graph, gradient = block_graph_on_rank(chain, watch(chain), 0, tp, cp, groups, "h100", LINKS)
    # Of what the block reads, which comes behind its parameters.
    assert gradient == graph.outputs[-1]
    border = graph.value_by_name[graph.ops[0].outputs[0]]
    assert graph.value_by_name[gradient].size_bytes == border.size_bytes
    return graph


def collectives(graph: TrainingGraph) -> list[tuple[str, float]]:
    return [(op.target.split(".")[1], op.cost_us) for op in graph.ops if "c10d" in op.target]


def test_a_block_on_one_rank_has_no_collective(groups: FakeGroups) -> None:
    graph = block(1, 1, groups)
    assert collectives(graph) == []
    assert graph.ops[0].target == BORDER
    assert graph.value_by_name[graph.ops[0].outputs[0]].shape == (2, SEQ, WIDTH)
    assert graph.resident.total_bytes == 0


def test_two_gathers_and_two_scatters_each_way(groups: FakeGroups) -> None:
    """Sequence parallel: backward of a gather is a scatter, and the other way round."""
    graph = block(2, 1, groups)
    found = collectives(graph)
    assert sum("all_gather" in name for name, _ in found) == 4
    assert sum("reduce_scatter" in name for name, _ in found) == 4
    whole_bytes = 2 * SEQ * WIDTH * 2
    once = LINKS.us("all_gather", whole_bytes, 2)
    assert all(cost == pytest.approx(once, rel=0.01) for _, cost in found)
    assert all(not op.no_recompute for op in graph.ops if "c10d" in op.target)
    assert graph.value_by_name[graph.ops[0].outputs[0]].shape == (2, SEQ // 2, WIDTH)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_exchange_tokens_for_heads(cp: int, groups: FakeGroups) -> None:
    """Queries, keys, values and the result, each way."""
    graph = block(1, cp, groups)
    found = collectives(graph)
    assert [name for name, _ in found] == ["all_to_all_single"] * 8
    attention = next(v for v in graph.values if v.producer.startswith("_scaled_dot_product"))
    assert attention.shape == (2, HEADS // cp, SEQ, WIDTH // HEADS)


def test_more_ranks_than_heads_send_tokens_round_a_ring(groups: FakeGroups) -> None:
    """Of 8 ranks, 4 share the heads; what goes round goes on beside what is computed."""
    graph = block(1, 8, groups)
    assert [name for name, _ in collectives(graph)] == ["all_to_all_single"] * 8
    forward, backward = (op for op in graph.ops if is_ring(op.target))
    made = graph.value_by_name[forward.outputs[0]]
    assert made.shape == (2, 1, SEQ // 2, WIDTH // HEADS)
    round_bytes = 2 * made.size_bytes  # keys and values
    once = LINKS.us("send", round_bytes, 2)
    assert once <= forward.cost_us < backward.cost_us
    assert min(forward.workspace_bytes, backward.workspace_bytes) > 2 * round_bytes
    assert not forward.no_recompute


def test_a_ring_computes_half_of_causal_attention_on_each_rank(groups: FakeGroups) -> None:
    query = torch.empty(1, 2, 64, 16)
    given = query, query, query, True, None, 4, groups.group(4).group_name
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "qkv"]
    for node in inputs:
        node.meta["val"] = query
    node = graph.call_function(ring_attention._opoverload, (*inputs, *given[3:]))
    node.meta["val"] = query, query[..., 0]
    work = work_of(node)
    assert work.kind == "attention"
    assert work.flops == 4 * 2 * 64 * (4 * 64) * 16 // 2


def test_dropout_in_a_ring_is_refused(groups: FakeGroups) -> None:
    with HeadsOverRanks(groups.group(1), groups.group(2)):
        query = torch.ones(1, 1, 8, 4)
        with pytest.raises(CaptureError, match=r"set dropout of attention to 0, or plan with --cp"):
            functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1)


def test_products_take_a_share_of_the_time(groups: FakeGroups) -> None:
    def weights(graph: TrainingGraph) -> int:
        return sum(v.size_bytes for v in graph.values if v.kind == "parameter")

    assert weights(block(2, 1, groups)) < 0.6 * weights(block(1, 1, groups))


def test_behind_the_blocks_each_rank_has_a_part_of_the_vocabulary(groups: FakeGroups) -> None:
    built = chains.small_llama(batch=2, seq=SEQ)
    chain = chain_of(built["model"], built["args"], {}, built["loss_fn"], built["target"])
    shape = watch(chain)
    for tp in (1, 2):
        graph = behind_graph_on_rank(chain, shape, tp, groups, "h100", LINKS)
        shapes = [v.shape for v in graph.values]
        assert (2 * SEQ, 96 // tp) in shapes
        assert not any("embedding" in op.target for op in graph.ops)


def test_models_of_transformers_kind_are_planned_as_they_come(groups: FakeGroups) -> None:
    built = chains.generating(batch=2, seq=8)
    chain = chain_of(built["model"], built["args"], {}, None, None)
    shape = watch(chain)
    block_graph_on_rank(chain, shape, 0, 2, 1, groups, "h100", LINKS)
    graph = behind_graph_on_rank(chain, shape, 2, groups, "h100", LINKS)
    products = [op for op in graph.ops if op.target.startswith("aten.mm")]
    made = {graph.value_by_name[name].shape for op in products for name in op.outputs}
    assert (2 * 8, 32 // 2) in made
    losses = [op for op in graph.ops if "_log_softmax." in op.target]
    assert [graph.value_by_name[op.outputs[0]].shape for op in losses] == [(2 * 8, 32 // 2)]


class SumsByItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return collective.all_reduce(x, "sum", dist.group.WORLD)


def test_a_block_with_a_collective_of_its_own_is_refused(groups: FakeGroups) -> None:
    built = chains.small_llama(batch=2, seq=SEQ)
    for layer in built["model"].layers:
        layer.register_module("together", SumsByItself())
        layer.register_forward_hook(lambda module, _, result: module.together(result))
    chain = chain_of(built["model"], built["args"], {}, built["loss_fn"], built["target"])
    with pytest.raises(CaptureError, match=r"leave the collective all_reduce.* out of the model"):
        block_graph_on_rank(chain, watch(chain), 0, 1, 1, groups, "h100", LINKS)
