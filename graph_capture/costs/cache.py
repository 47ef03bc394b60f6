"""What was measured, kept on disk: one JSON file a device, thread count and torch version.

Five tables stand in it: the cost of each distinct op, the times of each whole step, whether chunks
give eager's bits (`chunking/same_bits.py`), how fast links to other memory are, and the times of
ops that are being timed, so that little is lost if the process is ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from remat.graph_capture.cache_files import CacheFiles
from remat.graph_capture.costs.link_speeds import LinkPair, are_speeds
from remat.graph_capture.devices.cpu import cpu_title
from remat.graph_capture.errors import TextError
from remat.graph_capture.files import decode_json
from remat.graph_capture.graph import MOST_BYTES, MOST_US

if TYPE_CHECKING:
    from remat.graph_capture.devices.meter import Meter

_SCHEMA_VERSION = 6
"""Of the file. One of another version is not read, and is written anew."""
_FILES = CacheFiles("costs", "they are measured again each time", is_sealed=False)
BUSY = 0.05
"""Of the time: what was measured while others had the core for longer is measured again, once the
machine is quiet."""


class OpCost(msgspec.Struct, frozen=True, array_like=True):
    cost_us: float
    workspace_bytes: int = 0  # beyond inputs and outputs, while it runs
    kept_bytes: int = 0  # by results, beyond the storages that the trace gives them
    is_estimate: bool = False  # the op did not run on made data: a guess from its bytes
    away: float = 0.0  # the part of the time in which others had the core


class WholeStepTimes(msgspec.Struct, frozen=True):
    """Times of a step that was run as a whole (`step_time.py`)."""

    step_us: float  # with every op run once
    keeping_us: float = 0.0  # forward alone takes so much less if it keeps nothing for backward
    again_us: float = 0.0  # the step takes so much longer with forward computed again in segments
    # What `again_us` should be by the costs of the ops; 0 if that step was not run.
    expected_us: float = msgspec.field(default=0.0, name="priced_us")
    away: float = 0.0  # the part of the time in which others had the core


def is_valid_cost(cost: OpCost) -> bool:
    # A file that was edited may say anything.
    sizes = cost.workspace_bytes, cost.kept_bytes
    return (
        0 <= cost.cost_us <= MOST_US
        and 0 <= cost.away <= 1
        and all(0 <= size < MOST_BYTES for size in sizes)
    )


def are_times(step: WholeStepTimes) -> bool:
    return all(0 <= time_us <= MOST_US for time_us in msgspec.structs.astuple(step))


def _truer(known: OpCost | WholeStepTimes, anew: OpCost | WholeStepTimes, *, is_less: bool) -> bool:
    # Times only grow by what others do: quiet ones say more, and of two busy ones the lesser.
    if (known.away > BUSY) != (anew.away > BUSY):
        return known.away > BUSY
    return known.away > BUSY and is_less


class _File(msgspec.Struct):
    schema_version: int
    title: str = ""
    costs: dict[str, OpCost] = msgspec.field(default_factory=dict[str, OpCost], name="prices")
    steps: dict[str, WholeStepTimes] = {}
    bits: dict[str, bool] = {}
    begun: dict[str, list[float]] = {}
    links: dict[str, LinkPair] = {}


def _known(data: bytes) -> _File | None:
    """What a file of costs holds; None of another version. Raises TextError if it cannot be."""
    file = decode_json(data, _File)
    if file.schema_version != _SCHEMA_VERSION:
        return None
    times = (one for each in file.begun.values() for one in each)
    if not (
        all(map(is_valid_cost, file.costs.values()))
        and all(map(are_times, file.steps.values()))
        and all(0 <= time_us <= MOST_US for time_us in times)
        and all(map(are_speeds, file.links.values()))
    ):
        raise TextError("a cost cannot be")
    return file


def file_name(which: str) -> str:
    slug = "".join(c if c.isalnum() else "-" for c in f"{which}-torch-{torch.__version__}")
    return f"prices-{slug}.json"


class CostCache:
    """What is known of a device and a torch version; `save` merges what is new into the file.

    Without a title it is of this machine's CPU. Costs differ by the device's `settings`.

    Attributes
    ----------
    costs : by `cost_key`. steps : by the hash of the step's graph. bits : as of `kept_bits`.
    begun : times of ops that have no cost yet, in microseconds. links : by their place.
    """

    def __init__(self, title: str | None = None, settings: str = "") -> None:
        self.title = title or cpu_title()
        self._name = file_name(" ".join(filter(None, (self.title, settings))))
        self.path = _FILES.path(self._name)
        file = self._read()
        self.costs, self.steps, self.bits = file.costs, file.steps, file.bits
        self.begun, self.links = file.begun, file.links
        self._saved, self._is_anew = set(self.costs), False
        self._own: set[str] = set()

    @classmethod
    def of(cls, meter: Meter) -> CostCache:
        return cls(meter.title, meter.settings)

    def settled(self, keys: Iterable[str], meter: Meter) -> set[str]:
        kept = {key for key in keys if key in self.costs}
        doubted = {key for key in kept if self.costs[key].away > BUSY}
        return kept - doubted if doubted and meter.is_quiet() else kept

    def has_step(self, key: str, meter: Meter) -> bool:
        kept = self.steps.get(key)
        return kept is not None and not (kept.away > BUSY and meter.is_quiet())

    def keep_costs(self, found: Mapping[str, OpCost]) -> None:
        for key, cost in found.items():
            known = self.costs.get(key)
            if known is None:
                self.costs[key] = cost
            elif _truer(known, cost, is_less=cost.cost_us < known.cost_us):
                self.costs[key] = cost
                # Or `_merged` would put the file's in its place.
                self._own.add(key)
        self.save()

    def keep_step(self, key: str, step: WholeStepTimes) -> None:
        known = self.steps.get(key)
        if known is None or _truer(known, step, is_less=step.step_us < known.step_us):
            self.steps[key] = step
        self.save()

    def doubt(self, keys: Collection[str], step_key: str) -> None:
        """Steps are quicker than these costs say: they were taken in a busy time."""
        # As busy as can be, so that `settled` asks for them again once the machine is quiet.
        for key in self.costs.keys() & set(keys):
            self.costs[key] = msgspec.structs.replace(self.costs[key], away=1.0)
            self._own.add(key)
        if step_key in self.steps:
            self.steps[step_key] = msgspec.structs.replace(self.steps[step_key], away=1.0)
        self.save()

    def forget(self) -> None:
        """What is found anew takes the place of what the file has."""
        self.costs, self.steps, self.begun = {}, {}, {}
        self._is_anew = True

    def _read(self) -> _File:
        return _FILES.read(self._name, _known) or _File(_SCHEMA_VERSION, self.title)

    def keep_begun(self, times: Mapping[str, list[float]]) -> None:
        self.begun |= {key: list(each) for key, each in times.items() if each}
        self.save()

    def save(self) -> None:
        """Add what is new to the file, at once; a folder that cannot be written is warned about."""
        _FILES.merge(self._name, lambda: msgspec.json.encode(self._merged()))

    def _merged(self) -> _File:
        known = self._read()
        costs, steps = {**known.costs, **self.costs}, {**known.steps, **self.steps}
        if not self._is_anew:
            # Two processes may measure one op at once. The cost saved first stays, and goes to the
            # other too: a kept plan rests on costs that the next process finds.
            theirs = {k: v for k, v in known.costs.items() if k not in self._own}
            costs |= theirs
            self.costs |= {k: v for k, v in theirs.items() if k not in self._saved}
        self._saved = set(self.costs)
        begun = {**known.begun, **self.begun}
        self.begun = {key: times for key, times in begun.items() if key not in costs}
        bits = {**known.bits, **self.bits}
        links = {**known.links, **self.links}
        return _File(_SCHEMA_VERSION, self.title, costs, steps, bits, self.begun, links)
