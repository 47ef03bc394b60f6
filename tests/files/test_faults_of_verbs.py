"""Every write of the verbs that take a model fails once: the old file stays, and one line says so.

The others, which take a graph or a plan, are in `test_faults.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remat.cli.main import PLANNING, READING, SHOWING, USING
from remat.cli.verb import FIELDS
from tests.files.faults import CALLS, require_unharmed, verb
from tests.rows import rows

MODEL = """
import torch

def factory(batch: int = 4):
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)]
    return torch.nn.Sequential(*layers), (torch.ones(batch, 8),)
"""
SOLVED = ("--budget", "100%", "--solver", "store_all")
WRITERS = {
    "run": ("run", "MODEL", *SOLVED, "-o", "OUT"),
    "run and place": ("run", "MODEL", *SOLVED, "--layout", "OUT"),
    "solve": ("solve", "MODEL", *SOLVED, "-o", "OUT"),
    "solve, an archive": ("solve", "MODEL", *SOLVED, "-o", "OUT"),
    "capture": ("capture", "MODEL", "-o", "OUT"),
    "sweep": ("sweep", "MODEL", "--budgets", "100%", "--solver", "store_all", "-o", "OUT"),
    "fit": ("fit", "MODEL", "--budget", "1MiB", "--most", "8", "--no-check", "-o", "OUT"),
    "profile": ("profile", "MODEL", "-o", "OUT"),
    "rewrite": ("rewrite", "MODEL", "PLAN", "-o", "OUT"),
    "report": ("report", "MODEL", "--plan", "PLAN", "-o", "OUT"),
    "export": ("export", "MODEL", "--as", "trace", "--plan", "PLAN", "-o", "OUT"),
}
CASES = [(name, call) for name in WRITERS for call in CALLS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a plan of it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(MODEL)
    verb("solve", "MODEL", *SOLVED, "-o", "OUT")(folder / "kept.json")
    return folder


@pytest.mark.parametrize(("name", "call"), rows(CASES, lambda case: case == ("capture", "write")))
def test_a_write_that_fails_leaves_all_as_it_was(
    name: str, call: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / ("out.pt2" if "archive" in name else "out.json")
    if name == "fit":  # of sizes whose prices are kept already: their file is not the first written
        verb(*WRITERS[name])(path)
    try:
        require_unharmed(path, verb(*WRITERS[name]), call, monkeypatch)
    finally:
        path.unlink(missing_ok=True)


def test_every_verb_that_writes_is_among_them() -> None:
    every: dict[str, Any] = PLANNING | READING | SHOWING | USING
    writing = {
        name for name, command in every.items() if "output" in command.__signature__.parameters
    }
    assert writing == {words[0] for words in WRITERS.values()}
    assert "output" not in FIELDS
