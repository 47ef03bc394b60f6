"""Whether two wheels make the same plans: `python -m tests.replay.wheels BEFORE.whl AFTER.whl`.

Each plans ten steps of the examples by modelled costs, which are the same on any machine, and what
is compared is a hash of the steps of each schedule. Ends with 1 where one differs. Wheels are made
by `pip wheel --no-deps .`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.paths import ROOT

ASKED = (
    ("gpt", "l4", "60%"), ("gpt", "l4", "min"), ("gpt", "h100", "70%"), ("gpt", "rtx4090", "80%"),
    ("resnet", "l4", "60%"), ("resnet", "h100", "80%"), ("resnet", "l4", "min"),
    ("unet", "l4", "60%"), ("unet", "h100", "80%"), ("unet", "l4", "min"),
)  # fmt: skip
"""Model, device of the table and budget."""


def hashes(wheel: Path) -> list[str]:
    """One of each schedule that the wheel makes, in the order of `ASKED`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*install, str(folder / "wheel"), str(wheel)], check=True)
        return [_hash(folder, *asked) for asked in ASKED]


def _hash(folder: Path, model: str, device: str, budget: str) -> str:
    plan = folder / "plan.json"
    command = [
        sys.executable, "-m", "remat", "run", str(ROOT / "examples" / f"{model}.py:factory"),
        "--device", device, "--budget", budget, "-o", str(plan),
    ]  # fmt: skip
    # The wheel goes before an installation of this checkout.
    paths = {"PYTHONPATH": str(folder / "wheel"), "REMAT_CACHE": str(folder / "cache")}
    subprocess.run(command, cwd=folder, env={**os.environ, **paths}, check=True,
                   capture_output=True)  # fmt: skip
    steps = json.loads(plan.read_bytes())["schedule"]["steps"]
    return hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:12]


def main() -> int:
    """Print a line for each step; 1 where two hashes differ."""
    parser = argparse.ArgumentParser(prog="tests.replay.wheels", description=__doc__)
    parser.add_argument("wheels", nargs=2, type=Path)
    before, after = map(hashes, parser.parse_args().wheels)
    for asked, old, new in zip(ASKED, before, after, strict=True):
        print(f"{' '.join(asked):20} {old} {new} {'same' if old == new else 'DIFFERENT'}")
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
