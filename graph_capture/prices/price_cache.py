"""What was measured, kept on disk: one JSON file a device, thread count and torch version.

Two tables stand in it: the price of each distinct op, and the times of each whole step.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import msgspec
import torch

from remat.graph_capture.devices.cpu_meter import cpu_title

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


class _File(msgspec.Struct):
    schema_version: int
    title: str = ""
    prices: dict[str, Price] = {}
    steps: dict[str, WholeStep] = {}


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
    """

    def __init__(self, title: str | None = None, settings: str = "") -> None:
        self.title = title or cpu_title()
        which = " ".join(filter(None, (self.title, settings)))
        slug = "".join(c if c.isalnum() else "-" for c in f"{which}-torch-{torch.__version__}")
        self.path = cache_folder() / f"prices-{slug}.json"
        file = self._read()
        self.prices, self.steps = file.prices, file.steps

    def _read(self) -> _File:
        nothing = _File(SCHEMA_VERSION, self.title)
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return nothing
        except OSError as error:
            warnings.warn(f"price cache {self.path} cannot be read: {error}", stacklevel=3)
            return nothing
        try:
            file = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            warnings.warn(f"price cache {self.path} is ignored: {error}", stacklevel=3)
            return nothing
        return file if file.schema_version == SCHEMA_VERSION else nothing

    def save(self) -> None:
        """Write the file atomically; a folder that cannot be written is warned about."""
        # Another process may have saved since: what it found is kept.
        known = self._read()
        file = _File(
            SCHEMA_VERSION,
            self.title,
            {**known.prices, **self.prices},
            {**known.steps, **self.steps},
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".prices-")
            with os.fdopen(handle, "wb") as out:
                out.write(msgspec.json.encode(file))
            os.replace(name, self.path)
        except OSError as error:
            warnings.warn(f"prices are not kept: {self.path.parent}: {error}", stacklevel=3)
