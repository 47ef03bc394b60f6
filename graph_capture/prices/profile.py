"""Profiles: measured prices as a file, and their use in place of measuring.

A profile names each op by its `price_key`, so it serves every model in which the same op occurs.
Beside each price stands the op's work, so that a model of the device can be fitted to it
(`roofline.py`). The format is JSON, stated in `docs/files.md`.

One that was measured on CUDA is of device ``cuda``, with the driver's title of it. It also serves
the device of the table that the title names (`modelled.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import fx

from remat.graph_capture.devices.device_table import CPU, CUDA, is_cuda
from remat.graph_capture.devices.link_speeds import LinkSpeeds, are_speeds
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.devices.rank_links import RankLinks, wrong_in
from remat.graph_capture.errors import ProfileError, TextError, option
from remat.graph_capture.files.contents import read_contents
from remat.graph_capture.files.json_text import decoded
from remat.graph_capture.graph_rules import are_figures
from remat.graph_capture.joint.nodes import target_name
from remat.graph_capture.prices.op_work import Work
from remat.graph_capture.prices.price_cache import Price, WholeStep, are_times, is_price

SCHEMA_VERSION = 1


class ProfiledOp(Price, frozen=True, array_like=False):
    """The price of an op, with its work: arithmetic and traffic."""

    work: Work = Work()


class Profile(msgspec.Struct, frozen=True):
    """The measured ops of one device.

    Attributes
    ----------
    device : ``cpu``, ``cuda``, or the name of a device of the table. title : the very machine.
    torch : the version that ran the ops. ops : by `price_key`.
    versions : of what else ran them: on a CUDA device its runtime, cuDNN and driver.
    steps : on a CPU, the times of whole steps, by the hash of their graph.
    links : to other memory; None in profiles of releases that did not measure them.
    ranks : the links between ranks, if these were measured together.
    """

    device: str
    title: str
    torch: str
    ops: dict[str, ProfiledOp]
    versions: dict[str, str] = {}
    steps: dict[str, WholeStep] = {}
    schema_version: int = SCHEMA_VERSION
    links: LinkSpeeds | None = None
    ranks: RankLinks | None = None

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` reads it back to an equal profile."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "the file") -> Profile:
        """Read a profile written by `to_json`.

        Raises
        ------
        ProfileError : the text is no profile, or of another schema version.
        """
        again = "measure it again with: remat profile MODEL -o FILE"
        try:
            found = decoded(data, cls)
        except TextError as error:
            raise ProfileError(
                f"{name} is no profile of this release ({error}): {again}"
            ) from error
        if found.schema_version != SCHEMA_VERSION:
            raise ProfileError(
                f"{name} has schema version {found.schema_version}, this release reads "
                f"{SCHEMA_VERSION}: {again}"
            )
        wrong = [key for key, one in found.ops.items() if not _is_sound(one)]
        if wrong:
            raise ProfileError(f"{name} has a price that cannot be, of {wrong[0]}: {again}")
        if not all(are_times(step) for step in found.steps.values()):
            raise ProfileError(f"{name} has a time that cannot be, of a whole step: {again}")
        links = found.links and [pair for pair in (found.links.host, found.links.nvme) if pair]
        if not all(map(are_speeds, links or ())):
            raise ProfileError(f"{name} has a link that cannot be: {again}")
        if found.ranks is not None and wrong_in(found.ranks):
            raise ProfileError(f"{name} has a link that cannot be, between ranks: {again}")
        return found


def _is_sound(one: ProfiledOp) -> bool:
    return is_price(one) and are_figures(one.work.flops, one.work.moved_bytes)


def as_profile(profile: Profile | str | Path | None) -> Profile | None:
    """`profile` itself, or the one in the file of that name.

    Raises
    ------
    ProfileError : it is no profile. FileError : it cannot be read.
    """
    if profile is None or isinstance(profile, Profile):
        return profile
    return Profile.from_json(read_contents(profile), str(profile))


def taken(needed: dict[str, fx.Node], profile: Profile, meter: Meter) -> Mapping[str, Price]:
    """The prices of `profile`, by `price_key`.

    Raises
    ------
    ProfileError : it is of another kind of device; or of another machine, and lacks `needed` ops.
    """
    kind, shown = (CUDA, "a CUDA device") if is_cuda(meter.device) else (CPU, "a CPU")
    if profile.device != kind:
        raise ProfileError(
            f"the profile is of {profile.device}, not of {shown}: "
            f"plan for {option('device', profile.device)}"
        )
    missing = [node for key, node in needed.items() if key not in profile.ops]
    if missing and profile.title != meter.title:
        raise ProfileError(
            f"the profile of {profile.title} lacks {len(missing)} of {len(needed)} distinct ops, "
            f"such as {target_name(missing[0])}: measure this model there, with "
            "remat profile MODEL -o FILE"
        )
    return profile.ops


def note_of(profile: Profile) -> str:
    """What a graph notes on the origin of its prices; warns where torch's version differs."""
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
