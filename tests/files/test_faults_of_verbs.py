"""Every write of the verbs that take a model fails once: the old file stays, and one line says so.

The others, which take a graph or a plan, are in `test_faults.py`. And every process of HiGHS dies
once beneath a verb: what it was asked is lost, and nothing else.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat.cli.main import app
from remat.cli.verb import FIELDS
from tests.files.faults import CALLS, require_unharmed, verb
from tests.killed_process import kill_the_first
from tests.limits import AMPLE_S
from tests.remat.cluster.capture import chains
from tests.rows import rows
from tests.solver.graphs.random_graphs import gpt_like

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
    "run, an archive": ("run", "MODEL", "--no-check", *SOLVED, "-o", "OUT"),
    "captured": ("show", "MODEL", "--as", "graph", "-o", "OUT"),
    "rewritten": ("show", "MODEL", "--plan", "PLAN", "--as", "code", "-o", "OUT"),
    "exported": ("show", "MODEL", "--as", "trace", "--plan", "PLAN", "-o", "OUT"),
    "sweep": ("sweep", "MODEL", "--budgets", "100%", "--solver", "store_all", "-o", "OUT"),
    "largest-batch": (
        "largest-batch", "MODEL", "--budget", "1MiB", "--most", "8", "--no-check", "-o", "OUT",
    ),
    "profile": ("profile", "MODEL", "-o", "OUT"),
    "cluster": (
        "cluster", f"{chains.__name__}:small_llama", "--gpus", "8", "--node-size", "4",
        "--batch", "16", "--seq", "32", "-o", "OUT",
    ),
    "report": ("report", "MODEL", "--plan", "PLAN", "-o", "OUT"),
}  # fmt: skip
WITH_HIGHS = ("--solver", "cut", "--time-limit", str(AMPLE_S))
EACH = ("--each-limit", "0.1")
SEARCHING = {
    "run": ("run", "GRAPH", "--budget", "70%", *WITH_HIGHS),
    "sweep": ("sweep", "GRAPH", "--budgets", "70%", *WITH_HIGHS),
    "solvers": ("sweep", "GRAPH", "--budgets", "70%", "--solver", "dtr", *WITH_HIGHS),
    "explained": ("show", "GRAPH", "--explain", "--budget", "70%", *EACH, *WITH_HIGHS),
    "report": ("report", "GRAPH", "--budget", "70%", "-o", "OUT", *WITH_HIGHS),
}
CASES = [(name, call) for name in WRITERS for call in CALLS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a plan of it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(MODEL)
    verb("run", "MODEL", "--no-check", *SOLVED, "-o", "OUT")(folder / "kept.json")
    return folder


@functools.cache
def keep_of(name: str, path: Path) -> None:
    """Have there what a verb keeps for later, such as costs."""
    verb(*WRITERS[name])(path)


@pytest.mark.parametrize(("name", "call"), rows(CASES, lambda case: case == ("captured", "write")))
def test_a_write_that_fails_leaves_all_as_it_was(
    name: str, call: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / ("out.pt2" if "archive" in name else "out.json")
    if name in ("largest-batch", "cluster"):  # what they keep is there then, and not written first
        keep_of(name, path)
    try:
        require_unharmed(path, verb(*WRITERS[name]), call, monkeypatch)
    finally:
        path.unlink(missing_ok=True)


def test_every_verb_that_writes_is_among_them() -> None:
    writing = {
        command.name
        for command in app.registered_commands
        if command.callback and "output" in inspect.signature(command.callback).parameters
    }
    assert writing == {words[0] for words in WRITERS.values()}
    assert "output" not in FIELDS


@pytest.mark.parametrize("name", rows(SEARCHING, lambda name: name == "run"))
def test_a_process_of_highs_that_dies_costs_no_result(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = tmp_path / "graph.json"
    graph.write_bytes(gpt_like(3).to_json())
    kill_the_first(monkeypatch)
    named = {"GRAPH": str(graph), "OUT": str(tmp_path / "out.html")}
    done = CliRunner().invoke(app, [named.get(word, word) for word in SEARCHING[name]])
    assert done.exit_code == 0, done.stderr
    (told,) = (line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert "ended with status -9" in told
    assert "the search goes on without" in told
