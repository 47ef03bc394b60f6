"""A model of the time of an op, from its work and a device's rates.

``max(flops / rate, bytes / bandwidth) + launch`` (S. Williams, A. Waterman, D. Patterson,
"Roofline", 2009, https://doi.org/10.1145/1498765.1498785), for products of matrices the sum in
place of the larger. Rates are shares of the device's peaks: from `shares.json` for a kind of op, or
a profile's median over ops of a target, else of a kind.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from remat.graph_capture.chunking.regions import (
    RegionCandidate,
    modelled,
    requested_regions,
    with_regions,
)
from remat.graph_capture.costs.cache import (
    ATTENTION_BACKWARD,
    OpCost,
    OpWork,
    Profile,
    ProfiledOp,
    work_of,
)
from remat.graph_capture.costs.op_times import cost_key
from remat.graph_capture.devices.known_devices import (
    CUDA,
    MODELLED,
    OF_PRODUCTS,
    Device,
    Efficiency,
    device_table,
    modelled_device,
    rounded,
    shares_of,
    table_name,
)
from remat.graph_capture.devices.links import RankLinks
from remat.graph_capture.distributed.collective_costs import links_of_step, with_collective_costs
from remat.graph_capture.errors import ProfileError, option
from remat.graph_capture.graph import TANGENTS, Op, Resident, TrainingGraph, Value
from remat.graph_capture.joint.gradients import with_update_costs
from remat.graph_capture.joint.nodes import argument, tensors_of
from remat.graph_capture.torch_private.core import precision_settings
from remat.graph_capture.tracing.traced_step import Trace

_LAUNCH_PART = 0.1  # an op whose work is a smaller part of a launch shows how long a launch is
_LEAST_WORK = 0.5  # in launches: an op of less work says too little of the rates for a fit


@dataclass(frozen=True)
class Roofline:
    device: Device
    shares: dict[str, Efficiency]  # by target, and by kind for targets without own shares
    launch_us: float  # least time of any op

    @classmethod
    def assumed(cls, device: Device) -> Roofline:
        return cls(device, shares_of(device), device_table().launch_us)

    def cost_us(self, target: str, work: OpWork) -> float:
        share = self.shares.get(target) or self.shares[work.kind]
        return self.launch_us + self._work_us(work, share)

    def fitted(self, profile: Profile) -> Roofline:
        return _Fit(self, profile).roofline()

    def errors(self, profile: Profile) -> list[float]:
        """By op: how far the model fitted to the others is off, ascending, relative to its time."""
        return _Fit(self, profile).errors()

    def _work_us(self, work: OpWork, share: Efficiency) -> float:
        # torch lets tensor cores round float32 to TF32 by a switch for each kind of op.
        of_kind = dict[str, str](zip(("matmul", "convolution"), precision_settings(), strict=False))
        is_rounded = of_kind.get(work.kind) == "tf32"
        is_rounded &= work.dtype == "float32" and "tf32" in self.device.tflops
        dtype = "tf32" if is_rounded else work.dtype
        if work.kind == "depthwise":  # has no products of matrices, for which tensor cores are
            dtype = "float32"
        arithmetic_us = work.flops / self.device.flops_per_us(dtype) / share.rate
        traffic_us = work.moved_bytes / self.device.bytes_per_us / share.bandwidth
        if work.kind == "matmul":  # hides little of its traffic: narrow ones take longer for it
            return arithmetic_us + traffic_us
        return max(arithmetic_us, traffic_us)


@dataclass
class _Fit:
    """How the ops of a profile compare with what is assumed of their kinds."""

    assumed: Roofline
    profile: Profile
    launch_us: float = field(init=False)
    factors: dict[str, dict[str, float]] = field(init=False)  # of times over assumed ones

    def __post_init__(self) -> None:
        assumed, self.factors = self.assumed, defaultdict(dict)
        tiny_us = _LAUNCH_PART * assumed.launch_us
        launches = [one.alone_us for _, one, work_us in self._seen() if work_us < tiny_us]
        least_us = min((one.alone_us for _, one, _ in self._seen()), default=assumed.launch_us)
        # Without an op of hardly any work, a launch is no longer than the quickest op.
        self.launch_us = statistics.median(launches or [min(assumed.launch_us, least_us)])
        for key, one, work_us in self._seen():
            if work_us and one.alone_us - self.launch_us >= _LEAST_WORK * self.launch_us:
                for group in _groups(key, one):
                    self.factors[group][key] = (one.alone_us - self.launch_us) / work_us

    def _seen(self) -> Iterator[tuple[str, ProfiledOp, float]]:
        for key, one in self.profile.ops.items():
            if one.cost_us > 0 and not one.is_estimate:
                share = self.assumed.shares[one.work.kind]
                yield key, one, self.assumed._work_us(one.work, share)

    def roofline(self) -> Roofline:
        shares, known = dict(self.assumed.shares), self.factors
        kinds = {
            group: self.profile.ops[next(iter(found))].work.kind for group, found in known.items()
        }
        for group, kind in {**kinds, **{kind: kind for kind in shares}}.items():
            # The time does not tell whether arithmetic or traffic was slow, so both shares change.
            factor = statistics.median(
                (known.get(group) or known.get(_wider(kind)) or {"": 1.0}).values()
            )
            share = self.assumed.shares[kind]
            shares[group] = Efficiency(share.rate / factor, share.bandwidth / factor)
        return Roofline(self.assumed.device, shares, self.launch_us)

    def errors(self) -> list[float]:
        return sorted(
            abs((self.launch_us + self._factor(key, one) * work_us) / one.alone_us - 1)
            for key, one, work_us in self._seen()
        )

    def _factor(self, key: str, one: ProfiledOp) -> float:
        """The median factor of the other ops of its target, else of its kind; 1 without any."""
        for group in _groups(key, one):
            found = self.factors.get(group, {})
            # An op measured once would otherwise be modelled without error.
            if others := [factor for other, factor in found.items() if other != key]:
                return statistics.median(others)
        return 1.0


def _groups(key: str, one: ProfiledOp) -> Iterable[str]:
    return dict.fromkeys((key.partition("(")[0], one.work.kind, _wider(one.work.kind)))


def _wider(kind: str) -> str:
    """What moves bytes alone is much alike."""
    return kind if kind in OF_PRODUCTS else "other"


# Costs for a device that is not here. The graph is captured on the CPU, as fake CUDA tensors abort
# a process whose torch is built for the CPU alone. Sizes are rounded up to 512 bytes, as CUDA's
# allocator does. Not counted: workspaces of cuBLAS and cuDNN, the context, fragmentation. Budget
# ``auto`` leaves a tenth of the memory for these.

_RNG_STATE_BYTES = 16  # of a CUDA generator: seed and offset
_MOST = 0.9  # part of the measured ops whose largest error is told
_ATTENTION_ROWS, _ATTENTION_COLUMNS = 128, 32  # to which flash attention pads sequence and head


def model_costs(
    trace: Trace, name: str, profile: Profile | None = None, ranks: RankLinks | None = None
) -> TrainingGraph:
    """Costs, workspaces and sizes of a device of the table. `ranks` left out are the profile's,
    else the table's. ProfileError where `profile` is of another device."""
    roofline = assumed = Roofline.assumed(modelled_device(name))
    known: Mapping[str, OpCost] = {}
    if profile is not None:
        # One that was measured on CUDA is of the device that its title names, too.
        own = table_name(profile.title) if profile.device == CUDA else profile.device
        if name not in (profile.device, own):
            raise ProfileError(
                f"plan for {option('device', own or profile.device)}, or make a profile there: the "
                f"profile is of {profile.device}, not {name}; it was measured on {profile.title}"
            )
        roofline, known = assumed.fitted(profile), profile.ops
    graph, nodes = trace.graph, trace.joint.node_of_op
    op_costs = _OpCosts(roofline, known)
    ops = tuple(op_costs.costed(op, nodes.get(op.name)) for op in graph.ops)
    is_mixed = any(op.cost_origin == "measured" for op in ops)
    costed = replace(
        graph, ops=ops, values=tuple(_rounded_value(value) for value in graph.values),
        resident=_resident(graph), device=name, cost_origin="mixed" if is_mixed else MODELLED,
        notes=() if profile is None else _notes(ops, assumed, profile),
    )  # fmt: skip
    costed = with_update_costs(costed, trace.joint, trace.recipe.gradient_release, MODELLED)
    costed = with_collective_costs(costed, nodes, ranks or links_of_step(name, "", profile))
    return with_modelled_chunks(costed, requested_regions(trace), roofline)


