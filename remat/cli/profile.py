"""The verb `profile`: measured prices of ops, kept as a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from remat.cli import options
from remat.cli.session import Session
from remat.cli.verb import verb
from remat.formats import bytes_text, time_text
from remat.graph_capture.devices.device_table import CPU, check_measured
from remat.graph_capture.unnamed_files.host_folder import require_writable
from remat.job import pipeline
from remat.job.opened import load_shown
from remat.job.request import Request
from remat.questions.tables import plain_table

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile


DriveFolder = Annotated[
    Path | None,
    typer.Option("--nvme", metavar="FOLDER", help="a folder on NVMe, whose links to measure too"),
]


@verb()
def profile_verb(
    session: Session,
    model: options.Model,
    top: options.Top = 20,
    device: options.Here = CPU,
    nvme: DriveFolder = None,
    output: options.Output = None,
) -> None:
    """Measure each distinct op of MODEL and the links to the host, for use elsewhere."""
    check_measured(device)
    if nvme is not None:
        require_writable(str(nvme), "nvme")
    loaded = load_shown(model, session.stopwatch, device)
    measured = pipeline.measure_loaded(
        loaded, Request(device=device), session.stopwatch, nvme_path=str(nvme or "")
    )
    session.save(output, measured.to_json(), "profile")
    if session.as_json:
        session.emit(_summary(measured))
    else:
        _show_profile(session, measured, top)


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


def _show_profile(session: Session, measured: Profile, top: int) -> None:
    where = f" on {measured.title}, torch {measured.torch}\n"
    counted = (f"{len(measured.ops)} distinct ops", "bold")
    session.out.print(Text.assemble(counted, where), soft_wrap=True)
    table = plain_table("op", "time", "workspace", "flops", "moved")
    dearest = sorted(measured.ops.items(), key=lambda item: -item[1].cost_us)
    for key, one in dearest[:top]:
        table.add_row(
            key.partition("(")[0],
            time_text(one.cost_us) + (" (guessed)" if one.is_estimate else ""),
            bytes_text(one.workspace_bytes),
            f"{one.work.flops:.2e}" if one.work.flops else "-",
            bytes_text(one.work.moved_bytes),
        )
    session.out.print(table)
    if measured.links is not None:
        for name in ("host", "nvme"):
            pair = getattr(measured.links, name)
            if pair is not None:
                session.out.print(f"{name}: {pair}", markup=False, soft_wrap=True)
