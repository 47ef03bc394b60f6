"""Rounds that do not count because the machine was slow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, cycle, repeat
from pathlib import Path

import pytest
from filelock import FileLock

from benchmarks.comparison import calm
from benchmarks.comparison.calm import MOST, MOST_TRIES, ROUNDS, TRIES, Timed
from benchmarks.comparison.turns import Turns


def _timed(bases_s: Iterable[float], fastest: Path) -> tuple[Timed, int]:
    """Rounds in which a second step takes twice the unmodified one's time; and how many."""
    left, taken = iter(bases_s), []

    def measure() -> list[float]:
        taken.append(next(left))
        return [taken[-1], 2 * taken[-1]]

    turns = Turns(fastest.with_name("turns"))
    return calm.timed_calmly(measure, turns, fastest), len(taken)


@pytest.mark.parametrize(
    ("known_s", "bases_s", "base_s", "rounds", "was_slow", "fastest_s"),
    [
        (1.0, repeat(1.07), 1.07, ROUNDS, False, 1.0),
        (1.0, repeat(0.9), 0.9, ROUNDS, False, 0.9),
        (1.0, chain(repeat(1.3, 5), repeat(1.02)), 1.02, 5 + ROUNDS, False, 1.0),
        (1.0, chain([1.0, 1.3] * 3, repeat(1.04)), 1.04, 10, False, 1.0),
        (1.0, chain(repeat(1.3, MOST + 2), repeat(1.02)), 1.02, MOST + 2 + ROUNDS, False, 1.0),
        (1.0, chain(repeat(1.3, 30), repeat(1.2)), 1.3, TRIES * MOST, True, 1.0),
        (1.0, chain(repeat(1.0, 4), repeat(1.3)), 1.3, TRIES * MOST, True, 1.0),
        (1.0, cycle([1.0, 1.3, 1.3]), 1.3, TRIES * MOST, True, 1.0),
        (None, repeat(1.0), 1.0, MOST, False, 1.0),
        (None, chain(repeat(1.3, 9), repeat(1.0)), 1.0, MOST + ROUNDS, False, 1.0),
        (None, chain(repeat(1.0, 9), repeat(1.3)), 1.0, MOST, False, 1.0),
    ],
)
def test_calm_rounds_count(
    known_s: float | None,
    bases_s: Iterable[float],
    base_s: float,
    rounds: int,
    was_slow: bool,
    fastest_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calm, "PAUSE_S", 0.0)
    fastest = tmp_path / "fastest_s"
    if known_s is not None:
        fastest.write_text(str(known_s))
    found, taken = _timed(bases_s, fastest)
    assert (found.step_s(0), taken, found.was_slow) == (base_s, rounds, was_slow)
    assert len(found.rounds_s) >= ROUNDS
    assert (found.ratio(1, 0), found.ratio(0, 1)) == (2.0, 0.5)
    assert float(fastest.read_text()) == fastest_s


def test_others_have_their_turn_between_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    turns, other = Turns(tmp_path / "turns"), FileLock(tmp_path / "turns", timeout=0)

    def asked(_: float) -> None:
        with other:
            seen.append(True)

    monkeypatch.setattr(time, "sleep", asked)
    (tmp_path / "fastest_s").write_text("0.5")
    assert calm.timed_calmly(lambda: [1.0], turns, tmp_path / "fastest_s").was_slow
    assert len(seen) == TRIES


def test_one_lucky_round_does_not_make_the_others_slow(tmp_path: Path) -> None:
    found, taken = _timed(chain([0.9], repeat(1.0)), tmp_path / "fastest_s")
    assert (found.step_s(0), taken, found.was_slow) == (1.0, MOST, False)


def test_short_steps_are_taken_as_they_are(tmp_path: Path) -> None:
    fastest = tmp_path / "fastest_s"
    fastest.write_text("0.001")
    found, taken = _timed(repeat(0.019), fastest)
    assert (found.step_s(0), taken, found.was_slow) == (0.019, ROUNDS, False)


def _compared(
    rounds: Iterable[list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Timed:
    """The second step's time against the third's; the unmodified one is known to take 1 s."""
    monkeypatch.setattr(calm, "PAUSE_S", 0.0)
    fastest, left = tmp_path / "fastest_s", iter(rounds)
    fastest.write_text("1.0")
    return calm.timed_calmly(lambda: next(left), Turns(tmp_path / "turns"), fastest, (1, 2))


def _tries(ratios: Iterable[float]) -> Iterable[list[float]]:
    """One for each ratio, in calm rounds."""
    return chain.from_iterable(repeat([1.0, ratio, 1.0], ROUNDS) for ratio in ratios)


@pytest.mark.parametrize(
    ("ratios", "tries", "found"),
    [
        ([1.05, 1.05], 2, 1.05),
        ([1.05, 1.04], 2, 1.045),
        ([1.12, 1.05, 1.05, 1.05, 1.05, 1.05], 6, 1.05),
        ([1.05, 1.08, 1.05, 1.06], 4, 1.055),
        (repeat(1.05), 2, 1.05),
    ],
)
def test_steps_are_compared_until_tries_agree(
    ratios: Iterable[float],
    tries: int,
    found: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = _compared(_tries(ratios), tmp_path, monkeypatch)
    assert len(timed.rounds_s) == tries * ROUNDS
    assert timed.ratio(1, 2) == pytest.approx(found)
    assert not timed.was_slow


def test_steps_are_not_compared_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = _compared(_tries(cycle([1.0, 1.1])), tmp_path, monkeypatch)
    assert len(timed.rounds_s) == MOST_TRIES * ROUNDS


def test_tries_that_agree_by_chance_do_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [[1.0, ratio, 1.0] for ratio in (0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)]
    timed = _compared(cycle(rounds), tmp_path, monkeypatch)
    assert len(timed.rounds_s) == MOST_TRIES * ROUNDS
    assert timed.ratio(1, 2) == 1.05


def test_all_rounds_count_where_they_tell_more_than_calm_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm_rounds = [[1.0, ratio, 1.0] for ratio in (0.9, 1.1, 1.2, 0.8, 1.0, 1.05, 0.95)]
    timed = _compared(chain(calm_rounds, repeat([1.3, 1.3, 1.3])), tmp_path, monkeypatch)
    assert timed.was_slow
    assert len(timed.rounds_s) == ROUNDS + (TRIES - 1) * MOST
