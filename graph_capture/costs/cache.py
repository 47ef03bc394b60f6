"""What was measured, kept on disk, and profiles, which are files of it for other machines."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import msgspec
import torch
from msgspec.structs import replace
from torch import fx
from torch.utils import flop_counter

from remat.graph_capture.devices.known_devices import (
    CPU,
    CUDA,
    WorkKind,
    is_cuda,
    kind_of_target,
)
from remat.graph_capture.devices.links import LinkPair, LinkSpeeds, RankLinks, are_speeds, wrong_in
from remat.graph_capture.devices.meter import Meter, cpu_title
from remat.graph_capture.errors import ProfileError, RematError, TextError, option
from remat.graph_capture.files import CacheFiles, Record, decode_json, read_contents
from remat.graph_capture.graph import MOST_BYTES, MOST_US, are_figures
from remat.graph_capture.joint.in_place_ops import STEP_METAS, JoinedTarget
from remat.graph_capture.joint.nodes import argument, target_name, tensors_of

_SCHEMA_VERSION = 8  # of the file. One of another version is not read, and is written anew.
_FILES = CacheFiles("costs", "they are measured again each time", is_sealed=False)
BUSY = 0.05  # of the time, with others on the core; beyond, measured again once it is quiet


class OpCost(msgspec.Struct, frozen=True, array_like=True):
    cost_us: float  # on its device
    workspace_bytes: int = 0  # beyond inputs and outputs, while it runs
    kept_bytes: int = 0  # by results, beyond the storages that the trace gives them
    is_estimate: bool = False  # the op did not run on made data: a guess from its bytes
    away: float = 0.0  # the part of the time in which others had the core
    queue_us: float = 0.0  # of the host, to queue it; 0 where it runs the op itself

    @property
    def alone_us(self) -> float:
        """Of a run beside no others, in which neither host nor device runs ahead."""
        return max(self.cost_us, self.queue_us)


class WholeStepTimes(msgspec.Struct, frozen=True):
    step_us: float  # with every op run once
    keeping_us: float = 0.0  # forward alone takes so much less if it keeps nothing for backward
    again_us: float = 0.0  # the step takes so much longer with forward computed again in segments
    # What `again_us` should be by the costs of the ops; 0 if that step was not run.
    expected_us: float = msgspec.field(default=0.0, name="priced_us")
    away: float = 0.0  # the part of the time in which others had the core


def _is_valid_cost(cost: OpCost) -> bool:
    # A file that was edited may say anything.
    is_size = all(0 <= size < MOST_BYTES for size in (cost.workspace_bytes, cost.kept_bytes))
    are_times = all(0 <= time_us <= MOST_US for time_us in (cost.cost_us, cost.queue_us))
    return are_times and 0 <= cost.away <= 1 and is_size


def _are_times(step: WholeStepTimes) -> bool:
    return all(0 <= time_us <= MOST_US for time_us in msgspec.structs.astuple(step))


def _truer(known: OpCost | WholeStepTimes, anew: OpCost | WholeStepTimes, *, is_less: bool) -> bool:
    if (known.away > BUSY) != (anew.away > BUSY):  # quiet ones say more; of busy ones the lesser
        return known.away > BUSY
    return known.away > BUSY and is_less


class _File(msgspec.Struct):
    schema_version: int
    title: str = ""
    costs: dict[str, OpCost] = msgspec.field(default_factory=dict[str, OpCost], name="prices")
    steps: dict[str, WholeStepTimes] = {}
    bits: dict[str, bool] = {}
    begun: dict[str, list[float]] = {}
    links: dict[str, LinkPair] = {}
    clocks: dict[str, str] = {}


def _known(data: bytes) -> _File | None:
    """What a file of costs holds; None of another version. Raises TextError if it cannot be."""
    if (file := decode_json(data, _File)).schema_version != _SCHEMA_VERSION:
        return None
    times = (one for each in file.begun.values() for one in each)
    if not (
        all(map(_is_valid_cost, file.costs.values()))
        and all(map(_are_times, file.steps.values()))
        and all(0 <= time_us <= MOST_US for time_us in times)
        and all(map(are_speeds, file.links.values()))
    ):
        raise TextError("a cost cannot be")
    return file


def file_name(which: str) -> str:
    slug = "".join(c if c.isalnum() else "-" for c in f"{which}-torch-{torch.__version__}")
    return f"prices-{slug}.json"


class CostCache:
    """What is known of a device and a torch version; `save` merges what is new into the file.
    Without a title it is of this machine's CPU."""

    def __init__(self, title: str | None = None, settings: str = "") -> None:
        self.title = title or cpu_title()
        self._name = file_name(" ".join(filter(None, (self.title, settings))))
        self.path, file = _FILES.path(self._name), self._read()
        # By `cost_key`, by the hash of the step's graph, and as of `kept_bits`.
        self.costs, self.steps, self.bits = file.costs, file.steps, file.bits
        self.begun, self.links = file.begun, file.links  # us of ops without a cost yet; by place
        self.clocks = file.clocks  # of the device, when ops were timed last
        self._saved, self._is_anew = set(self.costs), False
        self._own: set[str] = set()

    @classmethod
    def of(cls, meter: Meter) -> CostCache:
        return cls(meter.title, meter.settings)

    def settled(self, keys: Iterable[str], meter: Meter) -> set[str]:
        kept = {key for key in keys if key in self.costs}
        doubted = {key for key in kept if self.costs[key].away > BUSY}
        return kept - doubted if doubted and meter.is_quiet() else kept

    def has_step(self, key: str, meter: Meter) -> bool:
        kept = self.steps.get(key)
        return kept is not None and not (kept.away > BUSY and meter.is_quiet())

    def keep_costs(self, found: Mapping[str, OpCost]) -> None:
        for key, cost in found.items():
            if (known := self.costs.get(key)) is None:
                self.costs[key] = cost
            elif _truer(known, cost, is_less=cost.cost_us < known.cost_us):
                self.costs[key] = cost
                self._own.add(key)  # or `_merged` would put the file's in its place
        self.save()

    def keep_step(self, key: str, step: WholeStepTimes) -> None:
        known = self.steps.get(key)
        if known is None or _truer(known, step, is_less=step.step_us < known.step_us):
            self.steps[key] = step
        self.save()

    def doubt(self, keys: Collection[str], step_key: str) -> None:
        """Steps are quicker than these costs say: they were taken in a busy time."""
        for key in self.costs.keys() & set(keys):  # as busy as can be, so `settled` asks again
            self.costs[key] = replace(self.costs[key], away=1.0)
            self._own.add(key)
        if step_key in self.steps:
            self.steps[step_key] = replace(self.steps[step_key], away=1.0)
        self.save()

    def forget(self) -> None:
        """What is found anew takes the place of what the file has."""
        self.costs, self.steps, self.begun = {}, {}, {}
        self._is_anew = True

    def _read(self) -> _File:
        return _FILES.read(self._name, _known) or _File(_SCHEMA_VERSION, self.title)

    def keep_begun(self, times: Mapping[str, list[float]]) -> None:
        self.begun |= {key: list(each) for key, each in times.items() if each}
        self.save()

    def save(self) -> None:
        """Add what is new to the file, at once; a folder that cannot be written is warned about."""
        _FILES.merge(self._name, lambda: msgspec.json.encode(self._merged()))

    def _merged(self) -> _File:
        known = self._read()
        costs, steps = {**known.costs, **self.costs}, {**known.steps, **self.steps}
        if not self._is_anew:
            # Where two processes measure an op, the cost saved first counts: a plan may rest on it.
            theirs = {k: v for k, v in known.costs.items() if k not in self._own}
            costs |= theirs
            self.costs |= {k: v for k, v in theirs.items() if k not in self._saved}
        self._saved = set(self.costs)
        begun, bits = known.begun | self.begun, known.bits | self.bits
        self.begun = {key: times for key, times in begun.items() if key not in costs}
        links = known.links | self.links
        clocks = self.clocks or known.clocks
        return _File(_SCHEMA_VERSION, self.title, costs, steps, bits, self.begun, links, clocks)


