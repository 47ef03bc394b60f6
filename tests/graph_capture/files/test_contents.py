"""Files read within limits, and written so that the old one survives."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.graph_capture import files
from remat.graph_capture.errors import FileError, RematError
from remat.graph_capture.files import atomic_write, check_writable, read_contents, write_contents

OLD, NEW = b"old", b"new" * 10_000
LIMIT_BYTES = 1000


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond some bytes, which the system says as it says that a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, heard)


def alone(path: Path) -> bool:
    """Whether nothing is left beside a file."""
    return [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_contents(path, OLD)
    with pytest.raises(FileError, match=r"cannot write .*plan\.json: File too large$"):
        write_contents(path, NEW)
    assert path.read_bytes() == OLD
    assert alone(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_the_system_says_late_leaves_the_old_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def failing(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "plan.json"
    write_contents(path, OLD)
    monkeypatch.setattr(files.os, call, failing)
    with pytest.raises(FileError, match=f"cannot write .*: {os.strerror(code)}"):
        write_contents(path, NEW)
    assert path.read_bytes() == OLD
    assert alone(path)


def test_an_error_within_the_block_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def halfway() -> None:
        with atomic_write(path) as out:
            out.write(NEW)
            raise KeyError

    with pytest.raises(KeyError):
        halfway()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_the_mode_of_the_old_file_stays(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(OLD)
    path.chmod(mode)
    write_contents(path, NEW)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == NEW


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(OLD)
    write_contents(tmp_path / "ours", OLD)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "there" / "plan.json"
    link.symlink_to(target)
    for data in (OLD, NEW):  # first a link to nothing, as a plain write takes it
        write_contents(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert alone(target)


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_contents(path, OLD)
    assert path.read_bytes() == OLD
    for too_long in (tmp_path / ("x" * 256), tmp_path / "x" / ("y" * 5000)):
        for use in (write_contents, check_writable):
            with pytest.raises(FileError, match="File name too long"):
                use(too_long, *([OLD] if use is write_contents else []))  # type: ignore[operator]


def test_pipes_are_written_and_read_as_they_are(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    check_writable(pipe)
    writer = threading.Thread(target=write_contents, args=(pipe, NEW))
    writer.start()
    assert read_contents(pipe) == NEW
    writer.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("is_file", [False, True])
def test_standard_output_is_written_where_it_leads(
    tmp_path: Path, place: str, is_file: bool
) -> None:
    code = (
        "import sys; from remat.graph_capture.files import *\n"
        f"check_writable(Path({place!r})); write_contents({place!r}, b'whole')"
    )
    out = tmp_path / "out"
    with out.open("wb") as file:
        where = file if is_file else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=where)
    assert (out.read_bytes() if is_file else done.stdout) == b"whole"
    assert alone(out)


def test_a_device_that_takes_nothing(tmp_path: Path) -> None:
    write_contents("/dev/null", NEW)
    link = tmp_path / "full.json"
    link.symlink_to("/dev/full")
    with pytest.raises(FileError, match=r"cannot write .*full\.json: No space left on device"):
        write_contents(link, NEW)


def test_folders_and_what_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(OLD)
    for path, says in (
        (tmp_path, "Is a directory"),
        (file / "plan.json", "Not a directory"),
        (tmp_path / "none" / "plan.json", "No such file or directory"),
    ):
        with pytest.raises(FileError, match=f"cannot write .*: {says}"):
            write_contents(path, NEW)
    for path, says in ((tmp_path, "name a file in it: "), (file / "x", "there is no folder")):
        with pytest.raises(FileError, match=says):
            check_writable(path)
    assert file.read_bytes() == OLD


def test_what_is_write_protected_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_contents(path, OLD)
    path.chmod(0o400)
    # Root may write everything; the system answers others so.
    monkeypatch.setattr(files.os, "access", lambda which, _: Path(which) == tmp_path)
    for use in (lambda: write_contents(path, NEW), lambda: check_writable(path)):
        with pytest.raises(FileError, match="is write-protected"):
            use()
    assert path.read_bytes() == OLD
    assert alone(path)


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system answers all but root."""

    def refusing(path: Path, *_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    path = tmp_path / "plan.json"
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(
        FileError, match=f"cannot write .*: you have no permission to write in {tmp_path}"
    ):
        check_writable(path)
    monkeypatch.setattr(files.os, "open", refusing)
    with pytest.raises(FileError, match=r"cannot write .*plan\.json: Permission denied"):
        write_contents(path, NEW)


@pytest.mark.parametrize("winerror", files.IN_USE)
@pytest.mark.parametrize("is_let_go", [True, False])
def test_windows_replaces_a_file_once_nobody_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, winerror: int, is_let_go: bool
) -> None:
    path, replace, tries = tmp_path / "plan.json", os.replace, list[Path]()
    path.write_bytes(OLD)

    def held(fresh: Path, target: Path) -> None:
        tries.append(fresh)
        if is_let_go and len(tries) == 3:
            replace(fresh, target)
            return
        error = PermissionError(errno.EACCES, "The process cannot access the file")
        error.winerror = winerror  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(files.os, "replace", held)
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    if is_let_go:
        write_contents(path, NEW)
    else:
        with pytest.raises(FileError, match=r"cannot write .*plan\.json: The process cannot"):
            write_contents(path, NEW)
    assert path.read_bytes() == (NEW if is_let_go else OLD)
    assert alone(path)
    assert len(tries) == (3 if is_let_go else len(files.WAITS_S) + 1)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, says in (
        (tmp_path / "gone.json", r"gone\.json: No such file or directory"),
        (tmp_path, "Is a directory"),
        (loop, "loop: Too many levels of symbolic links"),
        ("a\0b.json", "is not a file name: it has a NUL"),
    ):
        with pytest.raises(FileError, match=says) as caught:
            read_contents(path)
        assert isinstance(caught.value, RematError)
        assert isinstance(caught.value, OSError)


def test_a_file_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILE_BYTES", 1 << 22)
    with pytest.raises(FileError, match="/dev/zero is larger than 4194304 bytes, and no file"):
        read_contents("/dev/zero")
