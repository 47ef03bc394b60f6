"""Costs that were taken beside busy processes: `python -m benchmarks.running.busy_costs`.

Ops are timed while other processes keep all cores busy. These end, and a plan is made with the
costs that were kept, run, and compared with what its costs say. Ends with status 1 if the
measured overhead is further from the predicted one than `MOST_APART`. The machine has to be quiet
but for the processes that this starts; the load before it is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cells.cell import cpu_name
from remat.formats import percent_text, time_text

ROOT = Path(__file__).parents[2]
MOST_APART = 0.03
"""Of the unmodified step: what predicted and measured overhead may differ by."""
BUSY = "import torch; torch.set_num_threads(1); a = torch.randn(512, 512)\nwhile True: a @ a"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that multiply matrices until the block ends."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
        for one in started:
            one.wait()


def remat(cache: Path, *words: str) -> dict[str, Any]:
    """What `remat` prints as JSON with costs kept in that folder."""
    command = [sys.executable, "-m", "remat", *words, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "REMAT_CACHE": str(cache)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def measured(example: str, budget: str, processes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run says that takes its costs beside busy processes, and one after they ended."""
    words = ("run", f"examples/{example}.py", "--budget", budget)
    with tempfile.TemporaryDirectory() as folder:
        with busy(processes):
            beside = remat(Path(folder), *words)
        return beside, remat(Path(folder), *words)


def line(when: str, said: dict[str, Any]) -> str:
    """One line: the unmodified step and the overhead, predicted and measured."""
    plan, base = said["plan"], said["baseline"]
    step = f"{time_text(base['predicted_step_us'])} | {time_text(base['measured_step_us'])}"
    overhead = f"{percent_text(plan['overhead'])} | {percent_text(plan['measured_overhead'])}"
    return f"{when:12} step {step:24} overhead {overhead}"


def main() -> int:
    """Print both runs, and say whether the second one keeps to its prediction."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--examples", nargs="+", default=["gpt"])
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--processes", type=int, default=4)
    asked = parser.parse_args()
    load = " ".join(f"{one:.2f}" for one in os.getloadavg())
    print(f"{cpu_name()}, {time.strftime('%Y-%m-%d')}, load {load}")
    apart = 0.0
    for example in asked.examples:
        beside, after = measured(example, asked.budget, asked.processes)
        print(f"{example} at {asked.budget}, predicted | measured")
        print(line(f"{asked.processes} beside", beside))
        print(line("afterwards", after), flush=True)
        plan = after["plan"]
        apart = max(apart, abs(plan["measured_overhead"] - plan["overhead"]))
    print(f"at most {100 * apart:.1f} points apart")
    return int(apart > MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
