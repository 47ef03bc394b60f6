"""Releases of torch: those that are tested, and the refusal of others."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import remat.rewriter
from remat.cli.main import app
from remat.graph_capture.errors import RewriteError
from remat.graph_capture.torch_private.core import refused_release, requirement

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu", "2.14.1+cu130"])
def test_tested_releases_are_taken(version: str) -> None:
    assert refused_release(version) == ""


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0", "2.16.0.dev20261101", "3.0", "1.13", "x"])
def test_others_are_refused_by_name_with_what_to_install(version: str) -> None:
    assert f"and {version} is installed" in refused_release(version)
    assert "tested with torch 2.11.0 to 2.14.1" in refused_release(version)
    assert 'pip install "torch>=2.11,<2.15"' in refused_release(version)


def test_the_bounds_are_those_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert requirement() in package["project"]["dependencies"]


def test_the_rewriter_is_not_imported_under_another_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_another_release(monkeypatch)
    with pytest.raises(RewriteError, match=r"2\.16\.0 is installed"):
        importlib.reload(remat.rewriter)


def test_the_doctor_says_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    under_another_release(monkeypatch)
    monkeypatch.delitem(__import__("sys").modules, "remat.rewriter")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 2
    assert "and 2.16.0 is installed" in json.loads(done.stdout)["refused"]


def under_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> Any:
        return "2.16.0" if name == "torch" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