# A profile's format is stated in `docs/files.md`. It names ops by `cost_key`, so it serves every
# model in which they occur, and has their work, so that a model of the device can be fitted to it
# (`roofline.py`). One of ``cuda`` also serves the device of the table that its title names.

# The work of an op is the same on every device, so a profile of one can fit a model of another.

ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_backward.default"
FUSED_ATTENTION = "aten._scaled_dot_product_"  # how the names of all fused attention ops begin

_COUNTS = cast("Any", flop_counter)


class OpWork(msgspec.Struct, frozen=True):
    kind: WorkKind = "other"
    dtype: str = "float32"  # of the first tensor in floating point
    flops: int = 0  # where torch does not count them
    moved_bytes: int = 0  # of arguments and results


def work_of(node: fx.Node) -> OpWork:
    kind, flops = _kind_of(node), flops_of(node)
    # CUDA's kernels skip the half above the diagonal.
    if kind.startswith("attention") and argument(node, "is_causal"):
        flops //= 2
    floats = (t for t in _read_and_made(node) if t.is_floating_point())
    dtype = next((str(t.dtype).removeprefix("torch.") for t in floats), "float32")
    return OpWork(kind, dtype, flops, moved_bytes(node))


def _kind_of(node: fx.Node) -> WorkKind:
    kind = kind_of_target(target_name(node))
    if kind == "convolution" and argument(node, "groups") > 1:
        channels = argument(node, "weight").meta["val"].shape[1]
        return "depthwise" if channels == 1 else kind
    return kind


