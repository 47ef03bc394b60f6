"""What is asked of a plan: each field of `Request` is an option of every verb that plans."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from remat.budgets import parse_budget
from remat.graph_capture.devices.known_devices import CPU, CUDA, check_device, is_in_table
from remat.graph_capture.devices.memory import LowerTiers, lower_tiers
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding, ShardingKind
from remat.graph_capture.errors import CaptureError, DeviceError, TextError
from remat.graph_capture.files import decode_json, read_contents
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.sizes.symbols import Dynamic, as_symbol, require_one_range
from remat.solver import make_solver
from remat.solver.stopping import DEFAULT_GAP

if TYPE_CHECKING:
    from remat.graph_capture.costs.cache import Profile


NO_BUDGET = ""  # the budget of a request that asks for no solve
NAMED_BY_TORCH = ""  # which device that is, is asked once torch is imported


_WORLD = "world"
_FIELDS = {_WORLD: "world_size"}  # fields of `Sharding` whose key has another name
SHARDING_KEYS = ("kind", _WORLD, *(field.name for field in dataclasses.fields(Sharding)[2:]))


@dataclass(frozen=True)
class Request:
    """What to plan for, on what, how long to try; `remat/cli/options.json` explains each field."""

    budget: str = NO_BUDGET
    host: str = ""
    nvme: str = ""
    solver: str = "auto"
    order: Literal["fixed", "free"] = "fixed"
    time_limit_s: float = 60.0
    gap: float = DEFAULT_GAP
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    split: Literal["none", "exact", "tolerance"] | None = None
    outputs: tuple[str, ...] = ()
    optimizer: Optimizer = "none"
    optimizer_in_backward: bool = False
    accumulate: bool = False
    device: str = NAMED_BY_TORCH
    sharding: Sharding = NO_SHARDING
    profile: Profile | Path | None = None
    measure_again: bool = False

    @property
    def solving(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("keep", "recompute", "order", "gap")}

    @property
    def outputs_of_trace(self) -> tuple[str | int, ...] | None:
        return tuple(int(one) if one.isdecimal() else one for one in self.outputs) or None

    @property
    def is_eager_alone(self) -> bool:
        """Whether compiled code has no such step."""
        asked = self.host, self.nvme, self.optimizer_in_backward, self.split not in (None, "none")
        return any(asked) or self.sharding != NO_SHARDING

    @property
    def is_run_here(self) -> bool:
        # An optimizer that is only named cannot update anything, so its step is planned alone.
        is_here = not is_in_table(self.device) and self.sharding == NO_SHARDING
        return is_here and not self.optimizer_in_backward

    def tiers(self, device: str | None = None, *, is_here: bool | None = None) -> LowerTiers | None:
        """What may be used below the device; `device` is that of a kept graph, if it is one."""
        device = device or self.device or CPU
        return lower_tiers(self.host or None, self.nvme or None, device, is_here=is_here)

    def with_device(self) -> Request:
        if self.device != NAMED_BY_TORCH:
            return self
        import torch  # here, as it takes seconds

        return replace(self, device=CUDA if torch.cuda.is_available() else CPU)

    def checked(self, *, is_kept: bool = False) -> Request:
        """With its profile read. `is_kept` : for a graph of a file, which names its own device."""
        if self.budget != NO_BUDGET:
            parse_budget(self.budget)
        if self.device != NAMED_BY_TORCH:
            check_device(self.device)
        if is_kept and self.outputs:
            raise CaptureError("leave out --outputs, or name a model: a kept step has its own")
        if not is_kept:  # a kept graph's device is known only when its file is read
            self.tiers()
        known = self.read_profile()  # now: a capture takes long, and would be lost to a wrong word
        make_solver(self.solver, order=self.order, gap=self.gap)  # refuses what it does not know
        if self.optimizer_in_backward and self.sharding != NO_SHARDING:
            raise DeviceError(
                "--optimizer-in-backward plans a step on one rank: wrappers for several take "
                "gradients first. Leave out --sharding, or --optimizer-in-backward"
            )
        return replace(self, profile=known)

    def read_profile(self) -> Profile | None:
        if self.profile is None:
            return None
        from remat.graph_capture.costs.cache import as_profile  # a profile imports torch

        return as_profile(self.profile)


DYNAMIC_METAVAR = "ARG:DIM=NAME:LEAST:MOST"
_FORM = re.compile(r"(?P<argument>[^:=]+):(?P<dim>\d+)=(?P<name>[^\W\d]\w*)(?P<sizes>(:[^:]*)*)")


def parse_dynamic(texts: Iterable[str]) -> Dynamic:
    """Each text is ``ARGUMENT:DIMENSION=NAME[:LEAST:LARGEST[:MULTIPLE]]``."""
    found: dict[str | int, dict[int, Any]] = {}
    ranges = list[Any]()
    for text in texts:
        argument, dim, entry = _read_range(text)
        dims = found.setdefault(argument, {})
        if dim in dims:  # a dict would keep the second in silence
            raise CaptureError(f"--dynamic names dimension {dim} of {argument} twice")
        dims[dim] = entry
        if len(entry) > 1:  # a name alone states no range
            ranges.append(as_symbol(entry, f"dimension {dim} of {argument}", 0))
    require_one_range(ranges)
    return found


def _read_range(text: str) -> tuple[str | int, int, tuple[Any, ...]]:
    form = _FORM.fullmatch(text.strip())
    sizes = form["sizes"].split(":")[1:] if form else []
    if form is None or len(sizes) not in (0, 2, 3):
        raise CaptureError(
            f"--dynamic {text!r} cannot be read: give {DYNAMIC_METAVAR}, such as "
            "tokens:1=seq:16:512, or seq:64:512:64 for multiples of 64"
        )
    numbers = [int(size) if re.fullmatch(r"\d+", size) else None for size in sizes]
    if None in numbers:
        raise CaptureError(f"--dynamic {text!r} cannot be read: its sizes must be whole numbers")
    argument = form["argument"]
    # An int is a position among the arguments of forward, as in Python's dynamic=.
    place = int(argument) if argument.isdecimal() else argument
    return place, int(form["dim"]), (form["name"], *numbers)


_FORM_OF_SHARDING = (
    f"give kind={'|'.join(get_args(ShardingKind)[1:])},world=8, or a JSON or TOML file, with any "
    f"of the keys {', '.join(SHARDING_KEYS)}"
)
_TRUTHS = {"yes": True, "no": False}


def parse_sharding(text: str) -> Sharding:
    """Pairs of a key and a value, or the name of a JSON or TOML file that has them."""
    if not text:
        return NO_SHARDING
    given = _of_file(text) if text.endswith((".json", ".toml")) else _of_pairs(text)
    if wrong := [key for key in given if key not in SHARDING_KEYS]:
        raise DeviceError(f"--sharding: there is no key {wrong[0]!r}; {_FORM_OF_SHARDING}")
    values = {_FIELDS.get(key, key): _TRUTHS.get(str(value), value) for key, value in given.items()}
    try:
        return msgspec.convert(values, Sharding, strict=False)  # not strict: numbers are text here
    except msgspec.ValidationError as error:
        # msgspec names its own path; a person wrote the key.
        said = str(error).replace("$.world_size", _WORLD).replace("$.", "")
        raise DeviceError(f"--sharding: {said}; {_FORM_OF_SHARDING}") from error


def _of_pairs(text: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in text.split(",")]
    found = {key.strip(): value.strip() for key, _, value in pairs}
    if not all(equals for _, equals, _ in pairs) or len(found) < len(pairs):
        raise DeviceError(f"--sharding {text} is not one value a key; {_FORM_OF_SHARDING}")
    return found


def _of_file(name: str) -> dict[str, Any]:
    data = read_contents(name)
    try:
        if name.endswith(".json"):
            return decode_json(data, dict[str, Any])
        import tomllib  # few need it, and all would wait for it

        return tomllib.loads(data.decode())
    except (TextError, ValueError) as error:
        raise DeviceError(f"{name} cannot be read: {error}; {_FORM_OF_SHARDING}") from error
