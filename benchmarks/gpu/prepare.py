"""What can be done before a GPU is there: plans by modelled costs, and wheels that it lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import remat
from benchmarks.comparison.models import Entry
from benchmarks.gpu.carried import MARGIN, effort_of, write_plan
from benchmarks.gpu.models import DEMO, REHEARSED, demo_entry, table_entry
from benchmarks.gpu.table import DEMO_BUDGET, DEMO_PLAN, EXPANDABLE, HOST, PLANS, plan_name
from remat.budgets import parse_budget
from remat.graph_capture.graph import TrainingGraph
from remat.plan import Plan

DEVICE = "h200"
LIMIT_S = 60.0
WHEELS = (
    "ortools==9.15.6755",
    "pulp==3.3.2",
    "msgspec==0.22.0",
    "immutabledict",
    "protobuf>=6.33,<6.34",
)
"""What the machine lacks, with a protobuf that ortools takes."""
PYTHON, PLATFORMS = "3.12", (28, 27, 17, 5)
MOST_BYTES, MOST_IN_ALL = 60_000_000, 64 << 20
ROOT = Path(__file__).parents[2]


def prepare(folder: Path, only: Sequence[str] | None, *, rehearse: bool) -> None:
    """Fill the folder; print what it holds.

    Raises
    ------
    SystemExit : with the repository it is larger than what may travel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    for name in only or [*REHEARSED, f"{DEMO}-demo", "wheels"]:
        if name == "wheels":
            _fetch(folder / "wheels")
        else:
            _solve(name, folder / "plans", rehearse=rehearse)
    size_bytes = _bytes_of(folder)
    all_bytes = size_bytes + _repository_bytes()
    print(f"{size_bytes} bytes in {folder}, {all_bytes} with the repository")
    if size_bytes > MOST_BYTES or all_bytes > MOST_IN_ALL:
        raise SystemExit(
            f"benchmarks.gpu: name fewer models with --only: {MOST_BYTES} bytes can be carried, "
            f"and {MOST_IN_ALL} with the repository"
        )


def _solve(name: str, folder: Path, *, rehearse: bool) -> None:
    """The plans of a model, as a device of the table would run it."""
    is_demo = name not in REHEARSED
    entry = demo_entry(rehearse=rehearse) if is_demo else table_entry(name, rehearse=rehearse)
    graph, hosted = _captured(entry, None), _captured(entry, HOST)
    budgets = dict.fromkeys((DEMO_PLAN, EXPANDABLE), (DEMO_BUDGET, False)) if is_demo else PLANS
    for variant, (budget, has_host) in budgets.items():
        for asked in (budget, "min"):
            key = plan_name(name, variant) + ("-min" if asked == "min" else "")
            plan = _planned(hosted if has_host else graph, asked, rehearse=rehearse)
            print(name, variant, asked, plan.status, plan.overhead, flush=True)
            if plan.schedule is not None:
                write_plan(folder, key, plan.schedule)
                break
            if not variant.endswith("min"):
                break


def _captured(entry: Entry, host: str | None) -> TrainingGraph:
    with torch.device("meta"):  # a billion weights would take room and time
        trainee = entry.make()
    args = tuple(torch.empty_like(one, device="cpu").zero_() for one in trainee.args)
    with torch.autocast("cpu", torch.bfloat16):
        return remat.capture(trainee.model, args, device=DEVICE, host=host)


def _planned(graph: TrainingGraph, budget: str, *, rehearse: bool) -> Plan:
    asked = parse_budget(budget)
    within = "min" if asked.kind == "min" else f"{MARGIN * asked.bytes_for(graph):.0f}B allocated"
    return remat.solve(graph, within, **effort_of(LIMIT_S, rehearse=rehearse))


def _fetch(folder: Path) -> None:
    """Wheels for the machine's Python; without what they need, which it has."""
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in PLATFORMS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    subprocess.run([*command, "-d", str(folder), *WHEELS], check=True)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _repository_bytes() -> int:
    """Of what git knows or does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())
