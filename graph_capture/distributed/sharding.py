"""How a step is spread over ranks: torch's ways of data parallelism, called as torch calls them."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal, get_args

import msgspec

from remat.graph_capture.errors import CaptureError, DeviceError, for_caller
from remat.graph_capture.graph import Op, TrainingGraph, Value

ShardingKind = Literal["none", "ddp", "zero1", "replicate", "fsdp2"]
_KINDS: tuple[str, ...] = get_args(ShardingKind)
_TAKEN_BY: dict[str, tuple[str, ...]] = {  # by option, the kinds of sharding that have it
    "blocks": ("fsdp2", "replicate"), "replicas": ("fsdp2",), "reshard_after_forward": ("fsdp2",),
    "bucket_views": ("ddp", "zero1"), "param_dtype": ("fsdp2", "replicate"),
    "reduce_dtype": ("fsdp2", "replicate"), "cpu_offload": ("fsdp2",),
    "states_over": ("fsdp2", "zero1"), "gradient_sync": _KINDS[1:],
}  # fmt: skip
_RING = "remat_ring"
NAMESPACES = (
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem", _RING,
)  # fmt: skip
"""Of ops in which other ranks take part, or that wait for one."""
GATHER, UNSHARD, RESHARD = "remat.all_gather", "remat.unshard", "remat.reshard"
COPY_IN, REDUCE = "remat.copy_in", "remat.reduce_scatter"
STEP_AT_ONCE = "remat.step"  # of the optimizer, as soon as gradients are whole
_PARAM_DTYPES = ("bfloat16", "float16")
_REDUCE_DTYPES = ("float32", *_PARAM_DTYPES)


def is_ring(target: str) -> bool:
    """Whether an op of a graph with this target computes attention over a ring of ranks."""
    return target.startswith(f"{_RING}.")


@dataclass(frozen=True)
class Sharding:
    """How a step is spread over ranks.

    Attributes
    ----------
    kind : ``none``; ``ddp``, where every rank has all parameters, and buckets for their
        gradients; ``zero1``, that with `ZeroRedundancyOptimizer`, which gives each rank the
        optimizer state of whole parameters; ``replicate``, where `replicate` of FSDP2 copies the
        parameters for the step; ``fsdp2``, where each rank has an equal part of parameters,
        gradients and optimizer state, as `fully_shard` of the whole model does.
    world_size : number of ranks.
    blocks : a glob over the paths of modules that are sharded by themselves first. Empty for none.
    replicas : shard groups that hold the same, on a mesh of replicas x shards: HSDP, MiCS.
    reshard_after_forward : of `fully_shard`. False keeps the parameters of forward whole (ZeRO-2),
        a number shards them over that many ranks until backward (hpZ of ZeRO++). Left out, all but
        the root's go back to shards (ZeRO-3).
    bucket_views : whether DDP is given ``gradient_as_bucket_view=True``.
    param_dtype, reduce_dtype : of `MixedPrecisionPolicy`, by name, such as ``bfloat16``. Parameters
        of float32 and the batch are cast to the first; gradients are summed in the second.
    cpu_offload : whether parameters, gradients and optimizer state are kept on the host, as
        `CPUOffloadPolicy` does.
    states_over : ranks that share one optimizer state. Of ``fsdp2`` a multiple of the shard group,
        whose ranks update each a slice of their shards (PaRO, AMSP); torch has no such optimizer.
        Of ``zero1`` the `process_group`. Left at 0, all that share parameters, or all ranks.
    gradient_sync : False where all batches of a step but the last run in ``no_sync`` of DDP or
        under ``set_requires_gradient_sync(False)``: whole gradients are added up, and reduced once.

    References
    ----------
    Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054. Wang et al., ZeRO++, 2023,
    https://arxiv.org/abs/2306.10209. Zhang et al., MiCS, 2022, https://arxiv.org/abs/2205.00119.
    Chen et al., AMSP, 2023, https://arxiv.org/abs/2311.00257.
    """

    kind: ShardingKind = "none"
    world_size: int = 1
    blocks: str = ""
    replicas: int = 1
    reshard_after_forward: bool | int | None = None
    bucket_views: bool = False
    param_dtype: str = ""
    reduce_dtype: str = ""
    cpu_offload: bool = False
    states_over: int = 0
    gradient_sync: bool = True

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise DeviceError(f"unknown sharding '{self.kind}': choose {_listed(_KINDS, 'or')}")
        if type(self.world_size) is not int:
            raise DeviceError(
                f"give {for_caller('world_size', 'world')} as a whole number, such as 2: it is "
                f"{self.world_size!r}"
            )
        # `fully_shard` takes a mesh of one rank, where it still copies parameters and gradients.
        if self.kind != "none" and self.world_size < (1 if self.kind == "fsdp2" else 2):
            raise DeviceError(
                f"name the number of ranks, {for_caller('world_size', 'world')}=2 or more: "
                f"sharding {self.kind} over {self.world_size} rank shards nothing"
            )
        if self.kind == "none" and self.world_size != 1:
            raise DeviceError(
                f"choose a kind of sharding for {self.world_size} ranks: "
                f"{_listed(_KINDS[1:], 'or')}"
            )
        for one in fields(self):
            takers = _TAKEN_BY.get(one.name, _KINDS)
            if self.kind not in takers and getattr(self, one.name) != one.default:
                raise DeviceError(
                    f"leave out {one.name}, or choose {_listed(takers, 'or')}: sharding "
                    f"{self.kind} does not take it"
                )
        self._require_even_groups()
        self._require_dtypes()

    def _require_even_groups(self) -> None:
        if self.replicas < 1 or self.world_size % self.replicas:
            raise DeviceError(
                f"choose a number of replicas that divides {self.world_size} ranks: "
                f"{self.replicas} does not"
            )
        shards = self.shard_ranks
        if self.kind == "fsdp2" and shards == 1 and self.replicas > 1:
            raise DeviceError(
                f"choose fewer replicas, or the sharding replicate: {self.replicas} replicas on "
                f"{self.world_size} ranks leave shard groups of one rank, so nothing is sharded"
            )
        keep = self.reshard_after_forward
        if keep is not None and not isinstance(keep, bool) and (keep < 2 or shards % keep):
            raise DeviceError(
                f"choose reshard_after_forward from 2 up so that it divides {shards} ranks, or no "
                f"(False) to keep parameters whole: {keep} does not divide a shard group"
            )
        least = shards if self.kind == "fsdp2" else 2
        over = self.states_over
        if over and (over < least or over % shards or self.world_size % over):
            raise DeviceError(
                f"choose states_over as a multiple of {least} that divides {self.world_size} "
                f"ranks: {over} is not"
            )

    def _require_dtypes(self) -> None:
        for name, known in (("param_dtype", _PARAM_DTYPES), ("reduce_dtype", _REDUCE_DTYPES)):
            dtype = getattr(self, name)
            if dtype and dtype not in known:
                raise DeviceError(
                    f"choose {_listed(known, 'or')} for {name}, or leave it out: mixed precision "
                    f"policies cannot cast to '{dtype}' here"
                )

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the parameters; 1 where each has all."""
        return self.world_size // self.replicas if self.kind == "fsdp2" else 1

    @property
    def has_buckets(self) -> bool:
        """Whether DDP's buckets hold all gradients."""
        return self.kind in ("ddp", "zero1")

    def shard_elements(self, shape: Sequence[int]) -> int:
        """Elements of the rows of one rank (`shard_shape`)."""
        return math.prod(shard_shape(shape, self.shard_ranks))

    def summed_bytes(self, dtype: str) -> int:
        """Of an element of a whole gradient that is added to before it is reduced."""
        return element_bytes(self.reduce_dtype or self.param_dtype or dtype)

    def state_elements(self, shape: Sequence[int]) -> int:
        """Elements of one rank's part of an optimizer state of a parameter that it updates."""
        parts = self.states_over // self.shard_ranks if self.kind == "fsdp2" else 1
        return -(-self.shard_elements(shape) // max(parts, 1))


NO_SHARDING = Sharding()
UNTIMED = "the time of communication is not counted"
MASTER_BYTES = 4  # of an element of a parameter that a policy casts: it is held in float32


def shard_shape(shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Of one rank's rows: equal on all, so the last ones are padded, as FSDP2 does."""
    first = shape[0] if shape else 1
    return (-(-first // ranks), *shape[1:])


def element_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _listed(words: Sequence[str], link: str) -> str:
    return f"{', '.join(words[:-1])} {link} {words[-1]}" if len(words) > 1 else words[0]


_Item = tuple[Op, ...]  # ops that run as one: those of a block in one phase, or one op alone


@dataclass(frozen=True)
class Unit:
    """A block: ops start..stop-1 in forward, and back_start..back_stop-1 in backward."""

    path: str
    start: int
    stop: int
    back_start: int
    back_stop: int


def with_units(
    graph: TrainingGraph, ops_of: Mapping[str, Sequence[str]]
) -> tuple[TrainingGraph, list[Unit]]:
    """`graph` with its ops in an order in which each block runs as one, and the place of each."""
    # Blocks are chosen on this graph of the whole step, so that the measure stays the whole step.
    path_of = {op: path for path, names in ops_of.items() for op in names}
    n = graph.n_forward
    phases = [_items(graph.ops[:n], path_of), _items(graph.ops[n:], path_of)]
    ordered = tuple(op for items in phases for item in _in_order(items) for op in item)
    places: dict[str, list[int]] = {path: [] for path in ops_of}
    for i, op in enumerate(ordered):
        if op.name in path_of:
            places[path_of[op.name]].append(i)
    units: list[Unit] = []
    for path, found in places.items():
        forward, backward = [i for i in found if i < n], [i for i in found if i >= n]
        units.append(Unit(path, forward[0], forward[-1] + 1, backward[0], backward[-1] + 1))
    units.sort(key=lambda unit: unit.start)
    for before, after in pairwise(units):  # backward runs a chain in reverse
        if after.back_start > before.back_start:
            raise CaptureError(
                "narrow the pattern to blocks that feed one another, or plan the whole model with "
                f"remat.rematerialize: block {after.path} runs after {before.path} both in "
                "forward and in backward, so the blocks are branches and not a chain"
            )
    return msgspec.structs.replace(graph, ops=ordered), units


def _items(ops: Sequence[Op], path_of: Mapping[str, str]) -> list[_Item]:
    found: dict[str, list[Op]] = {}
    for op in ops:
        path = path_of.get(op.name)
        found.setdefault(f"op {op.name}" if path is None else f"block {path}", []).append(op)
    return [tuple(item) for item in found.values()]


def _in_order(items: Sequence[_Item]) -> list[_Item]:
    """The items in their order, but each after those whose values it reads."""
    maker = {value: i for i, item in enumerate(items) for op in item for value in op.outputs}
    readers: list[list[int]] = [[] for _ in items]
    waits_for = [0] * len(items)
    for i, item in enumerate(items):
        reads = {maker[value] for op in item for value in op.inputs if value in maker} - {i}
        waits_for[i] = len(reads)
        for other in reads:
            readers[other].append(i)
    ready = [i for i, count in enumerate(waits_for) if not count]
    done: list[_Item] = []  # by their places: the order changes no more than it must
    while ready:
        i = heapq.heappop(ready)
        done.append(items[i])
        for reader in readers[i]:
            waits_for[reader] -= 1
            if not waits_for[reader]:
                heapq.heappush(ready, reader)
    if len(done) < len(items):
        stuck = next(item[0] for i, item in enumerate(items) if waits_for[i])
        raise CaptureError(
            f"narrow the pattern: op {stuck.name} of {stuck.module or 'the model'} reads what a "
            "block makes, and the block reads its result, so the block cannot run as one"
        )
    return done


def ops_by_block(graph: TrainingGraph, pattern: str) -> dict[str, list[str]]:
    """Names of the ops of each module whose path matches a glob, by their module paths."""
    n = graph.n_forward
    found: dict[str, list[str]] = {}
    for op in graph.ops[:n]:
        if path := _matching(op.module, pattern):
            found.setdefault(path, []).append(op.name)
    if not found:
        modules = list(dict.fromkeys(op.module for op in graph.ops[:n] if op.module))
        raise CaptureError(
            f"name blocks by their paths, such as 'model.layers.*': pattern '{pattern}' matches "
            f"no module of a forward op of {graph.name}; there are {', '.join(modules[:5])}"
        )
    path = ""
    for op in graph.ops[n:]:
        # A backward op without a module, such as a sum of gradients, goes with the op before it.
        path = _matching(op.module, pattern) if op.module else path
        if path in found:
            found[path].append(op.name)
    return found


def _matching(module: str, pattern: str) -> str:
    """The shortest path, of the module or above it, that matches; empty if none does."""
    parts = module.split(".")
    paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((path for path in paths if path and fnmatchcase(path, pattern)), "")


@dataclass
class ParameterGroup:
    path: str  # of the module that is wrapped; empty for the model, the root
    parameters_bytes: int = 0  # in the dtype of the step
    gathered_bytes: int = 0  # with FSDP2's padding
    shard_bytes: int = 0  # of one rank's part, as it is held between steps
    gradients: list[Value] = field(default_factory=list[Value])  # in the order of the outputs

    def add(self, value: Value, sharding: Sharding) -> None:
        elements, size = sharding.shard_elements(value.shape), element_bytes(value.dtype)
        self.gathered_bytes += sharding.shard_ranks * elements * size
        self.shard_bytes += elements * (MASTER_BYTES if sharding.param_dtype else size)
        self.parameters_bytes += math.prod(value.shape) * size

    def reduced_bytes(self, sharding: Sharding) -> tuple[int, int]:
        """Bytes of the buffer that gradients are reduced in, and of this rank's held part."""
        size_bytes, n = sum(value.size_bytes for value in self.gradients), sharding.shard_ranks
        if size_bytes == self.parameters_bytes:  # padded if each parameter has a gradient
            size_bytes = self.gathered_bytes
        size_bytes = -(-size_bytes // n) * n
        own = element_bytes(self.gradients[0].dtype)
        elements = size_bytes // own
        reduced = element_bytes(sharding.reduce_dtype) if sharding.reduce_dtype else own
        held = MASTER_BYTES if sharding.param_dtype else own  # as parameters are held
        return elements * reduced, elements // n * held


def wrapped_groups(
    graph: TrainingGraph, units: Sequence[Unit], sharding: Sharding
) -> tuple[list[ParameterGroup], ParameterGroup]:
    """A group for each unit, and that of the root: what no single unit reads or makes."""
    groups, root = [ParameterGroup(unit.path) for unit in units], ParameterGroup("")
    unit_of = unit_of_op(units)
    readers: dict[str, set[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            readers.setdefault(name, set()).add(unit_of.get(i, -1))
    for value in graph.values:
        if value.kind == "parameter":
            own = readers.get(value.name, set())
            k = own.pop() if len(own) == 1 else -1  # the root has what several read
            (root if k < 0 else groups[k]).add(value, sharding)
    for name in dict.fromkeys(graph.outputs):
        value = graph.value_by_name[name]
        if value.kind == "gradient":
            k = unit_of.get(graph.op_index[value.producer], -1)
            (root if k < 0 else groups[k]).gradients.append(value)
    return groups, root


def unit_of_op(units: Sequence[Unit]) -> dict[int, int]:
    """The place of its unit for each op that is in one, forward and backward."""
    return {
        i: k
        for k, unit in enumerate(units)
        for i in (*range(unit.start, unit.stop), *range(unit.back_start, unit.back_stop))
    }


def communicates(graph: TrainingGraph) -> bool:
    """Whether other ranks take part in a step, by collectives or by a wrapper's communication."""
    wrapped = (GATHER, UNSHARD, RESHARD, COPY_IN, REDUCE)
    spaces = tuple(f"{name}." for name in NAMESPACES)
    return any(op.target in wrapped or op.target.startswith(spaces) for op in graph.ops)
