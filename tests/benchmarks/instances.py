"""A small instance, instances as files, and calls of the script that solves them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.paths import ROOT

DIAMOND: dict[str, Any] = {
    "nodes": [
        {"id": "a", "cost": 2, "bytes": 4},
        {"id": "b", "cost": 3, "bytes": 4},
        {"id": "c", "cost": 5, "bytes": 4},
        {"id": "d", "cost": 7, "bytes": 1},
    ],
    "edges": [["a", "b"], ["b", "c"], ["a", "d"], ["c", "d"]],
    "order": ["a", "b", "c", "d"],
}
"""12 bytes with all kept, since a is read last of all; 9 with a computed again."""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.instance", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def written(folder: Path, data: object) -> Path:
    path = folder / "instance.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path
