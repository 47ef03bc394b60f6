"""What is evicted around a value, against sets and paths followed by hand."""

from __future__ import annotations

import random

import pytest

from remat.solver.policies.eviction import EvictedClasses, EvictedReach, links
from remat.solver.problem import Problem
from tests.solver.graphs.random_graphs import random_graph


class NaiveClasses:
    """Sets of values; an eviction joins, a return takes the value out and splits nothing."""

    def __init__(self, problem: Problem) -> None:
        below, above = links(problem)
        self.beside = [{*low, *high} for low, high in zip(below, above, strict=True)]
        self.own_us = [problem.cost_us[op] for op in problem.producer]
        self.classes: list[set[int]] = []

    def add(self, v: int) -> None:
        near = [c for c in self.classes if c & self.beside[v]]
        self.classes = [c for c in self.classes if not c & self.beside[v]]
        self.classes.append({v}.union(*near))

    def remove(self, v: int) -> None:
        for members in self.classes:
            members.discard(v)

    def cost_us(self, v: int) -> float:
        touching = (c for c in self.classes if c & self.beside[v])
        return sum(self.own_us[u] for c in touching for u in c)


def class_of(classes: EvictedClasses, v: int) -> int:
    """A number of v's class, -1 where v is not evicted."""
    node = classes._node[v]  # pyright: ignore[reportPrivateUsage]
    return -1 if node < 0 else classes._find(node)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("seed", range(25))
def test_classes_equal_sets_joined_by_hand(seed: int) -> None:
    source = random.Random(seed)
    problem = Problem.of(random_graph(source, 14, 7))
    classes, naive = EvictedClasses(problem), NaiveClasses(problem)
    evicted: set[int] = set()
    for _ in range(60):
        v = source.randrange(problem.n_values)
        for books in (classes, naive):
            (books.remove if v in evicted else books.add)(v)
        evicted ^= {v}
        numbers = {u: class_of(classes, u) for u in range(problem.n_values)}
        assert {u for u, number in numbers.items() if number >= 0} == evicted
        for members in naive.classes:
            assert len({numbers[u] for u in members}) == (1 if members else 0)
        expected = [naive.cost_us(u) for u in range(problem.n_values)]
        assert classes.cost_us == pytest.approx(expected, abs=1e-9)


def reach_us(problem: Problem, evicted: set[int], v: int, ancestors_only: bool) -> float:
    """Cost of what evicted paths lead to, by repeating one step until nothing is new."""
    found: set[int] = set()
    for links_of in links(problem)[: 1 if ancestors_only else 2]:
        here = {v}
        while True:
            more = {u for w in here for u in links_of[w] if u in evicted} - here
            if not more:
                break
            here |= more
        found |= here - {v}
    return sum(problem.cost_us[problem.producer[u]] for u in found)


@pytest.mark.parametrize("ancestors_only", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_reach_equals_brute_force(seed: int, ancestors_only: bool) -> None:
    source = random.Random(seed)
    problem = Problem.of(random_graph(source, 14, 7))
    reach = EvictedReach(problem, ancestors_only=ancestors_only)
    evicted: set[int] = set()
    for _ in range(60):
        v = source.randrange(problem.n_values)
        (reach.remove if v in evicted else reach.add)(v)
        evicted ^= {v}
        live = [u for u in range(problem.n_values) if u not in evicted]
        bounds = reach.cost_us.copy()
        for u in live:
            expected = reach_us(problem, evicted, u, ancestors_only)
            if source.random() < 0.5:
                reach.refresh(u)
                assert reach.cost_us[u] == pytest.approx(expected)
            assert bounds[u] <= expected + 1e-9
