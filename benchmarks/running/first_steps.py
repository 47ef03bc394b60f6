"""The one line on the README's GPT: its first steps, from nothing and in the next process.

``python -m benchmarks.running.first_steps`` prints what is logged and when each step has ended,
counted from its call: the first one, the one after it, and one of a smaller batch.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time

from remat.graph_capture.devices.meter import cpu_title

BATCH, LAST = 4, 3


def steps() -> None:
    """Train three steps in this process."""
    import torch

    import remat
    from examples.gpt import factory

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("remat").setLevel(logging.INFO)
    built = factory(BATCH)
    model = remat.rematerialize(built["model"], budget="60%", optimizer="adamw")
    for name, size in (("first", BATCH), ("second", BATCH), ("smaller", LAST)):
        batch = [torch.as_tensor(tensor[:size]) for tensor in built["args"]]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        model(*batch).backward()
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        print(f"{name} step, of {size} rows: {wall_s:.1f} s, {cpu_s:.1f} s of the CPU", flush=True)


def main() -> None:
    """Print the steps of two processes that share a folder of costs and plans."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{cpu_title()}, {time.strftime('%Y-%m-%d')}, load {load:.1f}", flush=True)
    code = "from benchmarks.running.first_steps import steps; steps()"
    with tempfile.TemporaryDirectory() as folder:
        for title in ("from nothing:", "the next process:"):
            print(f"\n{title}", flush=True)
            kept = {**os.environ, "REMAT_CACHE": folder}
            subprocess.run([sys.executable, "-c", code], env=kept, check=True)


if __name__ == "__main__":
    main()