def with_modelled_chunks(
    costed: TrainingGraph, found: Sequence[RegionCandidate], roofline: Roofline | None = None
) -> TrainingGraph:
    roofline = roofline or Roofline.assumed(modelled_device(costed.device))
    in_chunks = modelled(costed, roofline.launch_us, rounded)  # compared on the device that trains
    return with_regions(costed, found, in_chunks, lambda _: True)


@dataclass(frozen=True)
class _OpCosts:
    roofline: Roofline
    known: Mapping[str, OpCost]

    def costed(self, op: Op, node: fx.Node | None) -> Op:
        if op.target == TANGENTS:
            return op
        # The trace counts a state of the CPU's generator, which is far larger.
        base_bytes = rounded(_RNG_STATE_BYTES) if op.workspace_bytes else 0
        one = None if node is None or not self.known else self.known.get(cost_key(node))
        if one is not None:
            return replace(
                op, cost_us=one.alone_us, workspace_bytes=base_bytes + one.workspace_bytes,
                cost_origin="estimated" if one.is_estimate else "measured",
            )  # fmt: skip
        cost_us = self.roofline.launch_us
        if node is not None:
            cost_us = self.roofline.cost_us(op.target, work_of(node))
            if op.target == ATTENTION_BACKWARD:  # its flash form keeps sums too
                base_bytes += _attention_sums_bytes(node)
        return replace(op, cost_us=cost_us, workspace_bytes=base_bytes, cost_origin=MODELLED)


