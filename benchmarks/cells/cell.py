"""One cell of the solver benchmark, solved in a process of its own.

In its own process the memory of a solve can be measured, and a solve that overruns can be killed.
`in_own_process` starts it, and kills it with all its children if it overruns. Run as a program,
this file reads one request as JSON from standard input and prints what it found. A request
without a solver asks for the sizes of the graph.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import GAP_OF_FIGURES
from benchmarks.graphs import graph, peak_bytes, working_set_bytes
from remat.schedules.simulate import overhead_of
from remat.solver import Progress, make_solver, solve_within
from remat.solver.backends.processes import end_idle

ROOT = Path(__file__).parents[2]
GRACE_S, GRACE_FACTOR = 60.0, 2.0
"""A process is killed after so many times its limit and so many seconds more."""
CAPTURE_S = 300.0
"""Seconds more if it may have to capture the graph."""
LEAST_BUDGET_BYTES = 1
"""A budget that nothing fits, so that the solver names the least that it knows to do."""
PACKAGES = ("torch", "ortools", "pulp", "numpy")


def in_own_process(request: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """What the request's process printed; an `error` if it failed or was killed."""
    patience_s = GRACE_FACTOR * limit_s + GRACE_S + (0 if "solver" in request else CAPTURE_S)
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cells.cell"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        said, complaint = process.communicate(json.dumps(request), timeout=patience_s)
    except subprocess.TimeoutExpired:
        complaint = f"killed after {patience_s:.0f} s, {limit_s:.0f} s being allowed"
        said = ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 0 and said:
        return json.loads(said)
    last = (complaint.strip().splitlines() or [f"ended with status {process.returncode}"])[-1]
    return {"error": last, "seconds": time.monotonic() - began_s}


def facts(name: str, time_limit_s: float) -> dict[str, Any]:
    """Sizes of a graph, and the least budget that `auto` knows to be feasible; 0 if none."""
    made = graph(name)
    least = solve_within(made, LEAST_BUDGET_BYTES, time_limit_s=time_limit_s, gap=GAP_OF_FIGURES)
    return {
        "ops": len(made.ops),
        "values": len(made.values),
        "peak_bytes": peak_bytes(made),
        "working_set_bytes": working_set_bytes(made),
        "resident_bytes": made.resident.total_bytes,
        "time_us": made.time_us,
        "least_bytes": least.least_feasible_bytes,
        "hash": made.hash,
    }


def solved(name: str, solver: str, budget_bytes: int, time_limit_s: float) -> dict[str, Any]:
    """The figures of one solve."""
    made = graph(name)
    before_bytes = memory_bytes()
    found_at: list[float] = []

    def listen(progress: Progress) -> None:
        if progress.best_overhead is not None and not found_at:
            found_at.append(progress.seconds)

    plain, _, text = solver.partition(":")
    began_s = time.monotonic()
    options = {"gap": GAP_OF_FIGURES, **_options(text)}
    made_solver = make_solver(plain, time_limit_s=time_limit_s, progress=listen, **options)
    result = made_solver.solve(made, budget_bytes)
    seconds = time.monotonic() - began_s
    end_idle()
    is_found = result.schedule is not None
    return {
        "status": result.status,
        "overhead": result.overhead if is_found else None,
        "bound_overhead": overhead_of(result.lower_bound_us, made.time_us),
        "gap": result.gap if is_found else None,
        "seconds": seconds,
        "first_feasible_seconds": (found_at or [seconds])[0] if is_found else None,
        "peak_bytes": result.peak_bytes if is_found else None,
        "least_feasible_bytes": result.least_feasible_bytes or None,
        "solver_memory_bytes": memory_bytes(),
        "memory_before_bytes": before_bytes,
        "message": result.message,
        "versions": {"python": platform.python_version(), **versions()},
        "cpu": cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _options(text: str) -> dict[str, Any]:
    """The options in ``a=1,b=free``; what is no Python literal is a string."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def versions() -> dict[str, str]:
    """Of the packages whose releases a solve depends on."""
    return {name: importlib.metadata.version(name) for name in (*PACKAGES, "remat")}


def memory_bytes() -> int:
    """The most memory that this process, or the largest of its children, had resident.

    On Linux a child begins with its parent's `ru_maxrss`, so this process reads its own from
    ``VmHWM``.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    status = Path("/proc/self/status")
    if not status.exists():
        return max(children, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    lines = status.read_text().splitlines()
    high = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), "0")
    return max(children, int(high) * 1024)


def commit_here() -> str:
    """The short name of the commit that is checked out; empty where there is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def cpu_name() -> str:
    """Processor model and the number of cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{(models or [platform.processor() or platform.machine()])[0]}, {cores} cores"


def main() -> int:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    name, limit_s = request["graph"], request["time_limit_s"]
    if "solver" in request:
        print(json.dumps(solved(name, request["solver"], request["budget_bytes"], limit_s)))
    else:
        print(json.dumps(facts(name, limit_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
