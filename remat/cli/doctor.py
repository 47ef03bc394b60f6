"""The verb `doctor`: what is installed here, and whether it works."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from typing import Any

from rich.text import Text

from remat import __version__
from remat.cli.session import REFUSED, Session
from remat.cli.verb import verb
from remat.formats import bytes_text
from remat.graph_capture.devices.device_table import CPU, CUDA
from remat.graph_capture.devices.free_memory import free_bytes
from remat.graph_capture.errors import BudgetError, RewriteError
from remat.graph_capture.unnamed_files.files import missing_calls
from remat.graph_capture.unnamed_files.host_folder import host_folder
from remat.questions.tables import plain_table

PACKAGES = ("torch", "numpy", "ortools", "pulp", "msgspec", "typer", "rich")


@verb()
def doctor_verb(session: Session) -> None:
    """Say which versions are here, and whether torch and the solvers work."""
    found = _findings()
    if session.as_json:
        session.emit(found)
    else:
        _show_findings(session, found)
    if found["refused"] or not (found["torch_ok"] and found["ortools_ok"]):
        raise SystemExit(REFUSED)


def _findings() -> dict[str, Any]:
    import torch

    from remat.graph_capture.files.kept_files import cache_folder

    return {
        "remat": __version__,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
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
    """Free memory; None where the system does not say."""
    try:
        return free_bytes()
    except BudgetError:
        return None


def _known_links() -> dict[str, str]:
    """The links that were measured here before, by device and place."""
    import torch

    from remat.graph_capture.prices.link_prices import kept_links

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
        importlib.import_module("remat.rewriter")
    except RewriteError as error:
        return str(error)
    return ""


def _torch_works() -> bool:
    import torch

    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    return x.grad is not None and x.grad.tolist() == [2.0, 2.0]


def _ortools_works() -> bool:
    """Solve a knapsack of one item, so that a broken native library shows here."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    x = model.add_binary_variable()
    model.maximize(x)
    solved = mathopt.solve(model, mathopt.SolverType.HIGHS)
    return solved.objective_value() == 1.0


def _show_findings(session: Session, found: dict[str, Any]) -> None:
    table = plain_table("what", "found")
    table.columns[1].justify = "left"
    table.add_row("remat", found["remat"])
    table.add_row("python", found["python"])
    for name, version in found["versions"].items():
        table.add_row(name, version)
    if found["refused"]:
        table.add_row("torch is refused", found["refused"])
    table.add_row("torch computes", "yes" if found["torch_ok"] else "no")
    table.add_row("ortools solves", "yes" if found["ortools_ok"] else "no")
    table.add_row("price cache", found["cache_folder"])
    table.add_row("CPU threads", str(found["threads"]))
    free, folder = found["free_bytes"], found["host_folder"]
    table.add_row("free memory", "this system does not say" if free is None else bytes_text(free))
    table.add_row("a CPU's host", f"files in {folder}" if folder else "none: Linux alone has one")
    for name, said in found["links"].items():
        table.add_row(name, Text(said))
    if not found["links"]:
        table.add_row("links", "none measured yet: --host and remat profile do")
    table.add_row("CUDA devices", ", ".join(found["cuda"]) or "none")
    session.out.print(table)
