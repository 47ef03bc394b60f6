"""Prices for a device that is not here: from a profile of it, else from its `Roofline`.

The graph is captured on the CPU, as fake CUDA tensors abort a process whose torch is built for the
CPU alone. The CPU's fused attention stands for the device's flash form: its results have the same
sizes. It keeps its name, and gets the flash form's price and float32 sums here.

Where there is a profile, ops that it lacks are modelled by a fit to it. The graph's notes say how
far off that model is on what was measured.

Sizes are rounded up to 512 bytes, resident ones too, as the CUDA caching allocator does. Not
counted: workspaces of cuBLAS and cuDNN, the context, fragmentation. Budget ``auto`` leaves a tenth
of the memory for these.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, fx

from remat.graph_capture.devices.device_table import (
    CUDA,
    MODELLED,
    modelled_device,
    rounded,
    table_name,
)
from remat.graph_capture.devices.rank_links import RankLinks
from remat.graph_capture.errors import ProfileError
from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.graph_capture.joint.build import TANGENTS
from remat.graph_capture.joint.nodes import argument, tensors_of
from remat.graph_capture.over_ranks.prices import links_of_step, with_collectives_priced
from remat.graph_capture.prices.op_work import ATTENTION_BACKWARD, work_of
from remat.graph_capture.prices.pieces import modelled, with_regions
from remat.graph_capture.prices.price_cache import Price
from remat.graph_capture.prices.profile import Profile
from remat.graph_capture.prices.roofline import Roofline
from remat.graph_capture.prices.sample_inputs import price_key
from remat.graph_capture.splitting.regions import regions_asked
from remat.graph_capture.tracing.one_trace import Trace

RNG_STATE_BYTES = 16
"""Of a CUDA generator: seed and offset."""
MOST = 0.9
"""Part of the measured ops whose largest error is told."""
ATTENTION_ROWS, ATTENTION_COLUMNS = 128, 32
"""Flash attention pads the sequence and the head of its float32 sums to multiples of these."""


def price_modelled(
    trace: Trace, name: str, profile: Profile | None = None, ranks: RankLinks | None = None
) -> TrainingGraph:
    """The trace's graph with the costs, workspaces and sizes of a device of the table.

    Parameters
    ----------
    ranks : links between ranks; left out, those of the profile, or of the table.

    Raises
    ------
    DeviceError : there is no such device. ProfileError : `profile` is of another.
    """
    roofline = assumed = Roofline.assumed(modelled_device(name))
    known: Mapping[str, Price] = {}
    if profile is not None:
        if name not in (profile.device, _name_of(profile)):
            raise ProfileError(f"the profile is of {profile.device}, not of {name}")
        roofline, known = assumed.fitted(profile), profile.ops
    graph, nodes = trace.graph, trace.joint.node_of_op
    pricing = _Pricing(roofline, known)
    ops = tuple(pricing.priced(op, nodes.get(op.name)) for op in graph.ops)
    is_mixed = any(op.price == "measured" for op in ops)
    priced = msgspec.structs.replace(
        graph,
        ops=ops,
        values=tuple(_rounded_value(value) for value in graph.values),
        resident=_resident(graph),
        device=name,
        prices="mixed" if is_mixed else MODELLED,
        notes=() if profile is None else _notes(ops, assumed, profile),
    )
    priced = with_collectives_priced(priced, nodes, ranks or links_of_step(name, "", profile))
    found = regions_asked(trace)
    if not found:
        return priced
    # Bits are compared where the plan is rewritten, on the device that will train.
    in_pieces = modelled(priced, roofline.launch_us, rounded)
    return with_regions(priced, found, in_pieces, lambda _: True)


def _name_of(profile: Profile) -> str:
    """The device of the table that `profile` was measured on, if it was measured on CUDA."""
    return table_name(profile.title) if profile.device == CUDA else profile.device


@dataclass(frozen=True)
class _Pricing:
    """Prices op by op: `known` ones by their keys, else those of the model."""

    roofline: Roofline
    known: Mapping[str, Price]

    def priced(self, op: Op, node: fx.Node | None) -> Op:
        if op.target == TANGENTS:
            return op
        # The trace counts a state of the CPU's generator, which is far larger.
        base_bytes = rounded(RNG_STATE_BYTES) if op.workspace_bytes else 0
        one = None if node is None or not self.known else self.known.get(price_key(node))
        if one is not None:
            return msgspec.structs.replace(
                op, cost_us=one.cost_us, workspace_bytes=base_bytes + one.workspace_bytes,
                price="estimated" if one.is_estimate else "measured",
            )  # fmt: skip
        cost_us = self.roofline.launch_us
        if node is not None:
            cost_us = self.roofline.cost_us(op.target, work_of(node))
            if op.target == ATTENTION_BACKWARD:
                base_bytes += _attention_sums_bytes(node)
        return msgspec.structs.replace(
            op, cost_us=cost_us, workspace_bytes=base_bytes, price=MODELLED
        )


def _notes(ops: tuple[Op, ...], assumed: Roofline, profile: Profile) -> tuple[str, ...]:
    """How much of the step was measured, on which machine, and how far off the model is."""
    total_us = sum(op.cost_us for op in ops)
    measured = [op for op in ops if op.price == "measured"]
    part = sum(op.cost_us for op in measured) / total_us if total_us else 0.0
    notes = [
        f"{len(measured)} of {len(ops)} ops, {100 * part:.0f} % of the step's time, were measured "
        f"on {profile.title} with torch {profile.torch}"
    ]
    errors = assumed.errors(profile)
    if errors:
        median, most = statistics.median(errors), errors[int(MOST * (len(errors) - 1))]
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
    rows = -(-rows // ATTENTION_ROWS) * ATTENTION_ROWS
    columns = -(-columns // ATTENTION_COLUMNS) * ATTENTION_COLUMNS
    has_own_sums = shown.dtype != torch.float32  # else dq itself takes the sums
    return rounded(4 * batch * heads * rows * (columns * has_own_sums + 1))


def _rounded_value(value: Value) -> Value:
    size_bytes = RNG_STATE_BYTES if value.kind == "rng_state" else value.size_bytes
    return msgspec.structs.replace(value, size_bytes=rounded(size_bytes))


def _resident(graph: TrainingGraph) -> Resident:
    """Resident bytes with each parameter, buffer and input of the step rounded up."""
    extra = dict.fromkeys(("parameter", "buffer", "constant", "input"), 0)
    for value in graph.values:
        if not value.producer and value.kind in extra:
            extra[value.kind] += rounded(value.size_bytes) - value.size_bytes
    known = graph.resident
    if not known.parameters_bytes:  # a sharding keeps them on the host
        extra["parameter"] = 0
    return msgspec.structs.replace(
        known,
        parameters_bytes=known.parameters_bytes + extra["parameter"],
        buffers_bytes=known.buffers_bytes + extra["buffer"] + extra["constant"],
        batch_bytes=known.batch_bytes + extra["input"],
    )
