"""Prices on disk: one JSON file a device, torch version and thread count."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import msgspec
import torch

from remat.graph_capture.devices.cpu_meter import device_name

SCHEMA_VERSION = 5


class Price(msgspec.Struct, frozen=True, array_like=True):
    """What one run of an op takes.

    Attributes
    ----------
    cost_us : its time. workspace_bytes : beyond inputs and outputs, while it runs.
    kept_bytes : what its results keep beyond the storages that the trace gives them;
    `mse_loss`, for one, returns a scalar in the storage of all its terms. is_estimate : it
        was not measured.
    """

    cost_us: float
    workspace_bytes: int
    kept_bytes: int = 0
    is_estimate: bool = False


class _File(msgspec.Struct):
    schema_version: int
    device: str
    prices: dict[str, Price]


def cache_folder() -> Path:
    """``$REMAT_CACHE``, or the folder ``remat`` in the user's cache folder."""
    own = os.environ.get("REMAT_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "remat"


class PriceCache:
    """Known prices of a device and torch version; `save` merges new ones into the file.

    Parameters
    ----------
    device : the very machine; left at None, this one's CPU. settings : of it, by which prices
        differ.
    """

    def __init__(self, device: str | None = None, settings: str = "") -> None:
        self.device = device or device_name()
        which = " ".join(filter(None, (self.device, settings)))
        slug = "".join(c if c.isalnum() else "-" for c in f"{which}-torch-{torch.__version__}")
        self.path = cache_folder() / f"prices-{slug}.json"
        self.prices = self._read()

    def _read(self) -> dict[str, Price]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            warnings.warn(f"price cache {self.path} cannot be read: {error}", stacklevel=3)
            return {}
        try:
            file = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            warnings.warn(f"price cache {self.path} is ignored: {error}", stacklevel=3)
            return {}
        return file.prices if file.schema_version == SCHEMA_VERSION else {}

    def save(self) -> None:
        """Write the file atomically; a folder that cannot be written is warned about."""
        file = _File(SCHEMA_VERSION, self.device, {**self._read(), **self.prices})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".prices-")
            with os.fdopen(handle, "wb") as out:
                out.write(msgspec.json.encode(file))
            os.replace(name, self.path)
        except OSError as error:
            warnings.warn(f"prices are not kept: {self.path.parent}: {error}", stacklevel=3)
