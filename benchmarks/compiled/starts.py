"""How long the first step of a compiled GPT takes: `python -m benchmarks.compiled.starts`.

Each start is a process of its own, that of stock Inductor and that of ``backend="remat"`` in turn.
Its seconds are those from `torch.compile` to the end of the first forward and backward; the model
stands by then. Beside them stand those of processors, compilers of C++ included, which say the same
on a busy machine. There are two kinds of start:

- cold: the folders of Inductor's code and of what remat keeps are empty. So ops are timed too;
- warm: both are as the cold start before has left them.

The GPT is that of `examples/gpt.py`, 6 layers of width 384 on 8 sequences of 256. Ends with status
1 if a warm start planned or timed anything. `--out FILE` keeps the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.gpt import GPT, Sizes
from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.meter import cpu_title

ROOT = Path(__file__).parents[2]
BACKENDS = ("inductor", "remat")
KINDS = ("cold", "warm")
SIZES = Sizes(layers=6, width=384, heads=6, seq=256, batch=8, vocab=1024, dropout=0.0)
TINY = Sizes(layers=1, width=64, heads=2, seq=64, batch=8, vocab=64, dropout=0.0)
BUDGET = "60%"


def start(backend: str, sizes: Sizes, budget: str) -> dict[str, Any]:
    """One start in this process: its seconds, and what remat took of them to plan."""
    torch.manual_seed(0)
    model = GPT(sizes)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1))
    args = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    options: Any = {"budget": budget} if backend == "remat" else None
    began, began_cpu = time.perf_counter(), _processor_s()
    torch.compile(model, backend=backend, options=options)(*args).backward()
    found: dict[str, Any] = {
        "seconds": time.perf_counter() - began, "processor_s": _processor_s() - began_cpu,
    }  # fmt: skip
    if backend == "remat":
        (plan,) = compiled_plans()
        found |= {"planning_s": plan.seconds, "replays": plan.replays}
    return found


def _processor_s() -> float:
    """Seconds of processors that this process has taken, and the compilers that it ran."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def started(backend: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """A start in a process of its own, whose caches are in `folder`."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "REMAT_CACHE": str(folder / "remat"),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.compiled.starts", "--one", backend]
    command += ["--budget", asked.budget, *(["--tiny"] if asked.tiny else [])]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def rounds(asked: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All starts, by kind and backend."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(asked.rounds):
        # Who comes first in a round comes last in the next.
        for backend in BACKENDS if number % 2 == 0 else reversed(BACKENDS):
            with tempfile.TemporaryDirectory() as folder:
                for kind in KINDS:
                    one = started(backend, Path(folder), asked)
                    found.setdefault(f"{kind} {backend}", []).append(one)
                    print(f"{kind} {backend}: {one['seconds']:.2f} s", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Least and median seconds of each kind, and remat's over stock's."""
    lines = [f"{'least | median, s':24}" + "".join(f"{name:>18}" for name in (*BACKENDS, "ratio"))]
    for kind in KINDS:
        for what in ("seconds", "processor_s"):
            of = [[one[what] for one in found[f"{kind} {backend}"]] for backend in BACKENDS]
            least, middle = [min(each) for each in of], list(map(statistics.median, of))
            cells = [*zip(least, middle, strict=True), (least[1] / least[0], middle[1] / middle[0])]
            name = f"{kind}, {what.removesuffix('_s')}"
            lines.append(f"{name:24}" + "".join(f"{a:9.2f} | {b:6.2f}" for a, b in cells))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep what was found."""
    parser = argparse.ArgumentParser(prog="benchmarks.compiled.starts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", default=BUDGET)
    parser.add_argument("--tiny", action="store_true", help="a GPT of one layer, for a test")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=BACKENDS, help="a start in this process")
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps(start(asked.one, TINY if asked.tiny else SIZES, asked.budget)))
        return 0
    found = rounds(asked)
    print(*table(found), sep="\n")
    if asked.out:
        facts = {
            "device": cpu_title(), "torch": str(torch.__version__), "budget": asked.budget,
            "python": platform.python_version(),
        }  # fmt: skip
        asked.out.write_text(json.dumps({**facts, "starts": found}, indent=1) + "\n")
    return 1 if any(one["replays"] for one in found["warm remat"]) else 0


if __name__ == "__main__":
    sys.exit(main())
