"""Nameless files: every way in which a folder takes them, all sizes, and folders that do not."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import TierError
from remat.graph_capture.spill_files import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    HOST_FOLDER,
    File,
    Folder,
    host_folder,
)
from tests.limits import AMPLE_S
from tests.rewriter.tiers.plans import is_clean

SIZES = st.one_of(
    st.integers(0, 3 * BLOCK_BYTES),
    st.integers(-2, 2).map(lambda n: CHUNK_BYTES + n),
    st.integers(0, 2 * CHUNK_BYTES),
)


def filled(folder: Folder, x: torch.Tensor) -> File:
    file = File(folder, x.nbytes)
    file.write_from(x.data_ptr())
    return file


def read(file: File) -> torch.Tensor:
    found = torch.zeros(file.size_bytes, dtype=torch.uint8)
    file.read_to(found.data_ptr())
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Folder]:
    """One for each way: past the cache and through it, nameless and unlinked."""
    made: list[Folder] = []
    for nameless in (True, False):
        for direct in (True, False):
            folder = Folder(str(tmp_path_factory.mktemp("tier")), "host")
            folder.is_nameless &= nameless
            folder.is_direct &= direct
            made.append(folder)
    return made


@settings(max_examples=20)
@given(size=SIZES, offset=st.sampled_from([0, 1, 64, BLOCK_BYTES]), seed=st.integers(0, 99))
def test_bytes_come_back_in_every_way(
    folders: list[Folder], size: int, offset: int, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    whole = torch.randint(256, (size + offset,), dtype=torch.uint8, generator=drawn)
    x = whole[offset:]
    for folder in folders:
        file = filled(folder, x)
        assert torch.equal(read(file), x)
        for other in folders:
            again = File(other, size)
            file.copy_to(again)
            assert torch.equal(read(again), x)
    del file, again
    assert all(not os.listdir(folder.path) for folder in folders)


def refusing(patch: pytest.MonkeyPatch, flag: int, error: int) -> None:
    """A file system that opens no file with that flag."""
    real: Callable[..., int] = os.open

    def opened(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & flag == flag:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *more, **options)

    patch.setattr(os, "open", opened)


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EISDIR])
def test_a_folder_without_nameless_files_gets_files_that_are_unlinked_at_once(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, os.O_TMPFILE, error)
    folder = Folder(str(tmp_path), "host")
    assert not folder.is_nameless
    file = filled(folder, torch.arange(9, dtype=torch.uint8))
    assert not list(tmp_path.iterdir())
    assert read(file).tolist() == list(range(9))
    del file
    assert is_clean(tmp_path)


def test_a_folder_that_takes_no_direct_writes_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, os.O_DIRECT, errno.EINVAL)
    folder = Folder(str(tmp_path), "host")
    assert folder.is_nameless
    assert not folder.is_direct
    assert read(filled(folder, torch.ones(5000, dtype=torch.uint8))).sum() == 5000


def test_a_system_that_takes_no_room_ahead_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    folder = Folder(str(tmp_path), "host")
    for is_direct in {folder.is_direct, False}:
        folder.is_direct = is_direct
        x = torch.arange(99, dtype=torch.uint8)
        file, other = filled(folder, x), File(folder, 99)
        file.copy_to(other)
        assert torch.equal(read(other), x)


def test_partial_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path), "host")
    folder.is_direct = False
    write, reads = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, block, at: write(fd, block[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, blocks, at: reads(fd, [blocks[0][:5]], at))
    x = torch.arange(100, dtype=torch.uint8)
    assert torch.equal(read(filled(folder, x)), x)


def test_a_full_disk_is_an_error_before_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = Folder(str(tmp_path), "host")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        File(folder, 100)
    assert is_clean(tmp_path)


def test_folders_that_cannot_be_used_are_refused_with_a_way_out(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(
        TierError, match=r"missing, the folder of the host tier: No such.*set REMAT"
    ):
        Folder(str(missing), "host")
    with pytest.raises(TierError, match=r"folder of the nvme tier.*give nvme= another folder"):
        Folder(str(missing), "nvme")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(TierError, match="Not a directory"):
        Folder(str(file), "host")


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, 0, errno.EACCES)
    with pytest.raises(TierError, match=r"Permission denied.*or solve without offloading"):
        Folder(str(tmp_path), "host")


def test_too_little_room_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), "host")
    folder.require_room(1)
    with pytest.raises(TierError, match=r"keeps up to \d+ bytes in .* bytes free") as caught:
        folder.require_room(1 << 60)
    assert "\n" not in str(caught.value)


def test_the_folder_of_the_host_is_the_systems_or_that_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    monkeypatch.delenv(HOST_FOLDER, raising=False)
    assert host_folder() == tempfile.gettempdir()
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path))
    assert host_folder() == str(tmp_path)


def test_ways_that_a_folder_does_not_know_leave_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def plain_only(path: Any, flags: int, *mode: int) -> int:
        if flags & (os.O_DIRECT | os.O_TMPFILE & ~os.O_DIRECTORY):
            raise OSError(errno.EINVAL, "not known here")
        return real(path, flags, *mode)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", plain_only)
        folders = [Folder(str(tmp_path), "host") for _ in range(4)]
    assert not any(one.is_direct or one.is_nameless for one in folders)
    del folders
    until_s = time.monotonic() + AMPLE_S  # they are closed by a thread
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
