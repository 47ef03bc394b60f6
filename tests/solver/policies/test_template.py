"""Blocks from module paths, and attention cores from the names of ops."""

from __future__ import annotations

import pytest

from remat.solver.policies.template import module_blocks
from remat.solver.problem import Problem
from remat.solver.recompute_summary import NO_CORE, attention_cores
from tests.solver.graphs.traced_gpt import graph_of_modules


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["embed", "h.0.a", "h.0.mlp.0", "h.0.mlp.1", "h.1.a", "head"], [-1, 0, 0, 0, 1, -1]),
        (["m.layers.3.x", "m.layers.10", "m.layers.10.y"], [0, 1, 1]),
        (["0", "1.0.a", "1.1.a", "2"], [0, 1, 1, 2]),
        (["h.0.part.0", "h.0.part.1"], [0, 1]),
        (["down.0", "down.1", "mid", "up.0", "up.1"], [0, 1, -1, 2, 3]),
        (["", "h.0", "", "h.0.b", "", "h.1", "", "head", ""], [-1, 0, 0, 0, 0, 1, -1, -1, -1]),
        (["a", "", "b"], [-1, -1, -1]),
        (["h.0"], [-1]),
    ],
)
def test_blocks_are_entries_of_outermost_lists(modules: list[str], expected: list[int]) -> None:
    blocks = module_blocks(graph_of_modules(*modules))
    assert blocks.of_op == expected
    assert len(blocks.names) == max(expected) + 1
    assert blocks.rank[:1] in ([], [0])


def test_containers_count_their_own_blocks() -> None:
    blocks = module_blocks(graph_of_modules("down.0", "down.1", "up.0", "up.1"))
    assert blocks.names == ["down.0", "down.1", "up.0", "up.1"]
    assert blocks.container == [0, 0, 1, 1]
    assert blocks.rank == [0, 1, 0, 1]


def test_attention_needs_both_products() -> None:
    attention = ("bmm", "mul", "_softmax", "native_dropout", "clone", "bmm", "addmm")
    router = ("addmm", "_softmax", "mul", "bmm")
    for kinds, members in ((attention, {0, 1, 2, 3, 4, 5}), (router, set[int]())):
        targets = tuple(f"aten.{kind}.default" for kind in kinds)
        graph = graph_of_modules(*[""] * len(kinds), targets=targets)
        core = attention_cores(Problem.of(graph))
        assert {op for op, part in enumerate(core) if part != NO_CORE} == members
