"""Tasks in threads of their own: results, errors, and interrupts while waiting."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remat.solver.backends import processes
from remat.solver.backends.processes import Task

LONG_S = 600.0
"""So long that a test that waits it out has failed."""


def _nothing() -> None:
    pass


class Noticed(threading.Event):
    """An event that tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()
        self.spells: list[float | None] = []
        self.at_spell: dict[int, Callable[[], None]] = {}

    def wait(self, timeout: float | None = None) -> bool:
        self.spells.append(timeout)
        self.waited_for.set()
        self.at_spell.get(len(self.spells), _nothing)()
        return super().wait(timeout)


class Held:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.is_over = False

    def __call__(self) -> str:
        assert self.let_go.wait(LONG_S)
        self.is_over = True
        return "over"


@pytest.fixture
def held() -> Iterator[Held]:
    work = Held()
    yield work
    work.let_go.set()


def watched(task: Task[Any]) -> Noticed:
    """The event by which `task`, still at work, will say that it has ended."""
    ended = Noticed()
    task._ended = ended
    return ended


def interrupted(task: Task[Any], ended: Noticed) -> None:
    """Wait for `task`; Ctrl-C comes once the wait has begun."""

    def interrupt() -> None:
        assert ended.waited_for.wait(LONG_S)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    task.wait()


def test_a_task_begins_at_once_and_gives_its_result() -> None:
    begun = threading.Event()

    def work() -> str:
        begun.set()
        return "done"

    task = Task(work)
    assert begun.wait(LONG_S)
    assert task.wait() == "done"
    assert task.wait() == "done"


def test_none_is_a_result() -> None:
    assert Task(lambda: None).wait() is None


def test_work_runs_beside_the_caller(held: Held) -> None:
    task = Task(held)
    assert not held.is_over
    held.let_go.set()
    assert task.wait() == "over"


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3)])
def test_what_work_raises_is_raised_to_who_waits(error: BaseException) -> None:
    def work() -> None:
        raise error

    stopped: list[int] = []
    with pytest.raises(type(error)) as caught:
        Task(work, lambda: stopped.append(1)).wait()
    assert caught.value is error
    assert not stopped


def test_an_interrupt_stops_the_work_and_waits_for_its_end(held: Held) -> None:
    task = Task(held, held.let_go.set)
    ended = watched(task)
    with pytest.raises(KeyboardInterrupt):
        interrupted(task, ended)
    assert held.is_over


def test_an_interrupt_leaves_work_behind_that_cannot_be_stopped(held: Held) -> None:
    task = Task(held)
    ended = watched(task)
    with pytest.raises(KeyboardInterrupt):
        interrupted(task, ended)
    assert not held.is_over
    assert not ended.is_set()


def test_work_that_heeds_no_stop_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    monkeypatch.setattr(processes, "STOPPING_S", 0.01)
    asked: list[int] = []
    task = Task(held, lambda: asked.append(1))
    ended = watched(task)
    with pytest.raises(KeyboardInterrupt):
        interrupted(task, ended)
    assert (asked, held.is_over) == ([1], False)
    assert ended.spells[-1] == 0.01


def test_waiting_is_in_short_spells_so_that_an_interrupt_is_heard(held: Held) -> None:
    """On some systems a wait without end hears no interrupt."""
    task = Task(held)
    ended = watched(task)
    ended.at_spell[3] = held.let_go.set
    assert task.wait() == "over"
    assert len(ended.spells) >= 3
    assert all(spell is not None and spell <= 0.5 for spell in ended.spells)


def test_the_thread_does_not_keep_the_interpreter(held: Held) -> None:
    before = set(threading.enumerate())
    task = Task(held)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    held.let_go.set()
    assert task.wait() == "over"


def test_an_error_in_its_block_stops_the_work(held: Held) -> None:
    with pytest.raises(ValueError, match="wrong"), Task(held, held.let_go.set):
        raise ValueError("wrong")
    assert held.is_over


def test_a_block_that_ends_well_stops_nothing(held: Held) -> None:
    with Task(held, held.let_go.set) as task:
        pass
    assert not held.is_over
    held.let_go.set()
    assert task.wait() == "over"


def test_what_a_stopped_task_began_is_stopped_too(held: Held) -> None:
    begun = threading.Event()
    found: list[Task[str]] = []

    def work() -> str:
        found.append(Task(held, held.let_go.set))
        begun.set()
        return found[0].wait()

    outer = Task(work)
    assert begun.wait(LONG_S)
    outer.stop()
    assert held.is_over
    for task in (outer, *found):
        with pytest.raises(KeyboardInterrupt):
            task.wait()


def test_a_stopped_task_begins_no_other(held: Held) -> None:
    begun: list[int] = []

    def work() -> None:
        held()
        Task(lambda: begun.append(1))

    outer = Task(work)
    outer.stop()
    held.let_go.set()
    with pytest.raises(KeyboardInterrupt):
        outer.wait()
    assert not begun


def test_a_stop_that_is_not_heard_is_repeated(held: Held) -> None:
    asked: list[int] = []

    def stop() -> None:
        asked.append(1)
        if len(asked) == 3:
            held.let_go.set()

    Task(held, stop).stop()
    assert held.is_over
    assert len(asked) == 3


def test_the_end_of_the_interpreter_stops_what_runs_and_waits_for_it() -> None:
    code = (
        "import threading, time\n"
        "from remat.solver.backends.processes import Task\n"
        "ended = threading.Event()\n"
        "def work():\n"
        "    ended.wait(60)\n"
        "    time.sleep(0.3)\n"
        "    print('over', flush=True)\n"
        "Task(work, ended.set)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, timeout=LONG_S
    )
    assert (ran.stdout, ran.stderr) == (b"over\n", b"")
