"""Units without a GPU or torch, for tests of what runs them; each notes in a file what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.gpu.rows import Row, RowFile
from benchmarks.gpu.scheduler import Desk, Group, Measure, Settings, Unit, run

LONG_S = 600.0


def wait_for(path: Path) -> None:
    """Until the file is there."""
    while not path.exists():
        time.sleep(0.01)


def measured(unit: Unit) -> Row:
    """What the last word of a key says is done."""
    word = unit.key.rpartition(" ")[2]
    if word == "raises":
        raise ValueError("as it was told")
    if word == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "breaks":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if word == "sleeps":
        subprocess.run(["sleep", f"{LONG_S}"], check=True)
    return {"process": os.getpid()}


def begin(desk: Desk) -> Measure:
    """Units that hold the GPU."""

    def measure(unit: Unit) -> Row:
        with desk.gpu():
            return measured(unit)

    return measure


def begin_and_raise(desk: Desk) -> Measure:
    """A group that cannot be set up."""
    raise ValueError(f"group {desk.number} cannot begin")


def begin_beside(desk: Desk) -> Measure:
    """Units that need no GPU."""
    return measured


def begin_in_turn(last: int, desk: Desk) -> Measure:
    """The first holds the GPU until all others wait for it, of which the last came first."""
    folder, number = desk.settings.folder, desk.number

    def measure(unit: Unit) -> Row:
        if number:
            wait_for(folder / "held")
        if 0 < number < last:
            wait_for(folder / f"waits_{number + 1}.lock")
        with desk.gpu():
            if not number:
                (folder / "held").touch()
                wait_for(folder / "waits_1.lock")
                time.sleep(0.3)  # a file is there just before it is held
            with (folder / "held").open("a") as held:
                held.write(f"{number} ")
                held.flush()
                time.sleep(0.05)
                held.write(f"/{number} ")
        return {}

    return measure


def group(name: str, *keys: str, estimate_s: float = 0.0) -> Group:
    """A group of units that hold the GPU."""
    return Group(name, tuple(Unit(key, estimate_s) for key in keys), begin)


def in_turn(count: int) -> list[Group]:
    """Groups of one unit each."""
    begins = partial(begin_in_turn, count - 1)
    return [Group(f"{n}", (Unit(f"{n}", 0.0),), begins) for n in range(count)]


KEPT = [group("a", "a 1", "a 2", "a 3"), group("b", "b 1", "b 2", "b 3")]


def main() -> None:
    """Run `KEPT` into the file of the first argument."""
    rows = RowFile(Path(sys.argv[1]))
    settings = Settings(rows, time.monotonic() + LONG_S, rows.path.parent)
    run(KEPT, settings, 1)


if __name__ == "__main__":
    main()