def _read_and_made(node: fx.Node) -> list[torch.Tensor]:
    return [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the node's arguments and results; of an expanded tensor, those of its storage."""
    tensors = _read_and_made(node)
    if isinstance(node.target, JoinedTarget):
        for one, meta in zip(node.target.steps, node.meta[STEP_METAS], strict=True):
            # What is changed in place, number by number, is read and written once more.
            if one.in_place and torch.Tag.pointwise in one.op.tags:
                tensors += 2 * [meta["val"]]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def flops_of(node: fx.Node) -> int:
    """Of one run; 0 where torch does not count them."""
    args: list[Any] = [_traced_value(arg) for arg in node.args]
    kwargs = {key: _traced_value(arg) for key, arg in node.kwargs.items()}
    return flops_of_call(node.target, args, kwargs, _traced_value(node))


def flops_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> int:
    """As `flops_of`, of a call that has `made` its result."""
    name = str(target)
    if name.startswith(FUSED_ATTENTION):
        return _flops_of_attention(args, is_backward="backward" in name)
    if name == "aten.convolution_backward.default":
        return _flops_of_convolution_backward(args)
    if name == "aten._grouped_mm.default":
        return _flops_of_grouped_product(args)
    formula = _COUNTS.flop_registry.get(getattr(target, "overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=made))


def _flops_of_grouped_product(args: Sequence[Any]) -> int:
    """Of experts' products: rows, or what is summed, in groups."""
    left, right = args[0].shape, args[1].shape
    by_columns = len(left) == 3 and len(right) == 2  # each group has columns of its own
    return 2 * math.prod(left[1:] if by_columns else left) * right[-1]


def _flops_of_attention(args: Sequence[Any], *, is_backward: bool) -> int:
    """Torch's formula for CUDA's ops, for all fused attention."""
    *first, query, key, value = (tuple(t.shape) for t in args[: 4 if is_backward else 3])
    # Keys may have fewer heads than queries; torch 2.11's formula takes as many only.
    key, value = ((*query[:-2], *of_all[-2:]) for of_all in (key, value))
    if is_backward:
        return _COUNTS.sdpa_backward_flop_count(*first, query, key, value)
    return _COUNTS.sdpa_flop_count(query, key, value)


def _flops_of_convolution_backward(args: Sequence[Any]) -> int:
    """Each gradient takes as many as forward; torch's formula multiplies that of the weights by
    the number of groups."""
    result, x, weight = (tuple(t.shape) for t in args[:3])
    is_transposed, needed = args[7], args[10][:2]
    return sum(needed) * int(_COUNTS.conv_flop_count(x, weight, result, transposed=is_transposed))


def _traced_value(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [_traced_value(item) for item in cast("list[Any]", argument)]
    return argument


class ProfiledOp(OpCost, frozen=True, array_like=False):
    work: OpWork = OpWork()


class Profile(Record, frozen=True):
    """The measured ops of one device.

    Attributes
    ----------
    device : ``cpu``, ``cuda``, or the name of a device of the table. title : the very machine.
    torch : the version that ran the ops. ops : by `cost_key`.
    versions : of what else ran them: on a CUDA device its runtime, cuDNN and driver, and clocks.
    steps : the times of whole steps, by the hash of their graph.
    links : to other memory; None in profiles of releases that did not measure them.
    ranks : the links between ranks, if these were measured together.
    """

    noun: ClassVar[str] = "profile"
    again: ClassVar[str] = "measure it again with remat profile MODEL -o FILE"
    error: ClassVar[type[RematError]] = ProfileError
    device: str
    title: str
    torch: str
    ops: dict[str, ProfiledOp]
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    steps: dict[str, WholeStepTimes] = msgspec.field(default_factory=dict)
    links: LinkSpeeds | None = None
    ranks: RankLinks | None = None

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "the file") -> Self:
        """As of any record; `ProfileError` too for a figure that cannot be."""
        found = super().from_json(data, name)
        if why := found._why_wrong():
            raise ProfileError(f"{cls.again}: {name} {why}")
        return found

    def _why_wrong(self) -> str:
        for key, one in self.ops.items():
            if not (_is_valid_cost(one) and are_figures(one.work.flops, one.work.moved_bytes)):
                return f"has an impossible cost, of {key}"
        if not all(map(_are_times, self.steps.values())):
            return "has an impossible time of a whole step"
        links = (self.links.host, self.links.nvme) if self.links else ()
        if not all(are_speeds(pair) for pair in links if pair):
            return "has an impossible link"
        is_wrong = self.ranks is not None and wrong_in(self.ranks)
        return "has an impossible link between ranks" if is_wrong else ""


def as_profile(profile: Profile | str | Path | None) -> Profile | None:
    """`profile` itself, or the one in the file of that name. Raises ProfileError or FileError."""
    if profile is None or isinstance(profile, Profile):
        return profile
    return Profile.from_json(read_contents(profile), str(profile))


def costs_of_profile(
    needed: dict[str, fx.Node], profile: Profile, meter: Meter
) -> Mapping[str, OpCost]:
    """The costs of `profile`, by `cost_key`. ProfileError for another kind of device, or for
    another machine, if it lacks ops."""
    kind, shown = (CUDA, "a CUDA device") if is_cuda(meter.device) else (CPU, "a CPU")
    if profile.device != kind:
        raise ProfileError(
            f"plan for {option('device', profile.device)}: the profile is of {profile.device}, not "
            f"{shown}"
        )
    missing = [node for key, node in needed.items() if key not in profile.ops]
    if missing and profile.title != meter.title:  # the rest is measured on its own machine
        raise ProfileError(
            "measure this model there, with remat profile MODEL -o FILE: the profile of "
            f"{profile.title} lacks {len(missing)} of {len(needed)} distinct ops, such as "
            f"{target_name(missing[0])}"
        )
    return profile.ops


def note_of(profile: Profile) -> str:
    note = f"measured on {profile.title} with torch {profile.torch}"
    if profile.torch == str(torch.__version__):
        return note
    warnings.warn(
        "measure again with remat profile MODEL -o FILE: the profile is from torch "
        f"{profile.torch} and is used with {torch.__version__}, so times and peaks may differ",
        stacklevel=4,
    )
    return f"{note}, not with this {torch.__version__}"
