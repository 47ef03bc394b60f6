"""The file of a suite's results: a row is there as soon as it is measured."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.cells.cell import commit_here, cpu_name
from benchmarks.comparison.fronts import Row

Key = tuple[str, float]
"""A method and its amount."""


@dataclass
class Results:
    """The file of a suite's results, written after each row."""

    path: Path
    kept: dict[str, Any]
    lock: Lock = field(default_factory=Lock)
    written_s: float = field(default_factory=time.monotonic)

    @classmethod
    def at(cls, path: Path, suite: str) -> Results:
        """The results in the file, or none yet."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"{path}: {error.strerror}; give --out another file") from None
        if path.exists():
            try:
                kept = json.loads(path.read_text())
                held = kept["suite"]
            except (OSError, ValueError, KeyError, TypeError):
                raise SystemExit(f"{path} holds no results; give --out another file") from None
            if held != suite:
                raise SystemExit(f"{path} holds the suite {held}, not {suite}")
            now = facts(suite)
            kept["resumed"] = {key: now[key] for key in ("date", "commit")}
            return cls(path, kept)
        return cls(path, {"suite": suite, **facts(suite), "seconds": 0.0, "rows": {}})

    def rows(self, model: str) -> list[Row]:
        """The rows of a model that were measured."""
        return [Row.read(key, kept) for key, kept in self.kept["rows"].get(model, {}).items()]

    def has(self, model: str, key: Key) -> bool:
        """Whether the row was measured, or does not apply to the model."""
        kept = self.kept["rows"].get(model, {}).get(name_of(key), {"error": "not yet"})
        return "error" not in kept or kept.get("does_not_apply", False)

    def keep(self, model: str, key: Key, found: dict[str, Any]) -> None:
        """Note a row, print it, and write the file."""
        with self.lock:
            self.kept["rows"].setdefault(model, {})[name_of(key)] = found
            self.write()
        print(f"{model:13}{name_of(key):28}{shown(found)}", flush=True)

    def batches(self, model: str, budget: int) -> dict[str, Any]:
        """The largest batches of a model at a budget, by the name of their row."""
        of_model = self.kept.setdefault("batches", {}).setdefault(model, {})
        return of_model.setdefault(str(budget), {})

    def keep_batch(self, model: str, budget: int, key: Key, found: dict[str, Any]) -> None:
        """Note one of them, print it, and write the file."""
        with self.lock:
            self.batches(model, budget)[name_of(key)] = found
            self.write("batches_seconds")
        print(f"{model:13}{name_of(key):28}batch {found.get('batch', found)}", flush=True)

    def write(self, spent_on: str = "seconds") -> None:
        """Write the whole file at once, so that none is left half written; add the time spent."""
        now_s = time.monotonic()
        self.kept[spent_on] = self.kept.get(spent_on, 0.0) + now_s - self.written_s
        self.written_s = now_s
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.kept, indent=1) + "\n")
        beside.replace(self.path)


def facts(suite: str) -> dict[str, Any]:
    """Device, versions, date and commit."""
    device = torch.cuda.get_device_name() if suite == "gpu" else f"{cpu_name()}, 1 thread a step"
    return {
        "device": device, "torch": str(torch.__version__), "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "commit": commit_here(),
    }  # fmt: skip


def name_of(key: Key) -> str:
    """The name of a row in the file."""
    return Row(*key, {}).name


def shown(found: dict[str, Any]) -> str:
    """A row in one line."""
    if "error" in found:
        return found["error"][:80]
    text = f"{found['peak_bytes'] / 1e6:9.1f} MB{100 * found['over_eager']:+8.1f} %"
    if "predicted_bytes" in found:
        off = 100 * (found["predicted_bytes"] / found["peak_bytes"] - 1)
        text += f"  peak off {off:+.2f} %, planned {100 * found['planned_overhead']:.1f} %"
    if "measured_overhead" in found:
        text += f", measured {100 * found['measured_overhead']:.1f} %"
    text += "  SLOW" if found.get("was_slow", False) else ""
    return text + ("" if found.get("is_right", True) else "  WRONG GRADIENTS")
