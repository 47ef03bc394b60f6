"""The verb `profile`: measured costs of ops, kept as a file."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from remat import __version__
from remat.cli.session import REFUSED, Session
from remat.cli.verb import verb
from remat.formats import bytes_text, plain_table, time_text
from remat.graph_capture.devices.known_devices import CPU, CUDA, check_measured
from remat.graph_capture.devices.memory import free_bytes
from remat.graph_capture.errors import BudgetError, RewriteError
from remat.graph_capture.spill_files import host_folder, missing_calls, require_writable
from remat.job import pipeline
from remat.job.plan_source import load_shown
from remat.job.request import NAMED_BY_TORCH, Request

if TYPE_CHECKING:
    from remat.graph_capture.costs.cache import Profile


@verb(("device",))
def profile_verb(
    session: Session, model: str, request: Request, top: int = 20, nvme: Path | None = None,
    output: Path | None = None,
) -> None:  # fmt: skip
    """Measure the ops of MODEL and the links to the host, to plan on another machine."""
    from remat.graph_capture.costs.measuring import measure

    if request.device != NAMED_BY_TORCH:
        check_measured(request.device)  # a device of the table has no ops to measure
    if nvme is not None:
        require_writable(str(nvme), "nvme")
    loaded, request = load_shown(model, session.stopwatch, request)
    with session.stopwatch.stage("capture", "tracing the training step"):
        traced = pipeline.trace_loaded(loaded, request)
    with session.stopwatch.stage("profile", "timing ops") as progress:
        kept = measure(traced, nvme_path=str(nvme or ""), progress=progress)
    session.save(output, kept.to_json(), "profile")
    session.answer(_summary(kept), *_profile_screen(kept, top))


def _summary(measured: Profile) -> dict[str, object]:
    kinds = Counter(one.work.kind for one in measured.ops.values())
    return {
        "device": measured.device,
        "title": measured.title,
        "torch": measured.torch,
        "versions": measured.versions,
        "ops": len(measured.ops),
        "estimated": sum(one.is_estimate for one in measured.ops.values()),
        "kinds": dict(kinds),
        "links": msgspec.to_builtins(measured.links),
    }


def _profile_screen(measured: Profile, top: int) -> Iterator[RenderableType]:
    where = f" on {measured.title}, torch {measured.torch}\n"
    counted = (f"{len(measured.ops)} distinct ops", "bold")
    yield Text.assemble(counted, where)
    table = plain_table("op", "time", "workspace", "flops", "moved")
    dearest = sorted(measured.ops.items(), key=lambda item: -item[1].cost_us)
    for key, one in dearest[:top]:
        table.add_row(
            key.partition("(")[0],  # the rest is shapes, which would fill the line
            time_text(one.cost_us) + (" (guessed)" if one.is_estimate else ""),
            bytes_text(one.workspace_bytes),
            f"{one.work.flops:.2e}" if one.work.flops else "-",
            bytes_text(one.work.moved_bytes),
        )
    yield table
    for name in ("host", "nvme"):
        if pair := getattr(measured.links, name, None):
            yield Text(f"{name}: {pair}")


_PACKAGES = ("torch", "numpy", "ortools", "pulp", "msgspec", "typer", "rich")


@verb()
def doctor_verb(session: Session) -> None:
    """Check this installation: versions, devices, whether torch and the solvers work."""
    found = _findings()
    session.answer(found, _findings_table(found))
    if found["refused"] or not (found["torch_ok"] and found["ortools_ok"]):
        raise SystemExit(REFUSED)


def _findings() -> dict[str, Any]:
    import torch

    from remat.graph_capture.files import cache_folder

    return {
        "remat": __version__,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "refused": _refused_release(),
        "torch_ok": _torch_works(),
        "ortools_ok": _ortools_works(),
        "cache_folder": str(cache_folder()),
        "threads": torch.get_num_threads(),
        "free_bytes": _free_bytes(),
        "host_folder": None if missing_calls() else host_folder(),
        "links": _known_links(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _free_bytes() -> int | None:
    """None where the system does not say."""
    try:
        return free_bytes()
    except BudgetError:
        return None


def _known_links() -> dict[str, str]:
    import torch

    from remat.graph_capture.costs.measuring import kept_links

    devices = [CPU, *(f"{CUDA}:{i}" for i in range(torch.cuda.device_count()))]
    return {
        f"{device}, {name}": str(pair)
        for device in devices
        for name, pair in sorted(kept_links(device).items())
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _refused_release() -> str:
    """Why plans are not carried out under this torch; empty where they are."""
    try:
        importlib.import_module("remat.rewriter")  # refuses untested releases of torch
    except RewriteError as error:
        return str(error)
    return ""


def _torch_works() -> bool:
    import torch

    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    return x.grad is not None and x.grad.tolist() == [2.0, 2.0]


def _ortools_works() -> bool:
    from ortools.math_opt.python import mathopt  # an import alone hides a broken native library

    model = mathopt.Model()
    x = model.add_binary_variable()
    model.maximize(x)
    solved = mathopt.solve(model, mathopt.SolverType.HIGHS)
    return solved.objective_value() == 1.0


def _findings_table(found: dict[str, Any]) -> Table:
    table = plain_table("what", "found")
    table.columns[1].justify = "left"  # words, which `plain_table` aligns to the right
    table.add_row("remat", found["remat"])
    table.add_row("python", found["python"])
    for name, version in found["versions"].items():
        table.add_row(name, version)
    if found["refused"]:
        table.add_row("torch is refused", found["refused"])
    table.add_row("torch computes", "yes" if found["torch_ok"] else "no")
    table.add_row("ortools solves", "yes" if found["ortools_ok"] else "no")
    table.add_row("cost cache", found["cache_folder"])
    table.add_row("CPU threads", str(found["threads"]))
    free, folder = found["free_bytes"], found["host_folder"]
    table.add_row("free memory", "this system does not say" if free is None else bytes_text(free))
    table.add_row("a CPU's host", f"files in {folder}" if folder else "none: Linux alone has one")
    for name, said in found["links"].items():
        table.add_row(name, Text(said))
    if not found["links"]:
        table.add_row("links", "none measured yet: --host and remat profile do")
    table.add_row("CUDA devices", ", ".join(found["cuda"]) or "none")
    return table
