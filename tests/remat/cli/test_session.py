"""Warnings amid a verb: each once, those of remat in one line, and none in place of a result."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from remat.cli.session import Session, each_warning_once
from remat.solver.search import note_interrupt, one_job
from tests.remat.cli.conftest import Remat


def warn(text: str, file: str = "model.py") -> None:
    warnings.warn_explicit(text, UserWarning, file, 1, registry={})


def test_what_was_warned_of_is_not_warned_of_again() -> None:
    own = str(Path(Session.__init__.__code__.co_filename))
    said = list[str]()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = warnings.showwarning
        with each_warning_once(said.append):
            for text in ("one", "two", "one", "one"):
                warn(text)
                warn(f"ours: {text}", own)
        assert warnings.showwarning is before
        warn("one")
    assert [str(one.message) for one in told] == ["one", "two", "one"]
    assert said == ["ours: one", "ours: two"]


def test_torchs_traceback_of_a_backward_that_ctrl_c_ended_is_not_shown() -> None:
    text = "Error detected in NativeDropoutBackward0. Traceback of forward call that caused it"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with one_job(), each_warning_once(print):
            warn(text)
            note_interrupt()
            warn(f"{text} again")
            warn("another")
    assert [str(one.message) for one in told] == [text, "another"]


def test_costs_that_cannot_be_kept_are_told_in_one_line(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = remat("show", remat.gpt, "--as", "graph", "--json")
    assert json.loads(done.stdout)["ops"]
    told = [line for line in done.stderr.splitlines() if "costs are not kept" in line]
    assert told == [
        f"warning: costs are not kept ({tmp_path / 'file'}: File exists): set REMAT_CACHE to a "
        "folder that can be written, or they are measured again each time"
    ]
