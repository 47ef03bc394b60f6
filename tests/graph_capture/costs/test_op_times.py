"""Ops are timed in passes over all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count, repeat

import pytest

from remat.graph_capture.costs import op_times
from remat.graph_capture.costs.op_times import times_us
from remat.graph_capture.devices.meter import CpuMeter, Run

pytestmark = pytest.mark.usefixtures("clocked")


class Slowing(CpuMeter):
    """All that is timed in the slow passes takes ten times as long."""

    def __init__(self, *slow: int) -> None:
        super().__init__()
        self.of_pass, self.slow = 0, slow

    def median_us(self, run: Run, moved_bytes: int = 0) -> float:
        return (10.0 if self.of_pass in self.slow else 1.0) * float(run() or 0) + moved_bytes

    def next(self) -> None:
        self.of_pass += 1


def made(of_op: dict[str, float]) -> dict[str, Callable[[], Run]]:
    return {key: lambda us=us: lambda: us for key, us in of_op.items()}


def never(key: str, error: RuntimeError) -> None:
    raise AssertionError(key) from error


@pytest.mark.parametrize("slow", [(1,), (0, 1), (1, 2)])
def test_a_slow_while_of_the_machine_changes_no_cost(slow: tuple[int, ...]) -> None:
    meter = Slowing(*slow)
    costs = {"add": 3.0, "mm": 7.0}
    moved = dict.fromkeys(costs, 2)
    found = times_us(made(costs), moved, meter, never, between=meter.next)
    assert {key: one.cost_us for key, one in found.items()} == {"add": 5.0, "mm": 9.0}
    assert meter.of_pass == meter.passes


@pytest.mark.parametrize(
    ("slower", "away"),
    [
        (1.0, 0.0),  # of passes that agree one was undisturbed
        (2.0, 0.9),  # what is left is a median, perhaps of a busy pass
    ],
)
def test_times_that_do_not_agree_are_as_busy_as_the_busiest(
    slower: float, away: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass alone has the core; each takes `slower` times as long as the one before."""
    taken, busy = (1e6 * slower**at for at in count()), chain([0.0], repeat(0.9))
    monkeypatch.setattr(CpuMeter, "median_us", lambda *_: next(taken))
    monkeypatch.setattr(op_times.LoadAwareTimer, "away", property(lambda _: next(busy)))
    ops = made({"mm": 0.0})
    assert times_us(ops, {"mm": 0}, CpuMeter(), never)["mm"].away == away


def test_an_op_is_run_first_once_and_counted_in_each_pass() -> None:
    meter, first, done = CpuMeter(), list[str](), list[int]()
    ops = made({"add": 3.0, "mm": 7.0})
    times_us(
        ops, dict.fromkeys(ops, 0), meter, never,
        first=lambda key, _: first.append(key), after=done.append,
    )  # fmt: skip
    assert first == ["add", "mm"]
    assert done == list(range(1, 2 * meter.passes + 1))


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_op_that_fails_is_told_of_once_and_has_no_time(fails_at: int) -> None:
    failed, runs = list[str](), list[None]()

    def broken() -> Run:
        runs.append(None)
        if len(runs) > fails_at:
            raise RuntimeError("no")
        return lambda: None

    found = times_us(
        {"add": broken, "mm": lambda: lambda: None}, {"add": 0, "mm": 0}, CpuMeter(),
        lambda key, _: failed.append(key),
    )  # fmt: skip
    assert failed == ["add"]
    assert list(found) == ["mm"]
