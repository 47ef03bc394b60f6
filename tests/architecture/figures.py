"""How large the house is, package by package: `python -m tests.architecture.figures`.

Wings are what few use, each in a folder of its own that the core does without. Comments count that
stand inside of a function or a class: they give a reason at a line. The last row is a run of
`remat run` on a model of four layers: the files that it imports, and those with a function that it
enters.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.architecture.import_graph import PACKAGES, arrows, circles, sources
from tests.paths import ROOT

WINGS = ("remat/baselines", "remat/cluster", "remat/whole_step", "rewriter/arena")
TOLD = re.compile(r"#\s*(noqa|fmt:|pyright:|type:|ruff:|----)")
"""Comments for tools."""
MODEL = """
import torch

def factory():
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), (torch.ones(256, 8),)
"""
WALK = """
import inspect, json, sys, threading
entered = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module
        entered.add(frame.f_code.co_filename)
threading.setprofile(note)
sys.setprofile(note)
sys.argv = ["remat", "run", "mlp.py", "--budget", "90%"]
from remat.cli.entry import command
try:
    command()
finally:
    sys.setprofile(None)
    ours = [one for name, one in sys.modules.items() if name.partition(".")[0] == "remat"]
    files = {one.__file__ for one in ours}
    json.dump([len(files), len(files & entered)], open("walked.json", "w"))
"""


class Size(NamedTuple):
    """Of some files: how many, their lines and statements, functions, and comments with reasons."""

    files: int
    lines: int
    statements: int
    functions: int
    reasons: int


def size_of(paths: Iterable[Path]) -> Size:
    """The sum over the files."""
    return Size(*map(sum, zip(*map(_of_file, paths), strict=True)))


def _of_file(path: Path) -> tuple[int, int, int, int, int]:
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    statements = sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)
    with path.open("rb") as file:
        comments = [one for one in tokenize.tokenize(file.readline) if one.type == tokenize.COMMENT]
    reasons = sum(one.start[1] > 0 and not TOLD.match(one.string) for one in comments)
    return 1, len(text.splitlines()), statements, functions, reasons


def _is_text(node: ast.stmt) -> bool:
    """Whether it is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def wing_of(path: Path) -> str:
    """The wing that a file is in; empty for the core."""
    within = path.relative_to(ROOT).as_posix()
    return next((wing for wing in WINGS if within.startswith(f"{wing}/")), "")


def walked() -> tuple[int, int]:
    """Files that `remat run` on a small model imports, and enters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mlp.py").write_text(MODEL)
        where = {**os.environ, "PYTHONPATH": str(ROOT), "REMAT_CACHE": name}
        command = [sys.executable, "-c", WALK]
        subprocess.run(command, cwd=folder, env=where, check=True, stdout=subprocess.DEVNULL)
        imported, entered = json.loads((folder / "walked.json").read_text())
    return imported, entered


def main() -> None:
    """Print the table."""
    of_place: dict[str, list[Path]] = {name: [] for name in (*PACKAGES, *WINGS)}
    for path in sources().values():
        place = wing_of(path) or path.relative_to(ROOT).parts[0]
        of_place[place].append(path)
    core = [path for path in sources().values() if not wing_of(path)]
    rows = {**of_place, "without wings": core, "all": list(sources().values())}
    print(f"{'':20}{'files':>7}{'lines':>8}{'statements':>12}{'functions':>11}{'reasons/100':>13}")
    for name, paths in rows.items():
        size = size_of(paths)
        share = 100 * size.reasons / size.lines
        print(
            f"{name:20}{size.files:7}{size.lines:8}{size.statements:12}{size.functions:11}"
            f"{share:13.2f}"
        )
    found = arrows()
    print(f"circles of imports: {len(circles(found, with_annotations=True))}")
    imported, entered = walked()
    print(f"remat run on four layers imports {imported} files, and enters {entered}")


if __name__ == "__main__":
    main()