def _notes(ops: tuple[Op, ...], assumed: Roofline, profile: Profile) -> tuple[str, ...]:
    total_us = sum(op.cost_us for op in ops)
    measured = [op for op in ops if op.cost_origin == "measured"]
    part = sum(op.cost_us for op in measured) / total_us if total_us else 0.0
    notes = [
        f"{len(measured)} of {len(ops)} ops, {100 * part:.0f} % of the step's time, were measured "
        f"on {profile.title} with torch {profile.torch}"
    ]
    if errors := assumed.errors(profile):
        median, most = statistics.median(errors), errors[int(_MOST * (len(errors) - 1))]
        notes.append(
            f"the model of the others is fitted to {len(errors)} measured ops; each left out in "
            f"turn, it is off by {100 * median:.0f} % in the median, and by at most "
            f"{100 * most:.0f} % in nine of ten"
        )
    return tuple(notes)


def _attention_sums_bytes(node: fx.Node) -> int:
    """Float32 sums that flash attention's backward keeps: of dq, and one a row of the output."""
    query = argument(node, "query")
    shown = tensors_of(query)[0] if isinstance(query, fx.Node) else None
    if not isinstance(shown, Tensor):
        return 0
    batch, heads, rows, columns = shown.shape
    rows = -(-rows // _ATTENTION_ROWS) * _ATTENTION_ROWS
    columns = -(-columns // _ATTENTION_COLUMNS) * _ATTENTION_COLUMNS
    has_own_sums = shown.dtype != torch.float32  # else dq itself takes the sums
    return rounded(4 * batch * heads * rows * (columns * has_own_sums + 1))


def _rounded_value(value: Value) -> Value:
    size_bytes = _RNG_STATE_BYTES if value.kind == "rng_state" else value.size_bytes
    return replace(value, size_bytes=rounded(size_bytes))


def _resident(graph: TrainingGraph) -> Resident:
    extra = dict.fromkeys(("parameter", "buffer", "constant", "input"), 0)
    for value in graph.values:
        if not value.producer and value.kind in extra:  # only what the step reads is known
            extra[value.kind] += rounded(value.size_bytes) - value.size_bytes
    known = graph.resident
    if not known.parameters_bytes:  # a sharding keeps them on the host
        extra["parameter"] = 0
    return replace(
        known,
        parameters_bytes=known.parameters_bytes + extra["parameter"],
        buffers_bytes=known.buffers_bytes + extra["buffer"] + extra["constant"],
        batch_bytes=known.batch_bytes + extra["input"],
    )
