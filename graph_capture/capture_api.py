"""Capture: from a module and a batch to a graph with costs, by tracing, timing and sharding.

It stands above `tracing/` and `costs/`, which do not know of each other's order. A module of the
name `capture` would hide the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

import msgspec
from torch import nn

from remat.graph_capture.chunking.regions import RegionCandidate
from remat.graph_capture.costs.cache import Profile, as_profile
from remat.graph_capture.costs.op_times import ProgressCallback
from remat.graph_capture.devices.memory import LowerTiers, lower_tiers
from remat.graph_capture.devices.placement import meter_of, resolved_device
from remat.graph_capture.distributed.dtensors import parameters_cast
from remat.graph_capture.distributed.sharded_step import local_step, over_ranks
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.graph import Optimizer, TrainingGraph
from remat.graph_capture.sizes.at_sizes import WorkspacesOf, ranged_graph_of
from remat.graph_capture.sizes.chunks_over_sizes import RegionsInChunks, with_chunks
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import Dynamic
from remat.graph_capture.tracing.recipe import Split, keep_links
from remat.graph_capture.tracing.step_module import LossFunction
from remat.graph_capture.tracing.trace import trace
from remat.graph_capture.tracing.traced_step import Trace


@overload
def capture(
    model: nn.Module, args: tuple[Any, ...] = ..., kwargs: Mapping[str, Any] | None = ..., *,
    loss_fn: LossFunction | None = ..., target: Any = ..., optimizer: Optimizer = ...,
    accumulate: bool = ..., device: str | None = ..., sharding: Sharding = ...,
    profile: Profile | str | Path | None = ..., progress: ProgressCallback | None = ...,
    split: Split | None = ..., measure_again: bool = ..., host: str | SupportsIndex | None = ...,
    nvme: str | None = ..., dynamic: Dynamic,
) -> RangedGraph: ...  # fmt: skip
@overload
def capture(
    model: nn.Module, args: tuple[Any, ...] = ..., kwargs: Mapping[str, Any] | None = ..., *,
    loss_fn: LossFunction | None = ..., target: Any = ..., optimizer: Optimizer = ...,
    accumulate: bool = ..., device: str | None = ..., sharding: Sharding = ...,
    profile: Profile | str | Path | None = ..., progress: ProgressCallback | None = ...,
    split: Split | None = ..., measure_again: bool = ..., host: str | SupportsIndex | None = ...,
    nvme: str | None = ..., dynamic: None = ...,
) -> TrainingGraph: ...  # fmt: skip
def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    device: str | None = None,
    sharding: Sharding = NO_SHARDING,
    profile: Profile | str | Path | None = None,
    progress: ProgressCallback | None = None,
    split: Split | None = None,
    measure_again: bool = False,
    host: str | SupportsIndex | None = None,
    nvme: str | None = None,
    dynamic: Dynamic | None = None,
    outputs: Sequence[str | int] | None = None,
) -> TrainingGraph | RangedGraph:
    """Trace one training step and cost its ops: `trace`, then `measure_costs` or `model_costs`.

    Nothing of the model is changed. On a device that is here its ops are run, on made data.

    Parameters
    ----------
    model : in training mode. args, kwargs : one batch, as forward takes it.
    loss_fn, target : where given, ``loss_fn(output, target)`` (or ``loss_fn(output)``) is
        part of the step, and the rewritten module returns its result.
    optimizer, accumulate : what stays allocated between steps: the state of ``sgd``,
        ``momentum`` or ``adamw``, and gradients that are added to.
    device : left at None, where the model is. Either ``cpu`` or ``cuda``, whose ops are
        measured; or a name of `devices.json`, such as ``h100``, for which they are modelled:
        nothing runs, and the model may be on ``meta``.
    sharding : over ranks; the graph is then that of one rank. With ``fsdp2`` it is for planning
        alone: what is rewritten is the step before it is sharded.
    profile : costs measured before, here or elsewhere, or the file that holds them.
    split : ``exact`` lets a linear head with its cross-entropy run in chunks where that gives
        eager's bits, ``tolerance`` also where a sum then has another order, and ``none`` never.
        Solvers choose. Left out, it is ``exact`` for heads that take a large part of the memory
        of a step on one rank; those that cannot run so stay whole without a warning.
    measure_again : measure ops anew, also those whose costs are kept from before.
    host : memory of the host that a plan may move values to, as bytes, ``"120GiB"`` or ``"auto"``,
        nine tenths of what is free. The graph then has `links`: measured once, and kept; of a
        device that is not here, modelled. On a CPU, files stand for the host.
    nvme : a folder and how much of its drive lies below the host, such as ``"/mnt/nvme:200GiB"``.
    dynamic : dimensions of the batch that vary, such as ``{"tokens": {1: ("seq", 16, 2048)}}``: by
        argument (its name, its position, ``target``) and dimension, a name and the least and the
        largest size; a fourth entry says what sizes are multiples of. The result is a
        `RangedGraph`, and its ``at(seq=512)`` the graph of one size.
    outputs : those of forward's results that training uses, as of `remat.rematerialize`.

    Raises
    ------
    CaptureError : the step cannot be one static graph; names module, line and way out. Or the
        device is unknown or not here, or a tensor is on another one.
    BudgetError : `host` or `nvme` cannot be read, or is more than there is.
    RematError : the profile cannot be read, or does not serve this device and model; or the folder
        of `nvme` is not there, or cannot be written.
    """
    # Before the trace, so that a wrong option is refused at once.
    known, tiers = as_profile(profile), tiers_for(model, device, host, nvme)
    with parameters_cast(model, sharding):  # the plan is of the cast model, as `fully_shard` casts
        traced = trace(
            model, args, kwargs, loss_fn=loss_fn, target=target, optimizer=optimizer,
            accumulate=accumulate, device=device, sharding=sharding, split=split, dynamic=dynamic,
            outputs=outputs,
        )  # fmt: skip

    def costed(one: Trace) -> TrainingGraph:
        return add_costs(
            one, progress=progress, profile=known, measure_again=measure_again, tiers=tiers
        )

    if dynamic:
        ranged = ranged_graph_of(traced, costed, workspaces_by(traced, known))
        if ranged.base.links is not None:
            keep_links(model, traced.graph.hash, ranged.base.links)
        return over_ranks(with_chunks(traced, ranged, chunks_by(progress)), sharding)
    graph = local_step(costed(traced), sharding)
    if graph.links is not None:
        keep_links(model, traced.graph.hash, graph.links)
    return graph


def tiers_for(
    model: nn.Module, device: str | None, host: str | SupportsIndex | None, nvme: str | None
) -> LowerTiers | None:
    """What may be used below the device that a step of `model` is for; None for nothing."""
    if host is None and nvme is None:
        return None
    return lower_tiers(host, nvme, resolved_device(device, model))


def add_costs(
    traced: Trace, *, progress: ProgressCallback | None = None, profile: Profile | None = None,
    measure_again: bool = False, tiers: LowerTiers | None = None, most_bytes: int | None = None,
    chunks: bool = True,
) -> TrainingGraph:  # fmt: skip
    """The trace's graph with the costs of its device: measured here, or modelled by name. A cost
    that `profile` has is taken. `measure_again` leaves aside those that are kept on disk. With
    `tiers`, the graph has links to them. Nothing runs that takes more than `most_bytes`, but for
    single ops. Without `chunks`, those of a device that is here are not timed yet."""
    device = traced.recipe.device
    if traced.recipe.is_modelled:
        from remat.graph_capture.costs.roofline import model_costs

        graph = model_costs(traced, device, profile)
    else:
        from remat.graph_capture.costs.op_costs import measure_costs

        graph = measure_costs(
            traced, progress=progress, profile=profile, measure_again=measure_again,
            most_bytes=most_bytes, chunks=chunks,
        )  # fmt: skip
    if tiers is None:
        return graph
    from remat.graph_capture.costs.measuring import links_below

    links = links_below(device, tiers, profile, measure_again=measure_again)
    return msgspec.structs.replace(graph, links=links)


def chunks_by(progress: ProgressCallback | None = None) -> RegionsInChunks:
    """What adds regions in chunks to the step of one size of a range, measured or modelled."""

    def in_chunks(
        one: Trace, graph: TrainingGraph, found: Sequence[RegionCandidate]
    ) -> TrainingGraph:
        if one.recipe.is_modelled:
            from remat.graph_capture.costs.roofline import with_modelled_chunks

            return with_modelled_chunks(graph, found)
        from remat.graph_capture.costs.op_costs import with_measured_chunks

        return with_measured_chunks(one, graph, progress, found=found)

    return in_chunks


def workspaces_by(traced: Trace, profile: Profile | None = None) -> WorkspacesOf | None:
    """What tells the workspaces of ops, by running or modelling them; None if neither can be."""
    if traced.recipe.is_modelled:
        return lambda one, names: {
            op.name: op.workspace_bytes
            for op in add_costs(one, profile=profile).ops
            if op.name in names
        }
    from remat.graph_capture.costs.op_costs import measured_workspaces

    # On the machine of another's profile, nothing can be run.
    is_here = profile is None or profile.title == meter_of(traced.recipe.device).title
    return measured_workspaces if is_here else None
