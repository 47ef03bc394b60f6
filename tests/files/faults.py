"""Calls of the system that fail once, as on a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from remat.cli.main import app
from remat.graph_capture import files
from remat.graph_capture.errors import FileError

FULL = os.strerror(errno.ENOSPC)
OLD = b"what was there"


class FullFile:
    """A file that takes some bytes, and then none."""

    def __init__(self, file: Any, taken_bytes: int) -> None:
        self._file, self._left_bytes = file, taken_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise OSError(errno.ENOSPC, FULL)
        written: int = self._file.write(data)
        return written


def fail_once(monkeypatch: pytest.MonkeyPatch, call: str) -> list[str]:
    """The first such call of the system fails; returns the list of those that did."""
    failed: list[str] = []
    real: Callable[..., Any] = getattr(os, "fdopen" if call == "write" else call)

    def failing(*given: Any, **more: Any) -> Any:
        if call == "open" and ".remat-" not in str(given[0]) and not given[1] & os.O_TMPFILE:
            return real(*given, **more)
        if failed:
            return real(*given, **more)
        failed.append(call)
        if call == "write":
            return FullFile(real(*given, **more), 10)
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(files.os, "fdopen" if call == "write" else call, failing)
    return failed


CALLS = ("open", "write", "fsync", "link", "replace")


def names_in(folder: Path) -> list[str]:
    """What a folder holds."""
    return sorted(one.name for one in folder.iterdir())


def verb(*words: str) -> Callable[[Path], None]:
    """A writer that is a verb of the command line; what it refuses is raised again."""

    def run(path: Path) -> None:
        kept = {"GRAPH": "graph.json", "PLAN": "kept.json", "MODEL": "model.py"}
        named = {word: str(path.with_name(name)) for word, name in kept.items()} | {
            "OUT": str(path)
        }
        done = CliRunner().invoke(app, [named.get(word, word) for word in words])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        if done.exit_code:
            assert done.exit_code == 2
            assert done.stdout == ""
            raise FileError(done.stderr.strip().splitlines()[-1])

    return run


def require_unharmed(
    path: Path, write: Callable[[Path], Any], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a call of the system fails, one line says so and all is as it was; then it works."""
    path.write_bytes(OLD)
    there = names_in(path.parent)
    with monkeypatch.context() as patch:
        failed = fail_once(patch, call)
        with pytest.raises(FileError) as refused:
            write(path)
    assert failed == [call]
    assert str(refused.value) == f"cannot write {path}: {FULL}"
    assert path.read_bytes() == OLD
    assert names_in(path.parent) == there
    write(path)
    assert path.read_bytes() != OLD
    assert names_in(path.parent) == there
