"""Every verb refuses a bad file, and one that it cannot write, in one line; and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import remat
from remat.analysis.plan_report import report
from remat.cli.main import app
from tests.files.kinds import GRAPH, SOLVER, kinds

DEEP = b'{"other": ' + b"[" * 100_000
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "deep": (lambda path: path.write_bytes(DEEP), "nested too deeply"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "marked": (lambda path: path.write_bytes(b"\xef\xbb\xbf{}"), "byte order mark"),
    "not UTF-8": (lambda path: path.write_bytes(b'{"steps": "\xff"}'), ""),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
    "missing": (lambda path: None, "No such file or directory"),
    "list": (lambda path: path.write_bytes(b"[]"), "got `array`"),
}
READING = {
    "show": ("show", "BAD"),
    "show, explained": ("show", "BAD", "--explain"),
    "show, exported": ("show", "BAD", "-o", "OUT", "--as", "dot"),
    "run": ("run", "BAD", "--budget", "90%"),
    "sweep": ("sweep", "BAD"),
    "sweep of several solvers": ("sweep", "BAD", "--solver", "full", "--solver", "chen_sqrt"),
    "report": ("report", "BAD", "-o", "OUT"),
    "a plan beside a graph": ("show", "GRAPH", "--plan", "BAD"),
    "a front": ("report", "PLAN", "--front", "BAD", "-o", "OUT"),
    "check": ("check", "MODEL", "BAD"),
    "show, rewritten": ("show", "MODEL", "--plan", "BAD", "--as", "code"),
    "profile of run": ("run", "MODEL", "--budget", "90%", "--profile", "BAD"),
}
WRITING = {
    "run": ("run", "GRAPH", "--budget", "90%", "--solver", SOLVER, "-o", "OUT"),
    "sweep": ("sweep", "GRAPH", "--budgets", "90%", "--solver", SOLVER, "-o", "OUT"),
    "report": ("report", "PLAN", "-o", "OUT"),
    "show": ("show", "PLAN", "-o", "OUT", "--as", "snapshot"),
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files by the words that stand for them; the model must not be looked at."""
    sound = kinds()
    for name in ("graph", "plan"):
        (tmp_path / f"{name}.json").write_bytes(sound[name].valid)
    model = tmp_path / "model.py"
    model.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return {
        "GRAPH": str(tmp_path / "graph.json"),
        "PLAN": str(tmp_path / "plan.json"),
        "MODEL": f"{model}:factory",
        "BAD": str(tmp_path / "bad.json"),
        "OUT": str(tmp_path / "out"),
    }


def refusal(words: tuple[str, ...], files: dict[str, str]) -> str:
    """The last line on standard error of a verb that refuses."""
    done = CliRunner().invoke(app, [files.get(word, word) for word in words])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("words", READING.values(), ids=READING)
@pytest.mark.parametrize(("make", "says"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_in_one_line(
    words: tuple[str, ...],
    make: Callable[[Path], object],
    says: str,
    files: dict[str, str],
    tmp_path: Path,
) -> None:
    make(Path(files["BAD"]))
    there = sorted(one.name for one in tmp_path.iterdir())
    line = refusal(words, files)
    assert files["BAD"] in line
    assert says in line
    assert sorted(one.name for one in tmp_path.iterdir()) == there


@pytest.mark.parametrize("words", WRITING.values(), ids=WRITING)
def test_a_full_disk_is_said_in_one_line(
    words: tuple[str, ...], files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "out").symlink_to("/dev/full")
    assert refusal(words, files) == f"cannot write {files['OUT']}: No space left on device"


@pytest.mark.parametrize("words", WRITING.values(), ids=WRITING)
def test_what_was_there_survives_a_full_disk(
    words: tuple[str, ...],
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    out.write_bytes(b"old")
    monkeypatch.setattr("remat.graph_capture.files.os.fsync", full)
    there = sorted(one.name for one in tmp_path.iterdir())
    assert refusal(words, files) == f"cannot write {out}: No space left on device"
    assert out.read_bytes() == b"old"
    assert sorted(one.name for one in tmp_path.iterdir()) == there


def test_a_report_of_python_leaves_the_old_one(tmp_path: Path) -> None:
    result = remat.solve(GRAPH, "90%", solver=SOLVER)
    with pytest.raises(remat.RematError, match=r"cannot write .*: Is a directory"):
        report(GRAPH, result, tmp_path)
