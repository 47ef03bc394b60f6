"""Units of measurement in processes: many use the CPU's cores, one at a time holds the GPU.

A `Group` is one process, whose units run in order. Groups start in order, and of those that wait
for the GPU the first takes it. A unit gives one row; no unit begins that is not estimated to end
before the deadline, and what runs at the deadline is ended. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from benchmarks.comparison.cores import descendants
from benchmarks.gpu.rows import ERROR, KEY, Row, RowFile

LOOK_S = 0.01
BROKEN = 3
"""The status of a process whose GPU no longer answers."""
PRELOADED = ["benchmarks.comparison.preloaded", "benchmarks.gpu.visit"]
MOST_OF_ERROR = 2000


class OutOfTimeError(Exception):
    """The unit would not end before the deadline."""


@dataclass(frozen=True)
class Unit:
    """One row: its key, and the seconds that it is thought to hold the GPU."""

    key: str
    estimate_s: float


@dataclass(frozen=True)
class Settings:
    """What all groups are told. `deadline_s` : of `time.monotonic`."""

    rows: RowFile
    deadline_s: float
    folder: Path
    device: str = "cpu"
    rehearse: bool = False
    carried: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def has_time_for(self, seconds: float) -> bool:
        """Whether so many seconds end before the deadline."""
        return time.monotonic() + seconds <= self.deadline_s


@dataclass
class Desk:
    """What a group's process works with. `unit` : the one that is measured now."""

    settings: Settings
    number: int = 0
    unit: Unit | None = None
    _depth: int = 0
    waited_s: float = 0.0
    _lock: FileLock = field(init=False)

    def __post_init__(self) -> None:
        self._lock = FileLock(self.settings.folder / "gpu.lock")

    @contextlib.contextmanager
    def gpu(self) -> Iterator[None]:
        """Hold the GPU; `OutOfTimeError` if there is too little time once it is free."""
        if not self._depth:
            began_s = time.monotonic()
            self._take()
            self.waited_s += time.monotonic() - began_s
        self._depth += 1
        try:
            if self._depth == 1 and self.unit and not self._has_time(self.unit):
                raise OutOfTimeError(self.unit.key)
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._lock.release()

    def _has_time(self, unit: Unit) -> bool:
        return self.settings.has_time_for(unit.estimate_s)

    def _take(self) -> None:
        with FileLock(self._waiting(self.number)):
            while any(map(self._waits, range(self.number))) or not _taken(self._lock):
                time.sleep(LOOK_S)

    def _waiting(self, number: int) -> Path:
        return self.settings.folder / f"waits_{number}.lock"

    def _waits(self, number: int) -> bool:
        """Whether that group waits: it holds its file, which a dead process does not."""
        path = self._waiting(number)
        if not path.exists():
            return False
        other = FileLock(path)
        if not _taken(other):
            return True
        other.release()
        return False


def _taken(lock: FileLock) -> bool:
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=0)
        return True
    return False


def begin_imports() -> None:
    """Let a process import what all others then have, while this one imports it too."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


Measure = Callable[[Unit], Row]
Begin = Callable[[Desk], Measure]


@dataclass(frozen=True)
class Group:
    """The units of one process.

    Attributes
    ----------
    begin : sets up, and returns what measures a unit. setup_s : how long that takes at least.
    env : variables of the process, which then starts anew and not from one that has imported.
    """

    name: str
    units: tuple[Unit, ...]
    begin: Begin
    setup_s: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def without(self, done: Mapping[str, Row]) -> Group:
        """The group of what is left to do."""
        return replace(self, units=tuple(one for one in self.units if one.key not in done))


@dataclass
class _Running:
    group: Group
    number: int
    process: BaseProcess
    begun: Connection


def run(groups: Sequence[Group], settings: Settings, workers: int) -> list[str]:
    """Run what has no row yet, until the deadline; the keys of units that still have none."""
    waiting = [(number, group) for number, group in enumerate(groups)]
    running: list[_Running] = []
    try:
        while time.monotonic() < settings.deadline_s:
            while waiting and len(running) < workers:
                number, group = waiting.pop(0)
                group = group.without(settings.rows.read())
                if group.units and settings.has_time_for(group.setup_s + _least_s(group)):
                    running.append(_started(group, number, settings))
            if not running:
                break
            left_s = max(0.0, settings.deadline_s - time.monotonic())
            ended = wait([one.process.sentinel for one in running], left_s)
            for one in [one for one in running if one.process.sentinel in ended]:
                running.remove(one)
                if _lost_one(one, settings.rows):
                    waiting.insert(0, (one.number, one.group))
    finally:
        for one in running:
            _kill(one.process)
    done = settings.rows.read()
    return [unit.key for group in groups for unit in group.without(done).units]


def _kill(process: BaseProcess) -> None:
    """End it with what it started: solvers, or compilers that would hold the output open."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)  # it starts no more while they are listed
    for one in list(descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    process.join()


def _least_s(group: Group) -> float:
    return min(unit.estimate_s for unit in group.units)


def _started(group: Group, number: int, settings: Settings) -> _Running:
    context: Any = multiprocessing.get_context("spawn" if group.env else "forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(group, number, settings, theirs))
    before = {name: os.environ.get(name) for name in group.env}
    os.environ.update(group.env)
    try:
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    theirs.close()
    return _Running(group, number, process, ours)


def _lost_one(one: _Running, rows: RowFile) -> bool:
    """Whether it died of a unit, which then has the row of an error, and others are left."""
    one.process.join()
    begun = ""
    with contextlib.suppress(EOFError):
        while one.begun.poll():
            begun = one.begun.recv()
    if not one.process.exitcode or not begun:
        return False
    if begun not in rows.read():
        said = f"its process ended with status {one.process.exitcode}"
        rows.append({KEY: begun, ERROR: said})
    return bool(one.group.without(rows.read()).units)


def _work(group: Group, number: int, settings: Settings, begun: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(settings.env)  # not before: the process that has imported may be older
    desk = Desk(settings, number)
    begun.send(group.units[0].key)
    try:
        measure = group.begin(desk)
    except Exception as error:  # noqa: BLE001 - each of its rows tells it
        for unit in group.units:
            settings.rows.append({KEY: unit.key, ERROR: f"{group.name}: {_told(error)}"})
        return
    for unit in group.units:
        begun.send(unit.key)
        if settings.has_time_for(unit.estimate_s):
            _measured(measure, unit, desk)


def _measured(measure: Measure, unit: Unit, desk: Desk) -> None:
    """Append the unit's row; end the process if the GPU no longer answers."""
    began_s, desk.unit, desk.waited_s = time.monotonic(), unit, 0.0
    is_broken = False
    try:
        row = measure(unit)
    except OutOfTimeError:
        return
    except Exception as error:  # noqa: BLE001 - the row tells it, and the rest is measured
        row = {ERROR: _told(error)}
        is_broken = "CUDA error" in row[ERROR]
    finally:
        desk.unit = None
    took_s = time.monotonic() - began_s - desk.waited_s
    desk.settings.rows.append({KEY: unit.key, **row, "took_s": round(took_s, 2)})
    print(f"{took_s:6.1f} s  {unit.key}", row.get(ERROR, "")[:200], flush=True)
    if is_broken:
        os._exit(BROKEN)  # all that follows in this process would fail too


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_OF_ERROR]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
