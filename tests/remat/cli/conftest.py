from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from remat.cli.main import app
from tests.paths import ROOT

SIZES = {"LAYERS": "2", "WIDTH": "32", "HEADS": "2", "SEQ": "32", "BATCH": "8", "VOCAB": "32"}
EXAMPLES = ROOT / "examples"


class Remat:
    """Calls the command line in this process."""

    gpt = f"{EXAMPLES / 'gpt.py'}:factory"

    def __call__(self, *words: str, columns: int = 80) -> Result:
        return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(words))


def written(path: Path, verb: str, *words: str) -> Result:
    """What a verb says that writes a plan of the example GPT, in the sizes of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setenv(f"GPT_{name}", value)
        done = Remat()(verb, Remat.gpt, *words, "-o", str(path))
    assert done.exit_code == 0, done.stderr
    return done


def verdict_on(page: Path) -> str:
    """What a report opens with."""
    found = re.search(r'<main id="main">\s*<h1>(.*)</h1>', page.read_text())
    assert found is not None
    return unescape(re.sub("</?span>", "", found[1]))


@pytest.fixture
def remat(monkeypatch: pytest.MonkeyPatch) -> Remat:
    """The command line, with an example GPT of a few thousand parameters."""
    for name, value in SIZES.items():
        monkeypatch.setenv(f"GPT_{name}", value)
    return Remat()
