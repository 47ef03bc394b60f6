"""Files for later processes: sealed, aged, and in nobody's way where a folder cannot be written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from remat.graph_capture.errors import TextError
from remat.graph_capture.files import CacheFiles

FILES = CacheFiles("things", "they are made again", "things", most_files=3, most_bytes=100)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path / "things"


def test_what_is_kept_comes_back() -> None:
    assert FILES.read("one.json", bytes) is None
    FILES.write("one.json", b"data")
    assert FILES.read("one.json", bytes) == b"data"
    FILES.merge("one.json", lambda: b"more")
    assert FILES.read("one.json", bytes) == b"more"


@pytest.mark.parametrize("data", [b"", b"data", b"0" * 64 + b"\ndata", b"x" * 500])
def test_a_damaged_file_is_told_of_and_not_read(data: bytes, folder: Path) -> None:
    FILES.write("one.json", b"data")
    (folder / "one.json").write_bytes(data)
    with pytest.warns(UserWarning, match="of the kept things, which is made anew"):
        assert FILES.read("one.json", bytes) is None


def test_what_cannot_be_is_told_of() -> None:
    def refusing(data: bytes) -> None:
        raise TextError("it cannot be")

    FILES.write("one.json", b"data")
    with pytest.warns(UserWarning, match="made anew: it cannot be"):
        assert FILES.read("one.json", refusing) is None


def test_those_that_were_not_read_for_longest_go_first(folder: Path) -> None:
    for number in range(3):
        FILES.write(f"{number}.json", b"data")
        os.utime(folder / f"{number}.json", (number, number))
    assert FILES.read("0.json", bytes)
    FILES.write("3.json", b"data")
    assert sorted(path.name for path in folder.iterdir()) == ["0.json", "2.json", "3.json"]


def test_what_is_too_large_is_not_kept(folder: Path) -> None:
    FILES.write("one.json", b"x" * 101)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("no folder")
    monkeypatch.setenv("REMAT_CACHE", str(blocked))
    with pytest.warns(UserWarning, match="things are not kept .*or they are made again") as told:
        FILES.write("one.json", b"data")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FILES.merge("two.json", lambda: b"data")
        assert FILES.read("one.json", bytes) is None
