"""Prices that a measured profile tells, of this machine or of another."""

from __future__ import annotations

import warnings

import torch
from torch import fx

from remat.graph_capture.devices.device_table import CPU, CUDA, is_cuda
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.errors import ProfileError
from remat.graph_capture.joint.nodes import target_name
from remat.graph_capture.prices.price_cache import Price
from remat.graph_capture.prices.profile import Profile


def taken(needed: dict[str, fx.Node], profile: Profile, meter: Meter) -> dict[str, Price]:
    """The prices of `profile`, if they will do on the meter's device for the `needed` ops."""
    kind, shown = (CUDA, "a CUDA device") if is_cuda(meter.device) else (CPU, "a CPU")
    if profile.device != kind:
        raise ProfileError(
            f"the profile is of {profile.device}, not of {shown}: "
            f"plan for device={profile.device!r}"
        )
    missing = [node for key, node in needed.items() if key not in profile.ops]
    if missing and profile.title != meter.title:
        raise ProfileError(
            f"the profile of {profile.title} lacks {len(missing)} of {len(needed)} distinct ops, "
            f"such as {target_name(missing[0])}: measure this model there, with "
            "remat profile MODEL -o FILE"
        )
    return {
        key: Price(one.cost_us, one.workspace_bytes, one.kept_bytes, one.is_estimate)
        for key, one in profile.ops.items()
    }


def note_of(profile: Profile) -> str:
    """Where the prices come from, as a graph notes it; warns where torch's version differs."""
    note = f"measured on {profile.title} with torch {profile.torch}"
    if profile.torch == str(torch.__version__):
        return note
    warnings.warn(
        f"the profile was measured with torch {profile.torch}, and is used with "
        f"{torch.__version__}: times and peaks may differ. Measure it again with "
        "remat profile MODEL -o FILE",
        stacklevel=4,
    )
    return f"{note}, not with this {torch.__version__}"
