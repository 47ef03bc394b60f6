"""What the tutorial's commands print: `python -m benchmarks.tutorial`.

The files and commands are those that stand in docs/tutorial.md. They run in a fresh folder, on one
thread, with no cost known before. What they print is kept in `results/tutorial.json`, and put
below the commands on the page.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells.cell import cpu_name

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "tutorial.md", ROOT / "benchmarks" / "results" / "tutorial.json"
EXPLAIN = "remat show plan.json --explain"
STEPS = ("remat run", EXPLAIN, "python train.py")
"""Beginnings of the commands, in the order of their outputs on the page."""
UNTIL = {EXPLAIN: "held at the peak by"}
"""Where the page leaves a long output."""
COLUMNS = 80
FILE = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
MADE = re.compile(
    r"(?<=^By `python -m benchmarks\.tutorial` on one thread: ).*?(?=\.$)", re.MULTILINE
)


def files(text: str) -> dict[str, str]:
    """The files that a reader of the page writes."""
    return {name: source for source, name in FILE.findall(text)}


def command(text: str, begins: str) -> str:
    """A command of the page, without the words that stand behind it."""
    if begins.startswith("python"):
        return begins
    (line,) = re.findall(rf"^{begins} .*$", text, re.MULTILINE)
    return line.partition("  #")[0].strip()


def ran(text: str) -> dict[str, Any]:
    """All outputs, with the device and the date."""
    outputs: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, source in files(text).items():
            Path(folder, name).write_text(source)
        for begins in STEPS:
            outputs[begins] = _printed(command(text, begins), Path(folder))
    return {
        "device": cpu_name(), "torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d"),
        "outputs": outputs,
    }  # fmt: skip


def _printed(line: str, folder: Path) -> str:
    program, *words = shlex.split(line)
    launch = [sys.executable, *(["-m", "remat"] if program == "remat" else [])]
    alone = {
        "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1", "REMAT_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [*launch, *words], cwd=folder, env={**os.environ, **alone},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{line} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def shown(begins: str, output: str) -> str:
    """What the page shows of an output."""
    part = output.partition(UNTIL[begins])[0] if begins in UNTIL else output
    return "\n".join(line.rstrip() for line in part.strip("\n").splitlines()) + "\n"


def written_into(text: str, kept: dict[str, Any]) -> str:
    """The page with these outputs."""
    parts = [shown(begins, kept["outputs"][begins]) for begins in STEPS]
    blocks = iter(parts)
    if len(SHOWN.findall(text)) != len(parts):
        raise ValueError(f"the tutorial has other outputs than those of {', '.join(STEPS)}")
    made = f"{kept['device']}, torch {kept['torch']}, {kept['date']}"
    return MADE.sub(lambda _: made, SHOWN.sub(lambda _: next(blocks), text))


def main() -> None:
    """Run all, keep what it printed, and write the page anew."""
    text = PAGE.read_text()
    kept = ran(text)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(written_into(text, kept))


if __name__ == "__main__":
    main()
