"""What was measured, kept on disk: one JSON file a device, thread count and torch version.

Two tables stand in it: the price of each distinct op, and the times of each whole step. A third
has the times of ops whose pricing is under way, so that little is lost if the process is ended.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from remat.graph_capture.devices.cpu_meter import cpu_title
from remat.graph_capture.errors import TextError
from remat.graph_capture.files.contents import read_contents, write_contents
from remat.graph_capture.files.json_text import decoded
from remat.graph_capture.graph_rules import MOST_BYTES, MOST_US

SCHEMA_VERSION = 6
"""Of the file. One of another version is not read, and is written anew."""


class Price(msgspec.Struct, frozen=True, array_like=True):
    """What one run of an op takes.

    Attributes
    ----------
    cost_us : its time. workspace_bytes : beyond inputs and outputs, while it runs.
    kept_bytes : what its results keep beyond the storages that the trace gives them.
    is_estimate : the op did not run on made data, so its time is guessed from its bytes.
    """

    cost_us: float
    workspace_bytes: int = 0
    kept_bytes: int = 0
    is_estimate: bool = False


class WholeStep(msgspec.Struct, frozen=True):
    """Times of a step that was run as a whole (`step_time.py`).

    Attributes
    ----------
    step_us : the step with every op run once.
    keeping_us : how much less forward alone takes if it keeps nothing for backward.
    again_us : how much longer the step takes with its forward computed again in segments.
    priced_us : what `again_us` should be by the prices of the ops; 0 if that step was not run.
    """

    step_us: float
    keeping_us: float = 0.0
    again_us: float = 0.0
    priced_us: float = 0.0


def is_price(price: Price) -> bool:
    """Whether an op can take that; a file that was edited may say anything."""
    sizes = price.workspace_bytes, price.kept_bytes
    return 0 <= price.cost_us <= MOST_US and all(0 <= size < MOST_BYTES for size in sizes)


def are_times(step: WholeStep) -> bool:
    """Whether a step can take these."""
    return all(0 <= time_us <= MOST_US for time_us in msgspec.structs.astuple(step))


class _File(msgspec.Struct):
    schema_version: int
    title: str = ""
    prices: dict[str, Price] = {}
    steps: dict[str, WholeStep] = {}
    begun: dict[str, list[float]] = {}


def cache_folder() -> Path:
    """``$REMAT_CACHE``, or the folder ``remat`` in the user's cache folder."""
    own = os.environ.get("REMAT_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "remat"


class PriceCache:
    """What is known of a device and a torch version; `save` merges what is new into the file.

    Parameters
    ----------
    title : of the device, as its meter has it; left at None, this machine's CPU.
    settings : of the device, by which prices differ.

    Attributes
    ----------
    prices : by `price_key`. steps : by the hash of the step's graph.
    begun : times of ops that have no price yet, in microseconds.
    """

    def __init__(self, title: str | None = None, settings: str = "") -> None:
        self.title = title or cpu_title()
        which = " ".join(filter(None, (self.title, settings)))
        slug = "".join(c if c.isalnum() else "-" for c in f"{which}-torch-{torch.__version__}")
        self.path = cache_folder() / f"prices-{slug}.json"
        file = self._read()
        self.prices, self.steps, self.begun = file.prices, file.steps, file.begun

    def _read(self) -> _File:
        nothing = _File(SCHEMA_VERSION, self.title)
        try:
            if not self.path.exists():
                return nothing
            file = decoded(read_contents(self.path), _File)
        except (OSError, TextError) as error:
            warnings.warn(f"price cache {self.path} is ignored: {error}", stacklevel=3)
            return nothing
        if file.schema_version != SCHEMA_VERSION:
            return nothing
        times = (one for each in file.begun.values() for one in each)
        if not (
            all(map(is_price, file.prices.values()))
            and all(map(are_times, file.steps.values()))
            and all(0 <= time_us <= MOST_US for time_us in times)
        ):
            warnings.warn(f"price cache {self.path} is ignored: a price cannot be", stacklevel=3)
            return nothing
        return file

    def keep_begun(self, times: Mapping[str, list[float]]) -> None:
        """Keep the times of ops that are being priced."""
        self.begun |= {key: list(each) for key, each in times.items() if each}
        self.save()

    def save(self) -> None:
        """Write the file atomically; a folder that cannot be written is warned about."""
        # Another process may have saved since: what it found is kept.
        known = self._read()
        prices, begun = {**known.prices, **self.prices}, {**known.begun, **self.begun}
        self.begun = {key: times for key, times in begun.items() if key not in prices}
        steps = {**known.steps, **self.steps}
        file = _File(SCHEMA_VERSION, self.title, prices, steps, self.begun)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_contents(self.path, msgspec.json.encode(file))
        except OSError as error:
            warnings.warn(f"prices are not kept: {self.path.parent}: {error}", stacklevel=3)
