"""What is said of attention and of kinds of ops, on traced and on hand-made graphs."""

from __future__ import annotations

import functools

import msgspec
import pytest

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.outcome import Attention
from remat.solver import Result, solve_within
from remat.solver.recompute_summary import attention_outputs, kinds_of, kinds_text
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.graphs.traced_gpt import ATTENTION, LAYERS, graph_of_modules, traced_gpt

FUSED = "aten._scaled_dot_product_flash_attention.default"
GELU = "aten.gelu.default"


def blocks(layers: int, seq: int) -> TrainingGraph:
    """Attention and a perceptron by turns; attention costs seq², all else seq; equal sizes."""
    kinds = [(FUSED, seq * seq / 64), ("aten.mm.default", seq), (GELU, seq / 8)] * layers
    ops = [
        Op(f"f{i}", target, "forward", (f"f{i - 1}",) if i else (), (f"f{i}",), float(cost_us))
        for i, (target, cost_us) in enumerate(kinds)
    ]
    for i in reversed(range(len(kinds))):
        reads = (f"f{i}", f"b{i + 1}") if i + 1 < len(kinds) else (f"f{i}",)
        ops.append(Op(f"b{i}", "t", "backward", reads, (f"b{i}",), 2.0 * seq))
    values = [Value(op.name, seq, op.name) for op in ops]
    return TrainingGraph("blocks", tuple(ops), tuple(values), outputs=("b0",))


@functools.cache
def solved(seq: int, percent: int, solver: str = "auto") -> Result:
    graph = blocks(8, seq)
    return solve_within(graph, peak_bytes_of(graph) * percent // 100, solver, time_limit_s=AMPLE_S)


@pytest.mark.parametrize("order", ["fixed", "free"])
def test_long_sequences_keep_attention_and_the_result_says_so(order: str) -> None:
    graph = blocks(8, 8192)
    budget_bytes = peak_bytes_of(graph) * 60 // 100
    result = solve_within(graph, budget_bytes, order=order, time_limit_s=AMPLE_S)
    assert result.overhead > 0
    assert result.attention == Attention(8, 0)
    assert str(result.attention) == "keeps all 8 attention outputs"
    assert "keeps all 8 attention outputs" in repr(result)


def test_short_sequences_do_not() -> None:
    result = solved(8, 40)
    assert result.attention is not None
    assert result.attention.recomputed > 0
    assert (
        str(result.attention) == f"recomputes {result.attention.recomputed} of 8 attention outputs"
    )


def test_nothing_is_said_where_nothing_runs_again_or_nothing_fits() -> None:
    assert solved(8192, 100).attention is None
    assert solved(8192, 1).attention is None
    chain = graph_of_modules("a", "a", "b", "b")
    again = solve_within(chain, peak_bytes_of(chain) - 1, "chen_sqrt")
    assert again.attention is None


def test_words_for_one_output() -> None:
    assert str(Attention(1, 0)) == "keeps 1 attention output"
    assert str(Attention(1, 1)) == "recomputes 1 of 1 attention output"


@pytest.mark.parametrize("attention", ATTENTION)
def test_attention_of_a_traced_gpt_is_counted(attention: str) -> None:
    graph = traced_gpt(attention)
    assert len(attention_outputs(graph)) == LAYERS
    kept = solve_within(graph, peak_bytes_of(graph) - 1, "keep_attention_output")
    assert kept.attention == Attention(LAYERS, 0)
    full = solve_within(graph, peak_bytes_of(graph) - 1, "full")
    assert full.attention == Attention(LAYERS, LAYERS)


def test_attention_that_backward_never_reads_does_not_count() -> None:
    graph = blocks(2, 64)
    unread = [
        msgspec.structs.replace(op, inputs=tuple(v for v in op.inputs if v != "f0"))
        if op.phase == "backward" else op
        for op in graph.ops
    ]  # fmt: skip
    assert attention_outputs(graph) == [0, 3]
    assert attention_outputs(msgspec.structs.replace(graph, ops=tuple(unread))) == [3]


def test_pins_count_in_the_graph_that_the_user_gave() -> None:
    graph = blocks(8, 8192)
    placed = msgspec.structs.replace(
        graph,
        ops=tuple(
            msgspec.structs.replace(op, module="attn" if op.target == FUSED else "mlp")
            for op in graph.ops
        ),
    )
    pinned = solve_within(placed, peak_bytes_of(placed), recompute=["attn"], time_limit_s=AMPLE_S)
    assert pinned.attention == Attention(8, 8)


def test_kinds_are_counted_dearest_first() -> None:
    result = solved(8192, 60)
    assert result.schedule is not None
    kinds = kinds_of(blocks(8, 8192), result.schedule)
    assert [kind.recomputed_us for kind in kinds] == sorted(
        (kind.recomputed_us for kind in kinds), reverse=True
    )
    counts = {kind.kind: (kind.ops, kind.recomputed) for kind in kinds}
    assert counts["_scaled_dot_product_flash_attention"] == (8, 0)
    assert counts["gelu"][0] == 8
    assert f"gelu {counts['gelu'][1]} of 8" in kinds_text(kinds)
    assert kinds_text(kinds, most=0) == f"{sum(kind.recomputed for kind in kinds)} others"
