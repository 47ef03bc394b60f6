"""Ranks as threads of one process, with a store in memory: what each of them leaves with."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from remat.graph_capture.errors import AgreementError, BudgetError
from remat.ranks import collective_call
from remat.ranks.collective_call import CollectiveCall

Act = Callable[[CollectiveCall, int], Any]


class Plan(msgspec.Struct, frozen=True):
    n: int


class Group:
    """Stands for a process group on one rank."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> dist.Store:
        return self._store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.size())))
    monkeypatch.setattr(collective_call, "BEAT_S", 0.05)
    monkeypatch.setattr(collective_call, "SILENT_S", 2.0)
    monkeypatch.setattr(collective_call, "LINGER_S", 1.0)


def outcomes(act: Act, size: int = 3, timeout_s: float = 30) -> list[Any]:
    """What each rank returns or raises."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))

    def on(rank: int) -> Any:
        group: Any = Group(store, rank, size)
        try:
            with CollectiveCall(group, "this test") as ranks:
                return act(ranks, rank)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is the outcome
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on, range(size)))


def test_the_first_makes_the_plan() -> None:
    def act(ranks: CollectiveCall, rank: int) -> Any:
        ranks.require_same_step("equal")
        return ranks.from_first(lambda: Plan(10 + rank), Plan)

    assert outcomes(act) == [Plan(10)] * 3


def test_all_must_say_so() -> None:
    assert outcomes(lambda ranks, rank: ranks.all_agree("it", True)) == [True] * 3
    assert outcomes(lambda ranks, rank: ranks.all_agree("it", rank != 1)) == [False] * 3


def test_another_step_is_named_on_all() -> None:
    found = outcomes(lambda ranks, rank: ranks.require_same_step("b" if rank == 2 else "a"))
    assert all(isinstance(error, AgreementError) for error in found)
    assert all("captured on rank 2 is not that of rank 0" in str(error) for error in found)


def test_what_else_is_not_the_same_is_named_on_all() -> None:
    def act(ranks: CollectiveCall, rank: int) -> None:
        ranks.require_same_step("a", {"seed": "1", "optimizer": f"{rank > 0}", "batch": f"{rank}"})

    text = "give the same optimizer on all ranks: what rank 1, 2 has is not what rank 0 has"
    assert all(str(error).startswith(text) for error in outcomes(act))


def test_a_second_round_of_a_call_does_not_read_the_first() -> None:
    def act(ranks: CollectiveCall, rank: int) -> list[tuple[str, str]]:
        return [ranks.unlike({"plan": "a"}), ranks.unlike({"model": f"{rank // 2}"})]

    assert outcomes(act) == [[("", ""), ("model", "2")]] * 3


def test_many_texts_are_compared_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, gather = list[str](), CollectiveCall.gathered_texts

    def counted(ranks: CollectiveCall, name: str, mine: str) -> list[str]:
        rounds.append(name)
        return gather(ranks, name, mine)

    monkeypatch.setattr(CollectiveCall, "gathered_texts", counted)
    outcomes(lambda ranks, rank: ranks.require_same_step("a", {"seed": "1", "batch": "2"}))
    assert sorted(rounds) == ["alike/step"] * 3 + ["end"] * 3


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [KeyError("no"), KeyboardInterrupt(), SystemError("odd")])
def test_any_error_reaches_all(failing: int, error: BaseException) -> None:
    def act(ranks: CollectiveCall, rank: int) -> Any:
        if rank == failing:
            raise error
        return ranks.from_first(lambda: Plan(1), Plan)

    found = outcomes(act)
    assert found[failing] is error
    for other in (one for rank, one in enumerate(found) if rank != failing):
        assert isinstance(other, AgreementError)
        assert f"this test ended there with {type(error).__name__}" in str(other)
        assert "test_collective_call.py:" in str(other)


def test_an_error_of_ours_stays_what_it_is() -> None:
    def act(ranks: CollectiveCall, rank: int) -> Any:
        if rank == 1:
            raise BudgetError("too little")
        return ranks.all_agree("it", True)

    found = outcomes(act)
    assert [type(error) for error in found] == [BudgetError] * 3
    assert str(found[0]) == "too little (on rank 1)"


def test_an_error_after_the_last_point_reaches_all() -> None:
    def act(ranks: CollectiveCall, rank: int) -> Any:
        ranks.all_agree("it", True)
        if rank == 2:
            raise OSError("disk full")

    found = outcomes(act)
    assert isinstance(found[2], OSError)
    assert all("ended there with OSError: disk full" in str(error) for error in found[:2])


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    group: Any = Group(store, 0, 2)
    with (
        pytest.raises(
            AgreementError, match=r"call this test on all ranks .* rank 1 has not called it"
        ),
        CollectiveCall(group, "this test") as ranks,
    ):
        ranks.require_same_step("a")


@pytest.mark.slow
def test_who_has_gone_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_call, "SILENT_S", 0.5)

    def act(ranks: CollectiveCall, rank: int) -> Any:
        if rank == 1:
            assert ranks._messages is not None
            ranks._messages.close()  # as if its process had ended
            time.sleep(2.5)
        return ranks.require_same_step("a")

    found = outcomes(act, size=2)
    assert "last output of rank 1, and start all ranks again: it has not been heard of" in str(
        found[0]
    )


@pytest.mark.slow
def test_a_long_solve_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_call, "SILENT_S", 1.0)

    def slow() -> Plan:
        time.sleep(2)
        return Plan(3)

    assert (
        outcomes(lambda ranks, rank: ranks.from_first(slow, Plan), timeout_s=0.5) == [Plan(3)] * 3
    )


def test_without_a_group_nothing_is_exchanged() -> None:
    with CollectiveCall(None, "this test") as ranks:
        ranks.require_same_step("a")
        assert ranks.all_agree("it", False) is False
        assert ranks.from_first(lambda: Plan(1), Plan) == Plan(1)


@pytest.mark.parametrize(("timeout_s", "silent_s"), [(0.05, 0.15), (0.5, 0.5), (30, 2.0)])
def test_a_silent_rank_is_waited_for_no_longer_than_a_collective(
    timeout_s: float, silent_s: float
) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    group: Any = Group(store, 0, 2)
    messages = collective_call.RankMessages(group, "this test")
    assert messages.silent_s == pytest.approx(silent_s)
    messages.close()
