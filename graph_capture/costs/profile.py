"""Profiles: measured costs as a file, and their use in place of measuring.

A profile names each op by its `cost_key`, so it serves every model in which the same op occurs.
Beside each cost stands the op's work, so that a model of the device can be fitted to it
(`roofline.py`). The format is JSON, stated in `docs/files.md`.

One that was measured on CUDA is of device ``cuda``, with the driver's title of it. It also serves
the device of the table that the title names (`roofline.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from torch import fx
from torch.utils import flop_counter

from remat.graph_capture.costs.cache import OpCost, WholeStepTimes, are_times, is_valid_cost
from remat.graph_capture.costs.link_speeds import LinkSpeeds, are_speeds
from remat.graph_capture.devices.known_devices import CPU, CUDA, is_cuda
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.devices.rank_links import RankLinks, wrong_in
from remat.graph_capture.errors import ProfileError, TextError, option
from remat.graph_capture.files import decode_json, read_contents
from remat.graph_capture.graph import are_figures
from remat.graph_capture.joint.in_place_ops import STEP_METAS, JoinedTarget
from remat.graph_capture.joint.nodes import argument, target_name, tensors_of

# The work of an op: its arithmetic and its traffic, from shapes alone.
#
# It is the same on every device, so a profile of one device can fit a model of another.


ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
FUSED_ATTENTION = "aten._scaled_dot_product_"
"""How the names of all fused attention ops begin."""

_COUNTS = cast("Any", flop_counter)

_WorkKind = Literal["matmul", "convolution", "attention", "other"]


class OpWork(msgspec.Struct, frozen=True):
    """What one run of an op takes."""

    kind: _WorkKind = "other"
    dtype: str = "float32"  # of the first tensor in floating point
    flops: int = 0  # where torch does not count them
    moved_bytes: int = 0  # of arguments and results


def work_of(node: fx.Node) -> OpWork:
    kind = _kind_of(target_name(node))
    flops = flops_of(node)
    # torch counts all of causal attention; its kernels skip the half above the diagonal.
    if kind == "attention" and argument(node, "is_causal"):
        flops //= 2
    return OpWork(kind, _dtype_of(node), flops, moved_bytes(node))


def _kind_of(target: str) -> _WorkKind:
    if target.startswith(FUSED_ATTENTION):
        return "attention"
    if target.startswith("aten.convolution"):
        return "convolution"
    is_matmul = target.split(".")[1:2] in (["mm"], ["addmm"], ["bmm"], ["baddbmm"])
    return "matmul" if is_matmul else "other"


def _dtype_of(node: fx.Node) -> str:
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    dtypes = (str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point())
    return next(dtypes, "float32")


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the node's arguments and results; of an expanded tensor, those of its storage."""
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    # What a joined op changes in place, number by number, is read and written once more.
    tensors += 2 * [meta["val"] for meta in _changed_in_place(node)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _changed_in_place(node: fx.Node) -> list[dict[str, Any]]:
    if not isinstance(node.target, JoinedTarget):
        return []
    steps = zip(node.target.steps, node.meta[STEP_METAS], strict=True)
    return [m for one, m in steps if one.in_place and torch.Tag.pointwise in one.op.tags]


def flops_of(node: fx.Node) -> int:
    """Of one run; 0 where torch does not count them."""
    args: list[Any] = [_traced_value(arg) for arg in node.args]
    name = target_name(node)
    if name.startswith(FUSED_ATTENTION):
        return _flops_of_attention(args, is_backward="backward" in name)
    formula = _COUNTS.flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    kwargs = {key: _traced_value(arg) for key, arg in node.kwargs.items()}
    return int(formula(*args, **kwargs, out_val=_traced_value(node)))


def _flops_of_attention(args: list[Any], *, is_backward: bool) -> int:
    """Torch's formula for CUDA's ops, for all fused attention."""
    shapes = [tuple(t.shape) for t in args[: 4 if is_backward else 3]]
    *first, query, key, value = shapes
    # Keys may have fewer heads than queries; torch 2.11's formula takes as many only.
    key, value = ((*query[:-2], *of_all[-2:]) for of_all in (key, value))
    if is_backward:
        return _COUNTS.sdpa_backward_flop_count(*first, query, key, value)
    return _COUNTS.sdpa_flop_count(query, key, value)


def _traced_value(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [_traced_value(item) for item in cast("list[Any]", argument)]
    return argument


_SCHEMA_VERSION = 1


class ProfiledOp(OpCost, frozen=True, array_like=False):
    work: OpWork = OpWork()


class Profile(msgspec.Struct, frozen=True):
    """The measured ops of one device.

    Attributes
    ----------
    device : ``cpu``, ``cuda``, or the name of a device of the table. title : the very machine.
    torch : the version that ran the ops. ops : by `cost_key`.
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
    steps: dict[str, WholeStepTimes] = {}
    schema_version: int = _SCHEMA_VERSION
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
            found = decode_json(data, cls)
        except TextError as error:
            raise ProfileError(
                f"{name} is no profile of this release ({error}): {again}"
            ) from error
        if found.schema_version != _SCHEMA_VERSION:
            raise ProfileError(
                f"{name} has schema version {found.schema_version}, this release reads "
                f"{_SCHEMA_VERSION}: {again}"
            )
        wrong = [key for key, one in found.ops.items() if not _is_sound(one)]
        if wrong:
            raise ProfileError(f"{name} has a cost that cannot be, of {wrong[0]}: {again}")
        if not all(are_times(step) for step in found.steps.values()):
            raise ProfileError(f"{name} has a time that cannot be, of a whole step: {again}")
        links = found.links and [pair for pair in (found.links.host, found.links.nvme) if pair]
        if not all(map(are_speeds, links or ())):
            raise ProfileError(f"{name} has a link that cannot be: {again}")
        if found.ranks is not None and wrong_in(found.ranks):
            raise ProfileError(f"{name} has a link that cannot be, between ranks: {again}")
        return found


def _is_sound(one: ProfiledOp) -> bool:
    return is_valid_cost(one) and are_figures(one.work.flops, one.work.moved_bytes)


def as_profile(profile: Profile | str | Path | None) -> Profile | None:
    """`profile` itself, or the one in the file of that name. Raises ProfileError or FileError."""
    if profile is None or isinstance(profile, Profile):
        return profile
    return Profile.from_json(read_contents(profile), str(profile))


def costs_of_profile(
    needed: dict[str, fx.Node], profile: Profile, meter: Meter
) -> Mapping[str, OpCost]:
    """The costs of `profile`, by `cost_key`.

    Raises ProfileError if it is of another kind of device; or of another machine, and lacks ops.
    """
    kind, shown = (CUDA, "a CUDA device") if is_cuda(meter.device) else (CPU, "a CPU")
    if profile.device != kind:
        raise ProfileError(
            f"the profile is of {profile.device}, not of {shown}: "
            f"plan for {option('device', profile.device)}"
        )
    missing = [node for key, node in needed.items() if key not in profile.ops]
    # On its own machine, what it lacks can be measured.
    if missing and profile.title != meter.title:
        raise ProfileError(
            f"the profile of {profile.title} lacks {len(missing)} of {len(needed)} distinct ops, "
            f"such as {target_name(missing[0])}: measure this model there, with "
            "remat profile MODEL -o FILE"
        )
    return profile.ops


def note_of(profile: Profile) -> str:
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
