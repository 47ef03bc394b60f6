"""The training graph: plain, frozen facts about one training step.

All that plans, judges or draws a step reads these classes. Nothing here imports torch, so a plan
can be studied on a machine that has none.

A schedule has no marker for the end of forward: forward ends right after the first run of the
forward op that first runs last. What is live then and read later is saved for backward.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Literal

import msgspec

from remat.graph_capture.errors import GraphError, ShapeError, TextError
from remat.graph_capture.files.json_text import decoded
from remat.graph_capture.graph_rules import check_graph
from remat.graph_capture.links import Links, Tier

SCHEMA_VERSION = 2
READ_VERSIONS = (1, 2)
"""Version 1 had no links, and no values with a home."""
KEPT = "kept by"
"""How `Op.pinned` begins where only the user wants that the op does not run twice."""
CUSTOM = "a custom op"
"""How `Op.pinned` begins where the user may ask that the op runs twice, by `recompute`.

What a custom op draws or changes unseen is not known. Such a pin is no part of a graph's hash.
"""
DELIVER = "remat.deliver"
"""The op that hands over gradients where they are added to those of earlier batches."""
UPDATE = "remat.update"
"""The op that steps the optimizer with gradients. It writes to the parameters that it reads."""
JOINED = " + "
"""Between the targets of ops that run as one: one makes a tensor, the others write to it."""
WRITES_FIRST = "it writes in place, where eager makes a new tensor"
"""Why an op is pinned that adds a term of a gradient to a view, as autograd would not."""

Phase = Literal["forward", "backward", "update"]
Origin = Literal["unpriced", "measured", "modelled", "estimated"]
Kind = Literal[
    "parameter", "buffer", "input", "constant", "activation", "rng_state", "tangent",
    "gradient", "output", "optimizer",
]  # fmt: skip

Optimizer = Literal["none", "sgd", "momentum", "adamw"]


class Value(msgspec.Struct, frozen=True):
    """One storage: a tensor with all its views and aliases.

    Attributes
    ----------
    name : name of the fx node that first returned the storage.
    size_bytes : bytes of the storage, rounded as the device's allocator rounds.
    producer : name of the op that creates it; empty for what is resident
        (parameters, buffers, the batch, constants), which lives through the step.
    kind : what the bytes are for.
    dtype, shape : of the tensor that created the storage, for people to read.
    held_until : name of the last op that finds it in memory in eager, where a variable of the
        user's code holds it after its last use. No schedule needs to.
    written_over : name of the value in whose storage eager writes it; empty for most. A schedule
        makes a storage for each.
    home : only without a producer. The tier where the value is as the step begins, and must be
        as it ends; the schedule may move it in between, and `Resident` does not count it. None for
        what is resident on the device.
    """

    name: str
    size_bytes: int
    producer: str = ""
    kind: Kind = "activation"
    dtype: str = ""
    shape: tuple[int, ...] = ()
    held_until: str = ""
    written_over: str = ""
    home: Tier | None = None


class Op(msgspec.Struct, frozen=True):
    """One node that creates storage, draws randomness or mutates. Views are no ops, and free.

    Attributes
    ----------
    name : name of the fx node. target : for example ``aten.mm.default``, or several (`JOINED`).
    inputs, outputs : names of the values it reads and of the values it creates.
    cost_us : time of one run. workspace_bytes : bytes taken while it runs beyond its
        inputs and outputs. price : where these two come from.
    pinned : why the op must not run twice; empty if it may.
    module, source : module path and ``file:line`` of the user's code behind it.
    checkpoint : number of the user's own checkpoint that covers it; 0 for none. Eager makes again
        what a checkpoint covers. A plan decides anew.
    host_cost_us : time of one run on the host; None where it cannot run there.
    updates : those of `inputs` that it rewrites in place, where it runs.
    """

    name: str
    target: str
    phase: Phase
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cost_us: float = 0.0
    workspace_bytes: int = 0
    pinned: str = ""
    module: str = ""
    source: str = ""
    price: Origin = "unpriced"
    checkpoint: int = 0
    host_cost_us: float | None = None
    updates: tuple[str, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """One way to run a region in pieces.

    Attributes
    ----------
    pieces : their number. exact : whether its results are eager's to the bit.
    ops : what runs in the region's place: each op, after the name of the op before which it
        stands; empty for the end. values : those that these ops make.
    """

    pieces: int
    exact: bool
    ops: tuple[tuple[str, Op], ...]
    values: tuple[Value, ...]


PartKind = Literal["head", "mlp"]


class Region(msgspec.Struct, frozen=True):
    """Ops that may run in pieces: linear heads with their losses, MLPs, or both.

    Attributes
    ----------
    name : of the ops that it is known by. ops : names of those that the pieces replace.
    choices : ways to run it, apart from the captured one. kinds : what it consists of.
    """

    name: str
    ops: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    kinds: tuple[PartKind, ...] = ("head",)


class Resident(msgspec.Struct, frozen=True):
    """Bytes that live through the whole step, by category.

    `communication_bytes` are those of data parallelism: DDP's buckets, or the parameters that
    FSDP2 gathers for the whole step. `libraries_bytes` is what a device's libraries keep once they
    were used, as cuBLAS does.
    """

    parameters_bytes: int = 0
    buffers_bytes: int = 0
    batch_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    libraries_bytes: int = 0
    communication_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all categories."""
        return (
            self.parameters_bytes
            + self.buffers_bytes
            + self.batch_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.libraries_bytes
            + self.communication_bytes
        )


