"""Plans of compiled steps on disk, for the processes after this one: one file for each `start_key`.

A file is data and is not believed: it is read whole or not at all, its schedule is judged by
`simulate` on the graph in it, and its prices must be those that are measured here. Its first line
is a digest of the rest, by which damage is seen. A file that says anything else than it should is
warned about, and the step is planned anew.

No file is written twice by two processes in a way that matters: each writes a whole file, and the
last one stays. So no lock is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec

from remat.compile.place import Taken
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.errors import PlanError, RematError
from remat.graph_capture.files.contents import read_contents, write_contents
from remat.graph_capture.files.json_text import decoded
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.graph_rules import MOST_BYTES
from remat.graph_capture.prices.price_cache import Price, PriceCache, cache_folder
from remat.rewriter.inductor.replay import Replay, StepBytes
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import gap_of, simulate

SCHEMA_VERSION = 1
FOLDER = "compiled"
MOST_FILES = 256
"""Of the folder; those that were not used for longest go first."""
MOST_ENTRY_BYTES = 1 << 24
"""A plan for a graph of 5,000 ops takes 2 MB. What takes more is planned each time."""


class KeptChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for one graph of dynamo's, and all that must be known to take it again.

    Attributes
    ----------
    key : its `start_key`. name : under which Inductor has cached the code.
    graph : as it was planned; None for one without gradients, of which nothing else is known.
    schedule : None where the step is as torch compiles it. lower_bound_us : of the schedule's time.
    stock, chosen : peaks of the code as torch makes it, and of the code that was chosen.
    static_bytes ... awaited_gradient_bytes : as in `StepBytes`.
    budget_bytes : that it was planned for, parameters included.
    prices : of the calls and kernels, by their keys in the `PriceCache`.
    """

    key: str
    name: str
    graph: TrainingGraph | None = None
    schedule: Schedule | None = None
    lower_bound_us: float = 0.0
    stock: Replay = Replay(0, 0, 0)
    chosen: Replay = Replay(0, 0, 0)
    static_bytes: int = 0
    dynamic_bytes: int = 0
    gradient_bytes: int = 0
    calls: int = 1
    modules: int = 1
    awaited_gradient_bytes: int = 0
    budget_bytes: int = 0
    prices: dict[str, Price] = {}
    schema_version: int = SCHEMA_VERSION

    def taken(self) -> Taken:
        """Its figures; those of the schedule by `simulate`.

        Raises
        ------
        RematError : the schedule is none of the graph, or takes less than its bound.
        """
        if self.schedule is None or self.graph is None:
            return Taken(self.stock, self.chosen)
        found = simulate(self.graph, self.schedule)
        if self.lower_bound_us > (1 + 1e-9) * found.time_us:
            raise PlanError("its bound is above its time")
        gap = gap_of(found.time_us, self.lower_bound_us)
        gap = None if gap is None else max(0.0, gap)
        return Taken(self.stock, self.chosen, self.schedule, found.overhead, gap)

    def step(self) -> StepBytes:
        """The bytes of its graph, with nothing beside them."""
        return StepBytes(self.static_bytes, self.dynamic_bytes, self.gradient_bytes)


def kept_choice(key: str) -> KeptChoice | None:
    """What is kept under a key; None if there is nothing, or nothing that can be taken."""
    path = _path(key)
    try:
        if not path.exists():
            return None
        found = _whole_choice(path)
    except (OSError, RematError) as error:
        warnings.warn(f"kept plan {path} is ignored, and made anew: {error}", stacklevel=2)
        return None
    is_ours = found.key == key and found.schema_version == SCHEMA_VERSION
    if not is_ours or not _has_prices(found):
        return None
    with contextlib.suppress(OSError):  # The folder may be read-only; then nothing is removed.
        os.utime(path)
    return found


def keep_choice(choice: KeptChoice) -> None:
    """Keep a choice, and remove the oldest; a folder that cannot be written is warned about."""
    path = _path(choice.key)
    data = msgspec.json.encode(choice)
    if len(data) > MOST_ENTRY_BYTES:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_contents(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        _remove_oldest(path.parent)
    except OSError as error:
        warnings.warn(f"plans are not kept: {path.parent}: {error}", stacklevel=2)


def _path(key: str) -> Path:
    return cache_folder() / FOLDER / f"{key[:32]}.json"


def _whole_choice(path: Path) -> KeptChoice:
    """The choice in a file, if it is whole and can be.

    Raises
    ------
    OSError, RematError : it is not.
    """
    if path.stat().st_size > MOST_ENTRY_BYTES + 65:
        raise PlanError("it is larger than any plan")
    digest, _, data = read_contents(path).partition(b"\n")
    if digest != hashlib.sha256(data).hexdigest().encode():
        raise PlanError("it is damaged")
    found = decoded(data, KeptChoice)
    if not all(0 <= size < MOST_BYTES for size in _choice_sizes(found)):
        raise PlanError("a size cannot be")
    found.taken()
    return found


def _choice_sizes(choice: KeptChoice) -> Iterator[int]:
    yield from (choice.static_bytes, choice.dynamic_bytes, choice.gradient_bytes)
    yield from (choice.awaited_gradient_bytes, choice.budget_bytes, choice.calls, choice.modules)
    for one in (choice.stock, choice.chosen):
        yield from (one.forward_peak_bytes, one.backward_peak_bytes)
        yield from (one.saved_bytes, one.output_bytes)


def _has_prices(choice: KeptChoice) -> bool:
    """Whether the prices of the plan are those that are kept for its device here."""
    if not choice.prices or choice.graph is None:
        return True
    known = PriceCache.of(meter_of(choice.graph.device)).prices
    return all(known.get(key) == price for key, price in choice.prices.items())


def _remove_oldest(folder: Path) -> None:
    kept = [(one.stat().st_mtime_ns, one) for one in folder.glob("*.json")]
    for _, path in sorted(kept)[: max(0, len(kept) - MOST_FILES)]:
        path.unlink(missing_ok=True)
