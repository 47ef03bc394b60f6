"""Terminals of any encoding, and names that would steer them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat.cli.main import app
from remat.progress import LEAST_COLUMNS, MOST_WORD, in_one_line, json_text
from tests.files.hostile import TERMINAL, plan_with_names
from tests.rows import rows

LETTERS = "größe→√█\u2013"
MODEL = """
import torch

class Größe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.größe(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum()

def factory(batch: int = 4):
    return Größe(), (torch.ones(batch, 4),)
"""
ON_PLANS = {
    "show": ("show", "PLAN"),
    "show by module": ("show", "PLAN", "--by", "module"),
    "show as JSON": ("show", "PLAN", "--json"),
    "explain": ("show", "PLAN", "--explain", "--each-limit", "0.1"),
    "solvers": (
        "sweep", "PLAN", "--budgets", "90%", "--solver", "chen_sqrt", "--solver", "full",
    ),
    "run": ("run", "GRAPH", "--budget", "90%", "--solver", "chen_sqrt", "-o", "OUT.json"),
    "sweep": ("sweep", "GRAPH", "--budgets", "90%", "--solver", "chen_sqrt", "-o", "OUT.json"),
    "report": ("report", "PLAN", "-o", "OUT.html"),
    "export": ("show", "PLAN", "-o", "OUT.dot"),
    "doctor": ("doctor",),
    "help": ("run", "--help"),
}  # fmt: skip
ON_MODELS = {
    "run": ("run", "MODEL", "--budget", "100%", "-o", "OUT.json"),
    "captured": ("show", "MODEL", "--as", "graph", "-o", "OUT.json"),
    "profile": ("profile", "MODEL"),
    "largest-batch": ("largest-batch", "MODEL", "--budget", "1MiB", "--sizes", "2,64"),
    "refused": ("run", "MODEL", "--budget", "größe"),
}


def said(
    words: tuple[str, ...], folder: Path, bad: str, columns: str = "200"
) -> tuple[int, str, str]:
    """Exit code, output and errors of a verb on an ASCII terminal."""
    made = plan_with_names(bad)
    assert made.graph is not None
    files = {"PLAN": folder / "plan-größe.json", "GRAPH": folder / "graph-größe.json"}
    files["PLAN"].write_bytes(made.to_json())
    files["GRAPH"].write_bytes(made.graph.to_json())
    (folder / "größe.py").write_text(MODEL, encoding="utf-8")
    named = {name: str(path) for name, path in files.items()}
    named |= {"MODEL": f"{folder / 'größe.py'}:factory"}
    named |= {f"OUT.{end}": str(folder / f"größe.{end}") for end in ("json", "html", "dot")}
    runner = CliRunner(charset="ascii", env={"COLUMNS": columns})
    done = runner.invoke(app, [named.get(word, word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("words", ON_PLANS.values(), ids=ON_PLANS)
def test_plans_are_shown_in_ascii(words: tuple[str, ...], tmp_path: Path) -> None:
    code, out, err = said(words, tmp_path, LETTERS)
    assert code == 0, err
    assert (out + err).isascii()
    if "--json" in words:
        assert json.loads(out)["model"].endswith(LETTERS)
    elif words[0] == "show" and "-o" not in words and "--explain" not in words:
        assert "gr??e???-" in out


@pytest.mark.parametrize("verb", rows(ON_MODELS, lambda verb: verb != "largest-batch"))
def test_models_are_planned_in_ascii(verb: str, tmp_path: Path) -> None:
    words = ON_MODELS[verb]
    code, out, err = said(words, tmp_path, LETTERS)
    assert code == (2 if "größe" in words else 0), err
    assert (out + err).isascii()
    assert "gr??e" in (out + err).lower()


@pytest.mark.parametrize("words", ON_PLANS.values(), ids=ON_PLANS)
def test_names_neither_steer_a_terminal_nor_are_markup(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    code, out, err = said(words, tmp_path, TERMINAL)
    assert code == 0, err
    for text in (out, err):
        assert all(line.isprintable() for line in text.split("\n"))
    if words == ("show", "PLAN"):
        assert "\\x1b[2J" in out
        assert "[red]x[/red][/]:smile:" in out


@pytest.mark.slow
def test_the_command_itself_on_an_ascii_terminal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(plan_with_names(LETTERS).to_json())
    code = "from remat.cli.main import main; main()"
    for words in (["--help"], ["show", str(path)], ["show", str(path) + LETTERS]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"},
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if words[-1].endswith(LETTERS) else 0), done.stderr
        assert b"Traceback" not in done.stderr
        assert (done.stdout + done.stderr).isascii()


@pytest.mark.slow
def test_standard_output_that_is_full(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(plan_with_names("").to_json())
    code = "from remat.cli.main import main; main()"
    for words in (["show", str(path)], ["show", str(path), "--json"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-c", code, *words],
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert done.returncode == 2
        assert done.stderr == b"standard output: No space left on device\n"


CLOSED = {
    "a pipe that nobody reads": ("|", b""),
    "no standard output": (">&-", b"standard output: Bad file descriptor\n"),
    "no standard output or error": (">&- 2>&-", b""),
    "no standard stream": ("<&- >&- 2>&-", b""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", rows(CLOSED, lambda name: name == "a pipe that nobody reads"))
def test_standard_output_that_is_closed(name: str, tmp_path: Path) -> None:
    how, says = CLOSED[name]
    path = tmp_path / "plan.json"
    path.write_bytes(plan_with_names("").to_json())
    code = "from remat.cli.main import main; main()"
    for words in (["show", str(path)], ["show", str(path), "--json"]):
        command = [sys.executable, "-c", code, *words]
        if how != "|":
            command = ["sh", "-c", f'exec "$@" {how}', "sh", *command]
        out = subprocess.PIPE if how == "|" else None
        with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE) as process:
            if process.stdout is not None:
                process.stdout.close()
            assert process.stderr is not None
            assert process.stderr.read() == says
        assert process.returncode == 2


@pytest.mark.slow
def test_messages_that_nobody_reads_lose_no_results(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(plan_with_names("").to_json())
    code = "from remat.cli.main import main; main()"
    words = ["report", str(path), "-o", str(tmp_path / "report.html"), "--json"]
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["report"] == words[3]
    assert process.returncode == 0


@pytest.mark.parametrize("columns", ["0", "1"])
@pytest.mark.parametrize("name", ["show", "explain", "solvers", "run", "sweep", "doctor"])
def test_terminals_without_room(name: str, columns: str, tmp_path: Path) -> None:
    code, out, err = said(ON_PLANS[name], tmp_path, "", columns)
    assert code == 0, err
    assert max(map(len, out.splitlines())) >= LEAST_COLUMNS // 2


def test_messages_are_one_line_of_words_that_end() -> None:
    assert in_one_line("a\nb\r\x1b[2J\u202ec") == "a b \\x1b[2J\\u202ec"
    assert in_one_line("größe \u2013 1") == "größe \u2013 1"
    path = "/" + "x" * (MOST_WORD - 2)
    assert in_one_line(f"{path} gone") == f"{path} gone"
    assert in_one_line(f"is {'9' * 4000} bytes") == f"is {'9' * (MOST_WORD // 2)}... bytes"


def test_json_keeps_its_meaning_in_any_encoding() -> None:
    data = json.dumps({"größe": "\U0001f600→"}, ensure_ascii=False).encode()
    assert json_text(data, "utf-8") == data.decode()
    assert json_text(data, None) == data.decode()
    escaped = json_text(data, "ascii")
    assert escaped.isascii()
    assert json.loads(escaped) == json.loads(data)
