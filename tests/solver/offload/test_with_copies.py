"""Orders of copies down: which are possible, and that a better one is found."""

from __future__ import annotations

import functools
import itertools
import random

from remat.graph_capture.graph import Link, Links, Op, TrainingGraph, Value
from remat.schedules.schedule import Offload
from remat.schedules.simulate import simulate
from remat.solver.offload.copy_placing import PlacedSchedule, order_of_making, place_copies
from remat.solver.offload.with_copies import in_better_order
from remat.solver.search import Search
from tests.links import with_links
from tests.solver.offload.hosted_cases import HostedCase, hosted_base, many_cases


@functools.cache
def cases() -> list[HostedCase]:
    return many_cases(150)


def placed_in(case: HostedCase, order: tuple[str, ...] = ()) -> PlacedSchedule | None:
    return place_copies(case.graph, case.base, case.budget_bytes, case.links, order=order)


def bettered(case: HostedCase, placed: PlacedSchedule) -> PlacedSchedule:
    search = Search(case.graph, case.budget_bytes, "a test")
    place = functools.partial(placed_in, case)
    return in_better_order(search, placed, order_of_making(case.base), place)


def late_but_urgent() -> HostedCase:
    """`small` has room to stay in, `big` is made later and must be gone when `wide` runs at 80 us.

    The link is busy with `first` until 50 us. With `small` next, `big` is down at 90 us.
    """
    forward = {"first": 40, "small": 10, "big": 30, "gap": 1, "wide": 60}
    backward = {"b": ("wide",), "c": ("b",), "d": ("c", "big"), "e": ("d", "small"),
                "f": ("e", "first")}  # fmt: skip
    took_us = {"gap": 50.0, "c": 100.0}
    ops = [Op(name, "t", "forward", (), (name,), took_us.get(name, 10.0)) for name in forward]
    ops += [
        Op(name, "t", "backward", reads, (name,), took_us.get(name, 10.0))
        for name, reads in backward.items()
    ]
    values = tuple(Value(op.name, forward.get(op.name, 1), op.name) for op in ops)
    links = Links(Link(1.0), Link(1.0), 1 << 40)
    graph = with_links(TrainingGraph("late", tuple(ops), values, outputs=("f",)), links)
    base = hosted_base(graph, links, {0, 1, 2}, 64)
    assert base is not None
    return HostedCase(graph, links, base, 85)


def test_what_must_leave_first_goes_down_first() -> None:
    case = late_but_urgent()
    placed = placed_in(case)
    assert placed is not None
    assert placed.found.time_us == case.graph.time_us + 10.0
    better = bettered(case, placed)
    assert better.found.time_us == case.graph.time_us
    down = [step.value for step in better.schedule.steps if isinstance(step, Offload)]
    assert down == ["first", "big", "small"]


def test_any_order_is_kept_to_or_refused() -> None:
    source, others = random.Random(0), 0
    for case in cases():
        order = list(order_of_making(case.base))
        source.shuffle(order)
        placed = placed_in(case, tuple(order))
        if placed is None:
            continue
        assert placed.found == simulate(case.graph, placed.schedule)
        assert placed.found.peak_bytes <= case.budget_bytes
        down = [step.value for step in placed.schedule.steps if isinstance(step, Offload)]
        assert down == [name for name in order if name in down]
        others += len(down) > 1
    assert others > 20


def test_the_best_of_all_orders_is_nearly_always_found() -> None:
    stalled = found_best = bettered_ones = 0
    for case in cases():
        order = order_of_making(case.base)
        placed = placed_in(case)
        assert placed is not None
        if not placed.found.stalls or len(order) > 4:
            continue
        all_of_them = [placed_in(case, one) for one in itertools.permutations(order)]
        best_us = min(one.found.time_us for one in all_of_them if one is not None)
        better = bettered(case, placed)
        assert best_us <= better.found.time_us <= placed.found.time_us
        assert better.found == simulate(case.graph, better.schedule)
        assert better.found.peak_bytes <= case.budget_bytes
        stalled += 1
        bettered_ones += better.found.time_us < placed.found.time_us
        found_best += better.found.time_us <= best_us * (1 + 1e-9)
    assert bettered_ones >= 3
    assert found_best >= 0.85 * stalled > 30