class TrainingGraph(msgspec.Struct, frozen=True, dict=True, weakref=True):
    """One training step as ops over values, in captured order.

    Attributes
    ----------
    name : the model's class. ops : forward ops, then backward ops, each in an order
        in which they can run. values : every storage, resident ones included.
    forward_outputs : values that must be live when forward ends, in any schedule.
    outputs : values that must be live when the step ends. A value in both is in the
        caller's hands in between, and cannot be freed.
    resident : bytes that no schedule changes. inputs : signature of the batch.
    device : for example ``cpu``. prices : how costs were obtained: ``unpriced``,
        ``measured``, ``modelled``, or ``mixed`` of the last two; each op says its own.
        versions : of what captured and priced it. notes : on the prices, in words.
    regions : ops that may run in pieces; a schedule has one region so at most. captured_us : where
        one does, the time of the step that was captured; 0 elsewhere.
    links : the ways to memory below the device; None where nothing may leave it.
    """

    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    forward_outputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    resident: Resident = Resident()
    inputs: tuple[str, ...] = ()
    device: str = "cpu"
    prices: str = "unpriced"
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()
    captured_us: float = 0.0
    links: Links | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version not in READ_VERSIONS:
            raise GraphError(
                f"graph file has schema version {self.schema_version}, "
                f"this release reads {SCHEMA_VERSION}: capture the model again"
            )
        msgspec.structs.force_setattr(self, "schema_version", SCHEMA_VERSION)
        check_graph(self)

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
        """Ops whose first runs keep their captured order: they draw, or have effects.

        They share one random stream and the buffers. An op that only the user wants kept is not
        among them, nor one that updates parameters, each of which stands for itself.
        """
        states = {value.name for value in self.values if value.kind == "rng_state"}
        return tuple(
            op.name
            for op in self.ops
            if (op.pinned and op.target != UPDATE and not op.pinned.startswith(KEPT))
            or states.intersection(op.inputs)
        )

    @functools.cached_property
    def signatures(self) -> tuple[str, ...]:
        """One line an op: what a plan made for this graph relies on."""
        return tuple(self._signature(op) for op in self.ops)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 over the structure: ops, values, shapes; not over prices and sizes."""
        digest = hashlib.sha256()
        for part in (*self.inputs, *self.signatures, *self.forward_outputs, *self.outputs):
            digest.update(part.encode() + b"\n")
        return digest.hexdigest()

    def _signature(self, op: Op) -> str:
        values = (self.value_by_name[name] for name in op.outputs)
        results = ", ".join(f"{v.name}: {v.dtype}{list(v.shape)}" for v in values)
        pin = " pinned" if op.pinned and not op.pinned.startswith(CUSTOM) else ""
        line = f"{op.phase}{pin} {op.name} = {op.target}({', '.join(op.inputs)}) -> {results}"
        return f"{line} updates {', '.join(op.updates)}" if op.updates else line

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` reads it back to an equal graph."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> TrainingGraph:
        """Read a graph written by `to_json`.

        Raises
        ------
        GraphError : the text is no graph, or of another schema version.
        """
        try:
            return decoded(data, cls)
        except ShapeError as error:
            raise GraphError(f"not a graph file of this release: {error}") from error
        except TextError as error:
            raise GraphError(f"not a JSON graph file: {error}") from error

    def _repr_html_(self) -> str:
        from remat.formats import bytes_text, time_text
        from remat.html_figures import figures_html

        backward = len(self.ops) - self.n_forward
        made_bytes = sum(value.size_bytes for value in self.values if value.producer)
        figures = [
            ("ops", f"{self.n_forward} forward, {backward} backward"),
            ("time of each op once", time_text(self.time_us) if self.time_us else ""),
            ("resident", bytes_text(self.resident.total_bytes)),
            ("values", f"{len(self.values)}; those that ops make {bytes_text(made_bytes)} in all"),
            ("prices", f"{self.prices}, for {self.device}"),
            ("hash", self.hash[:12]),
        ]
        return figures_html(f"TrainingGraph: {self.name}", figures)

    def __repr__(self) -> str:
        backward = len(self.ops) - self.n_forward
        return (
            f"TrainingGraph({self.name}: {self.n_forward} forward and {backward} backward ops, "
            f"{len(self.values)} values, {self.resident.total_bytes} bytes resident, "
            f"{self.prices} for {self.device}, hash {self.hash[:12]})"
        )
