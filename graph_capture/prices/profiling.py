"""Measuring a `Profile` of a model: the price and the work of each distinct op of its step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from remat.graph_capture.devices.device_table import CPU, CUDA, check_measured, is_cuda
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.devices.rank_links import RankLinks
from remat.graph_capture.over_ranks.measuring import measured_rank_links
from remat.graph_capture.prices.link_prices import measured_speeds
from remat.graph_capture.prices.op_work import Work, work_of
from remat.graph_capture.prices.price_cache import PriceCache
from remat.graph_capture.prices.pricing import examples, price_with
from remat.graph_capture.prices.profile import Profile, ProfiledOp
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.step_module import LossFunction
from remat.graph_capture.tracing.trace import Shown, trace
from remat.graph_capture.unnamed_files.host_folder import require_writable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def profile(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    device: str | None = None,
    nvme: str | None = None,
    group: ProcessGroup | None = None,
    progress: Shown | None = None,
) -> Profile:
    """Measure each distinct op of one training step on this machine, and the links to its host.

    The arguments are those of `remat.capture`, which takes the result as its `profile`, on this
    machine or another. ``Profile.to_json`` makes a file of it.

    Parameters
    ----------
    nvme : a folder on NVMe, whose links are measured too.
    group : ranks whose links are measured too. All of them must call.

    Raises
    ------
    DeviceError : `device` is not of this machine. FileError : a folder cannot be written.
    """
    if device is not None:
        check_measured(device)
    if nvme is not None:
        require_writable(nvme, "nvme")
    # First, so that no rank waits here for one whose model cannot be traced.
    ranks = None if group is None else _rank_links(group, resolved_device(device, model))
    traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target, device=device)
    found = measure(traced, nvme_path=nvme or "", progress=progress)
    return msgspec.structs.replace(found, ranks=ranks)


def _rank_links(group: ProcessGroup, device: str) -> RankLinks:
    return measured_rank_links(group, device, meter_of(device).title)


def measure(traced: Trace, *, nvme_path: str = "", progress: Shown | None = None) -> Profile:
    """The measured ops of a trace, the links of its device, and on a CPU the time of its step."""
    meter, node_of = meter_of(traced.recipe.device), examples(traced.joint)
    cache = PriceCache.of(meter)
    prices = price_with(traced, meter, cache, progress)[1]
    ops = {
        key: ProfiledOp(
            **msgspec.structs.asdict(price),
            work=work_of(node_of[key]) if key in node_of else Work(),
        )
        for key, price in prices.of_key.items()
    }
    kind = CUDA if is_cuda(meter.device) else CPU
    steps = {} if prices.step is None else {traced.joint.timed_hash: prices.step}
    return Profile(
        kind, meter.title, str(torch.__version__), ops, meter.versions, steps,
        links=measured_speeds(meter.device, nvme_path),
    )  # fmt: skip
