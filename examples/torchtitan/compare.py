"""torchtitan's policies beside plans for their peaks: `python examples/torchtitan/compare.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("train.py")
POLICIES = {"default": "selective", "eager": "selective, every other product", "full": "full"}
"""Of graph_trainer, with what they are."""


def run(*words: str) -> dict[str, Any]:
    """What a training found, in a process of its own."""
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    none = run("graph", "none")

    def time(found: dict[str, Any]) -> str:
        return f"+{found['time_us'] / none['time_us'] - 1:.1%}"

    def mib(found: dict[str, Any], how: str) -> str:
        return f"{found[f'{how}_bytes'] / 2**20:.1f} MiB"

    print("| policy | peak, predicted | measured | time | a plan at that peak: time |")
    print("|---|--:|--:|--:|--:|")
    print(f"| none | {mib(none, 'predicted')} | {mib(none, 'measured')} | | |")
    for policy, title in POLICIES.items():
        theirs = run("graph", policy)
        ours = run("graph", "remat", f"{theirs['predicted_bytes']}B")
        peaks = f"{mib(theirs, 'predicted')} | {mib(theirs, 'measured')}"
        print(f"| {title} | {peaks} | {time(theirs)} | {time(ours)} |", flush=True)
    compiled = run("core", "memory-budget")
    title = "core, memory budget 0.5, Inductor's code"
    print(f"| {title} | | {mib(compiled, 'measured')} | | |")


if __name__ == "__main__":
    main()
