"""The training graph: plain, frozen facts about one training step, without torch.

Forward ends right after the first run of the forward op that first runs last; a schedule has no
marker for it. What is live then and read later is saved for backward.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.errors import GraphError, RematError
from remat.graph_capture.files import Record

if TYPE_CHECKING:
    from networkx import MultiDiGraph

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
FLOAT32_BYTES = 4
MOST_BYTES = 1 << 62  # sums below it stay exact in 64-bit integers, and so does twice a sum
MOST_US = 1e100  # sums and squares of what is below it are finite
_MOST_FIGURE = 10**300  # floats reach further, so it can be shown; budgets may be that large


def are_figures(*numbers: float) -> bool:
    """Whether all numbers are defined, from 0 on, and small enough to be shown."""
    return all(0 <= number < _MOST_FIGURE for number in numbers)


def _check_graph(graph: TrainingGraph) -> None:
    """Raise `GraphError` unless ops can run in their order on the values given."""
    values = {value.name: value for value in graph.values}
    if len(values) != len(graph.values):
        raise GraphError("two values have the same name")
    if len({op.name for op in graph.ops}) != len(graph.ops):
        raise GraphError("two ops have the same name")
    for value in graph.values:
        if value.size_bytes < 0:
            raise GraphError(f"value {value.name} has a negative size: {value.size_bytes} bytes")
        if value.home is not None and value.producer:
            raise GraphError(
                f"value {value.name} has a home on the {value.home} but is made by op "
                f"{value.producer}: only values from before the step have a home"
            )
    _check_ops(graph, values)
    _check_producers(graph)
    _check_outputs(graph, values)
    _check_sums(graph)


def _check_ops(graph: TrainingGraph, values: dict[str, Value]) -> None:
    present = {value.name for value in graph.values if not value.producer}
    backward_seen = False
    for op in graph.ops:
        if op.phase == "forward" and backward_seen:
            raise GraphError(f"forward op {op.name} comes after a backward op")
        backward_seen = backward_seen or op.phase == "backward"
        _check_op(op, values, present)
        present.update(op.outputs)


def _check_op(op: Op, values: dict[str, Value], present: set[str]) -> None:
    if not 0 <= op.cost_us < math.inf or op.workspace_bytes < 0:  # NaN fails too
        raise GraphError(
            f"op {op.name} has a negative or undefined cost: {op.cost_us} us, "
            f"{op.workspace_bytes} bytes of workspace; both must be finite, 0 or more"
        )
    for name in op.inputs:
        if name not in values:
            raise GraphError(f"op {op.name} reads {name}, which is not a value of the graph")
        if name not in present:
            raise GraphError(
                f"op {op.name} reads {name} before any op produces it: the ops cannot run in this "
                "order, or the graph has a cycle"
            )
    _check_host(op)
    for name in op.outputs:
        if name not in values or values[name].producer != op.name:
            text = f"op {op.name} lists output {name}, which does not name it as producer"
            raise GraphError(text)
    if len(set(op.outputs)) < len(op.outputs):
        twice = next(name for name in op.outputs if op.outputs.count(name) > 1)
        raise GraphError(f"op {op.name} lists output {twice} twice: list each value once")


def _check_host(op: Op) -> None:
    if op.host_cost_us is not None and not 0 <= op.host_cost_us < math.inf:
        raise GraphError(
            f"op {op.name} has a negative or undefined cost on the host: {op.host_cost_us} us; "
            "give a finite one, 0 or more, or None if the op cannot run there"
        )
    for name in op.updates:
        if name not in op.inputs:
            raise GraphError(
                f"op {op.name} updates {name} but does not read it: list it among its inputs"
            )


def _check_producers(graph: TrainingGraph) -> None:
    made = {name for op in graph.ops for name in op.outputs}
    for value in (value for value in graph.values if value.producer and value.name not in made):
        if any(op.name == value.producer for op in graph.ops):
            raise GraphError(
                f"value {value.name} names op {value.producer} as its producer, but the op does "
                "not list it: add it to the op's outputs"
            )
        raise GraphError(
            f"value {value.name} is produced by {value.producer}, which is not an op of the "
            "graph: leave the producer empty for a resident value"
        )


def _check_outputs(graph: TrainingGraph, values: dict[str, Value]) -> None:
    for name in (*graph.forward_outputs, *graph.outputs):
        if name not in values:
            raise GraphError(f"output {name} is produced by no op")
    late = {op.name for op in graph.ops if op.phase == "backward"}
    for name in graph.forward_outputs:
        if values[name].producer in late:
            raise GraphError(
                f"output {name} of forward is produced by {values[name].producer}, a backward "
                "op: list it among the outputs of the step instead"
            )


def _check_sums(graph: TrainingGraph) -> None:
    resident = msgspec.structs.asdict(graph.resident)
    for category, size_bytes in resident.items():
        if size_bytes < 0:
            raise GraphError(f"resident {category} are negative: {size_bytes}; give 0 for none")
    total_bytes = sum(resident.values()) + sum(value.size_bytes for value in graph.values)
    total_bytes += sum(op.workspace_bytes for op in graph.ops)
    if total_bytes >= MOST_BYTES:
        raise GraphError(
            "are the sizes in bytes? Values, workspaces and resident bytes add up to "
            f"{total_bytes}, more than can be computed with ({MOST_BYTES})"
        )
    if (total_us := sum(op.cost_us for op in graph.ops)) > MOST_US:
        raise GraphError(
            f"are the costs in microseconds? They add up to {total_us} us, more than can be "
            f"computed with ({MOST_US})"
        )


# A peak never depends on a link's rate: a wrong rate costs time and cannot break a budget.

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = ("device", "host", "nvme")  # from the fastest down; copies go one tier
LOWER_TIERS: tuple[Tier, ...] = ("host", "nvme")
LinkName = Literal["d2h", "h2d", "write", "read"]
LINK_NAMES: tuple[LinkName, ...] = ("d2h", "h2d", "write", "read")
LINK_TITLES: dict[LinkName, str] = {
    "d2h": "device to host", "h2d": "host to device", "write": "host to NVMe",
    "read": "NVMe to host",
}  # fmt: skip
WAYS: dict[tuple[Tier, Tier], LinkName] = {  # the link from one tier to another
    ("device", "host"): "d2h", ("host", "device"): "h2d", ("host", "nvme"): "write",
    ("nvme", "host"): "read",
}  # fmt: skip


class Link(msgspec.Struct, frozen=True):
    bytes_per_us: float  # sustained
    latency_us: float = 0.0  # of each copy, beside its bytes

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_us < math.inf and 0 <= self.latency_us < math.inf):
            raise GraphError(
                f"a link of {self.bytes_per_us} bytes and {self.latency_us} us: its rate must be "
                "positive and finite, its latency finite and 0 or more"
            )

    def us(self, size_bytes: int) -> float:
        return self.latency_us + size_bytes / self.bytes_per_us


class Links(msgspec.Struct, frozen=True):
    d2h: Link  # device to host
    h2d: Link
    host_bytes: int  # room there
    write: Link | None = None  # host to NVMe; None without one
    read: Link | None = None
    nvme_bytes: int = 0
    nvme_path: str = ""  # the folder that the files are in
    source: str = ""  # where the rates come from, in words

    def __post_init__(self) -> None:
        if self.host_bytes < 0 or self.nvme_bytes < 0:
            raise GraphError("room on the host and on NVMe must be 0 bytes or more")
        if (self.write is None) != (self.read is None):
            raise GraphError("give both NVMe links, to write and to read, or neither")

    def link(self, name: LinkName) -> Link | None:
        """None where there is no NVMe."""
        return getattr(self, name)

    def room_bytes(self, tier: Tier) -> float:
        # The room of the device is a budget's matter.
        return {"device": math.inf, "host": self.host_bytes, "nvme": self.nvme_bytes}[tier]

    def slower(self, share: float) -> Links:
        known = {name: link for name in LINK_NAMES if (link := self.link(name))}
        slow = {k: Link(link.bytes_per_us * share, link.latency_us) for k, link in known.items()}
        return msgspec.structs.replace(self, **slow)


KEPT = "kept by"  # how `Op.no_recompute` begins where only the user wants that the op runs once
# How `Op.no_recompute` begins where the user may ask for `recompute`: what a custom op draws or
# changes unseen is not known. Such a pin is no part of a graph's hash.
CUSTOM = "a custom op"
ACCUMULATE = "remat.deliver"  # the op that releases gradients where they are added to earlier ones
UPDATE = "remat.update"  # steps the optimizer, and writes to the parameters that it reads
TANGENTS = "remat.tangents"  # the op that opens backward, so it runs before any other backward op
JOINED = " + "  # between targets of ops that run as one: one makes a tensor, others write to it
# Why an op must not run twice that adds a gradient's term to a view, as autograd would not.
WRITES_FIRST = "it writes in place, where eager makes a new tensor"

Phase = Literal["forward", "backward", "update"]
Origin = Literal["unpriced", "measured", "modelled", "estimated"]
Kind = Literal[
    "parameter", "buffer", "input", "constant", "activation", "rng_state", "tangent",
    "gradient", "output", "optimizer",
]  # fmt: skip

Optimizer = Literal["none", "sgd", "momentum", "adamw", "adamw-fused"]


class Value(msgspec.Struct, frozen=True):
    """One storage: a tensor with all its views and aliases."""

    name: str  # of the fx node that first returned the storage
    size_bytes: int  # rounded as the device's allocator rounds
    producer: str = ""  # the op that creates it; empty for what lives through the step
    kind: Kind = "activation"
    dtype: str = ""  # of the tensor that created the storage, for people to read
    shape: tuple[int, ...] = ()
    held_until: str = ""  # the last op for which a variable holds it in eager; no schedule needs to
    written_over: str = ""  # in whose storage eager writes it; schedules make one for each
    # Without a producer: the tier where it is as the step begins and ends. The schedule may move it
    # in between, and `Resident` does not count it. None for what is resident on the device.
    home: Tier | None = None


class Op(msgspec.Struct, frozen=True):
    """One node that creates storage, draws randomness or mutates. Views are no ops, and free."""

    name: str
    target: str  # such as ``aten.mm.default``, or several (`JOINED`)
    phase: Phase
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cost_us: float = 0.0
    workspace_bytes: int = 0  # taken while it runs, beyond inputs and outputs
    no_recompute: str = msgspec.field(default="", name="pinned")  # why it must not run twice
    module: str = ""  # its path in the user's model
    source: str = ""  # ``file:line`` of the user's code
    cost_origin: Origin = msgspec.field(default="unpriced", name="price")  # of time and workspace
    checkpoint: int = 0  # of the user's that covers it, by number; a plan decides anew
    host_cost_us: float | None = None  # None where it cannot run there
    updates: tuple[str, ...] = ()  # those of `inputs` that it rewrites in place


class Choice(msgspec.Struct, frozen=True):
    chunks: int = msgspec.field(name="pieces")
    exact: bool  # whether it gives eager's bits
    ops: tuple[tuple[str, Op], ...]  # each after the name of the op that it precedes, "" at the end
    values: tuple[Value, ...]  # those that these ops make


PartKind = Literal["head", "mlp"]


class Region(msgspec.Struct, frozen=True):
    """Ops that may run in chunks: linear heads with their losses, MLPs, or both."""

    name: str
    ops: tuple[str, ...]  # those that the chunks replace
    choices: tuple[Choice, ...] = ()  # ways to run it, apart from the captured one
    kinds: tuple[PartKind, ...] = ("head",)


class Resident(msgspec.Struct, frozen=True):
    """Bytes that live through the whole step, by category."""

    parameters_bytes: int = 0
    buffers_bytes: int = 0
    batch_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    libraries_bytes: int = 0  # what they keep once they were used, as cuBLAS does
    communication_bytes: int = 0  # DDP's buckets, or what FSDP2 gathers for the whole step
    update_bytes: int = 0  # taken on CUDA by AdamW's step alone, after backward, unless it is fused

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        parts = msgspec.structs.asdict(self)
        return {name: parts[name] for name in parts if name != "update_bytes"}


class TrainingStep(Record, frozen=True):
    """One training step as `remat.capture` returns it: ops over values, with their costs.

    For one size it is a `TrainingGraph`, for a range of sizes a `RangedGraph`. It holds no tensor,
    and its figures show in a notebook.
    """

    again: ClassVar[str] = "make it again with remat show MODEL --as graph -o FILE"
    error: ClassVar[type[RematError]] = GraphError


class TrainingGraph(TrainingStep, frozen=True, dict=True, weakref=True):
    """One training step as ops over values, in captured order.

    Attributes
    ----------
    name : the model's class. ops : forward ops, then backward ops, each in an order
        in which they can run. values : every storage, resident ones included.
    forward_outputs : values that must be live when forward ends, in any schedule.
    outputs : values that must be live when the step ends. A value in both is in the
        caller's hands in between, and cannot be freed.
    resident : bytes that no schedule changes. inputs : signature of the batch.
    device : for example ``cpu``. cost_origin : how costs were found, ``prices`` in a file:
        ``unpriced``, ``measured``, ``modelled``, or ``mixed`` of these; each op says its own.
        versions : of what captured and timed it. notes : on the costs, in words.
    regions : ops that may run in chunks; a schedule has one region so at most. captured_us : where
        one does, the time of the step that was captured; 0 elsewhere.
    links : the ways to memory below the device; None where nothing may leave it.
    """

    noun: ClassVar[str] = "graph"
    reads: ClassVar[tuple[int, ...]] = (1, 2)  # 1 had no links, and no values with a home
    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    forward_outputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    resident: Resident = Resident()
    inputs: tuple[str, ...] = ()
    device: str = "cpu"
    cost_origin: str = msgspec.field(default="unpriced", name="prices")
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()
    captured_us: float = 0.0
    links: Links | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_graph(self)

    @functools.cached_property
    def op_index(self) -> dict[str, int]:
        """Position of each op by name."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @functools.cached_property
    def value_by_name(self) -> dict[str, Value]:
        """Each value by its name."""
        return {value.name: value for value in self.values}

    @functools.cached_property
    def n_forward(self) -> int:
        """Number of forward ops; they come first."""
        return sum(op.phase == "forward" for op in self.ops)

    @functools.cached_property
    def time_us(self) -> float:
        """Time of the step that computes every op once."""
        return sum(op.cost_us for op in self.ops)

    @property
    def base_us(self) -> float:
        """The time that overheads are stated over: of the captured step, with every op once."""
        return self.captured_us or self.time_us

    @functools.cached_property
    def ordered_ops(self) -> tuple[str, ...]:
        """Ops whose first runs keep their captured order: they draw, or have effects."""
        # They share one random stream and the buffers. Not an op that only the user wants kept, nor
        # one that updates parameters, each of which stands for itself.
        states = {value.name for value in self.values if value.kind == "rng_state"}

        def is_ordered(op: Op) -> bool:
            is_pinned = op.no_recompute and not op.no_recompute.startswith(KEPT)
            return bool(is_pinned and op.target != UPDATE) or not states.isdisjoint(op.inputs)

        return tuple(op.name for op in self.ops if is_ordered(op))

    @functools.cached_property
    def signatures(self) -> tuple[str, ...]:
        """One line an op: what a plan made for this graph relies on."""
        return tuple(self._signature(op) for op in self.ops)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 over the structure: ops, values, shapes; not over costs and sizes."""
        digest = hashlib.sha256()
        for part in (*self.inputs, *self.signatures, *self.forward_outputs, *self.outputs):
            digest.update(part.encode() + b"\n")
        return digest.hexdigest()

    def _signature(self, op: Op) -> str:
        values = (self.value_by_name[name] for name in op.outputs)
        results = ", ".join(f"{v.name}: {v.dtype}{list(v.shape)}" for v in values)
        # The user may lift a custom op's pin by `recompute`, and the graph stays the same.
        pin = " pinned" if op.no_recompute and not op.no_recompute.startswith(CUSTOM) else ""
        line = f"{op.phase}{pin} {op.name} = {op.target}({', '.join(op.inputs)}) -> {results}"
        return f"{line} updates {', '.join(op.updates)}" if op.updates else line

    def to_networkx(self) -> MultiDiGraph[str]:
        """The step as a graph of networkx, to look at it with other tools.

        Nodes are ops, with ``phase``, ``target``, ``module``, ``source``, ``cost_us`` and
        ``workspace_bytes``. Each value is an edge from the op that makes it to each that reads it,
        with the value's name as its key, and ``size_bytes``, ``dtype`` and ``shape``. Parameters
        and the batch are no edges, as no op makes them.

        Raises
        ------
        ImportError : networkx is not installed; it is in ``remat[notebook]``.
        """
        from networkx import MultiDiGraph

        found = MultiDiGraph()
        for op in self.ops:
            facts = ("phase", "target", "module", "source", "cost_us", "workspace_bytes")
            found.add_node(op.name, **{name: getattr(op, name) for name in facts})
        for op in self.ops:
            for value in (self.value_by_name[name] for name in dict.fromkeys(op.inputs)):
                if value.producer:
                    found.add_edge(
                        value.producer, op.name, value.name, size_bytes=value.size_bytes,
                        dtype=value.dtype, shape=value.shape,
                    )  # fmt: skip
        return found

    def _repr_html_(self) -> str:
        from remat.formats import bytes_text, figures_html, time_text

        backward = len(self.ops) - self.n_forward
        made_bytes = sum(value.size_bytes for value in self.values if value.producer)
        figures = [
            ("ops", f"{self.n_forward} forward, {backward} backward"),
            ("time of each op once", time_text(self.time_us) if self.time_us else ""),
            ("resident", bytes_text(self.resident.total_bytes)),
            ("values", f"{len(self.values)}; those that ops make {bytes_text(made_bytes)} in all"),
            ("costs", f"{self.cost_origin}, for {self.device}"),
            ("hash", self.hash[:12]),
        ]
        return figures_html(f"TrainingGraph: {self.name}", figures)

    def __repr__(self) -> str:
        backward = len(self.ops) - self.n_forward
        return (
            f"TrainingGraph({self.name}: {self.n_forward} forward and {backward} backward ops, "
            f"{len(self.values)} values, {self.resident.total_bytes} bytes resident, "
            f"{self.cost_origin} for {self.device}, hash {self.hash[:12]})"
        )


_T = TypeVar("_T")
PREFIX = "remat kept: "


def cached_on(graph: TrainingGraph, name: str, make: Callable[[], _T]) -> _T:
    """What `make` returned when it was first asked under `name` for this graph object."""
    known, key = vars(graph), PREFIX + name  # no field: neither files nor copies have it
    if key not in known:
        known[key] = make()
    return cast("_T", known[key])
