"""Plans of compiled steps on disk, for the processes after this one: one file for each `start_key`.

A file is not believed (`graph_capture/cache_files.py`): its schedule is judged by `simulate`
on the graph in it, and its costs must be those that are measured here.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from remat.compile.graph_context import ChosenPlan
from remat.graph_capture.cache_files import CacheFiles
from remat.graph_capture.costs.cache import CostCache, OpCost
from remat.graph_capture.devices.local_devices import meter_of
from remat.graph_capture.errors import PlanError
from remat.graph_capture.files import decode_json
from remat.graph_capture.graph import MOST_BYTES, TrainingGraph
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import gap_of, simulate

_SCHEMA_VERSION = 1
CHOICES_FOLDER = "compiled"
MOST_FILES = 256
"""Of the folder; those that were not used for longest go first."""
MOST_ENTRY_BYTES = 1 << 24
"""A plan for a graph of 5,000 ops takes 2 MB. What takes more is planned each time."""


class KeptChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for one graph of dynamo's, and all that must be known to take it again.

    `name` is that under which Inductor has cached the code; `graph` and `schedule` are None where
    there are no gradients, `schedule` also where the step is as torch compiles it. `budget_bytes`
    has parameters in it. `costs` are by key of the `CostCache`; other bytes are as in `StepBytes`.
    """

    key: str
    name: str
    graph: TrainingGraph | None = None
    schedule: Schedule | None = None
    lower_bound_us: float = 0.0
    stock: ReplayedMemory = ReplayedMemory(0, 0, 0)
    chosen: ReplayedMemory = ReplayedMemory(0, 0, 0)
    static_bytes: int = 0
    dynamic_bytes: int = 0
    gradient_bytes: int = 0
    calls: int = 1
    modules: int = 1
    awaited_gradient_bytes: int = 0
    budget_bytes: int = 0
    costs: dict[str, OpCost] = msgspec.field(default_factory=dict[str, OpCost], name="prices")
    schema_version: int = _SCHEMA_VERSION

    def taken(self) -> ChosenPlan:
        """Its figures, judged anew; raises `RematError` where the file cannot be true."""
        if self.schedule is None or self.graph is None:
            return ChosenPlan(self.stock, self.chosen)
        found = simulate(self.graph, self.schedule)
        # A bound above a time that was reached is no bound, up to rounding.
        if self.lower_bound_us > (1 + 1e-9) * found.time_us:
            raise PlanError("its bound is above its time")
        gap = gap_of(found.time_us, self.lower_bound_us)
        gap = None if gap is None else max(0.0, gap)
        return ChosenPlan(self.stock, self.chosen, self.schedule, found.overhead, gap)

    def step(self) -> StepBytes:
        """Its bytes, with nothing beside them."""
        return StepBytes(self.static_bytes, self.dynamic_bytes, self.gradient_bytes)


def kept_choice(key: str) -> KeptChoice | None:
    """None where nothing is kept, or nothing that can be taken."""
    found = _files().read(_name(key), _whole_choice)
    # The file's name has a part of the key only.
    if found is None or found.key != key or found.schema_version != _SCHEMA_VERSION:
        return None
    return found if _has_costs(found) else None


def keep_choice(choice: KeptChoice) -> None:
    _files().write(_name(choice.key), msgspec.json.encode(choice))


def _files() -> CacheFiles:
    return CacheFiles(
        "plans", "each process plans anew", CHOICES_FOLDER,
        most_files=MOST_FILES, most_bytes=MOST_ENTRY_BYTES,
    )  # fmt: skip


def _name(key: str) -> str:
    return f"{key[:32]}.json"


def _whole_choice(data: bytes) -> KeptChoice:
    """Raises `RematError` for what cannot be true."""
    found = decode_json(data, KeptChoice)
    if not all(0 <= size < MOST_BYTES for size in _choice_sizes(found)):
        raise PlanError("a size cannot be")
    # Simulates the schedule: a damaged file is found here, where it can be told as such.
    found.taken()
    return found


def _choice_sizes(choice: KeptChoice) -> Iterator[int]:
    yield from (choice.static_bytes, choice.dynamic_bytes, choice.gradient_bytes)
    yield from (choice.awaited_gradient_bytes, choice.budget_bytes, choice.calls, choice.modules)
    for one in (choice.stock, choice.chosen):
        yield from (one.forward_peak_bytes, one.backward_peak_bytes)
        yield from (one.saved_bytes, one.output_bytes)


def _has_costs(choice: KeptChoice) -> bool:
    """Whether the costs of the plan are those that are kept for its device here."""
    if not choice.costs or choice.graph is None:
        return True
    # With other costs another plan might have been chosen.
    known = CostCache.of(meter_of(choice.graph.device)).costs
    return all(known.get(key) == cost for key, cost in choice.costs.items())
