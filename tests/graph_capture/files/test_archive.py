"""Archives are judged by their directory before anything in them is unpacked."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from remat.graph_capture import files
from remat.graph_capture.errors import ArchiveError, FileError
from remat.graph_capture.files import read_archive_member

WANTED = "extra/plan.json"
PLAIN = {"a/archive_format": b"pt2", f"a/{WANTED}": b"{}"}


def packed(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return path


def test_the_member_is_read_whatever_the_root_and_the_packing(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        assert read_archive_member(packed(tmp_path / "a.pt2", PLAIN, method), WANTED) == b"{}"
    other = {f"model/{name[2:]}": data for name, data in PLAIN.items()}
    assert read_archive_member(packed(tmp_path / "b.pt2", other), WANTED) == b"{}"
    assert read_archive_member(packed(tmp_path / "a.pt2", PLAIN), "extra/other") is None


ODD = {
    "absolute": "/etc/passwd",
    "above": "../outside",
    "above within": "a/../../outside",
    "nothing between": "a//extra",
    "backslash": "a\\extra",
    "control letter": "a/\x1b[2J",
    "not in a folder": "loose",
    "in another folder": "b/extra",
}


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    path = packed(tmp_path / "a.pt2", {**PLAIN, name: b""})
    with pytest.raises(ArchiveError, match=r"a member named '|in 2 folders"):
        read_archive_member(path, WANTED)
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt2"]


def test_a_name_with_a_nul_is_not_cut_at_it(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.pt2", {**PLAIN, "a/extra/plan.jsonXb": b"other"})
    path.write_bytes(path.read_bytes().replace(b"plan.jsonXb", b"plan.json\0b"))
    with pytest.raises(ArchiveError, match=r"a member named 'a/extra/plan\.json\\x00b'"):
        read_archive_member(path, WANTED)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    with zipfile.ZipFile(packed(path, PLAIN), "a") as out:
        out.writestr(f"a/{WANTED}", b'{"other": 1}')
    with pytest.raises(ArchiveError, match=r"it has 'a/extra/plan\.json' twice"):
        read_archive_member(path, WANTED)


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be unpacked from here on."""
    monkeypatch.setattr(files, "_read", lambda *_: pytest.fail("was unpacked"))


def test_a_bomb_is_refused_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread(monkeypatch)
    zeros = {f"a/extra/plan{i}.json": bytes(1 << 20) for i in range(8)}
    path = packed(tmp_path / "a.pt2", {**PLAIN, **zeros}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ArchiveError, match="says that it unpacks to 8388613 bytes"):
        read_archive_member(path, WANTED)


def test_a_size_that_is_only_said_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size in the directory of a stored member, made larger than the file."""
    unread(monkeypatch)
    path = packed(tmp_path / "a.pt2", PLAIN)
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02") + 20
    data[place : place + 8] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match="says that it unpacks to 4294967283 bytes"):
        read_archive_member(path, WANTED)


def test_a_member_gives_no_more_than_it_says(tmp_path: Path) -> None:
    """A packed member that says it is small, and is not."""
    members = {**PLAIN, f"a/{WANTED}": bytes(1 << 16)}
    path = packed(tmp_path / "a.pt2", members, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    for sign, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        place = data.rindex(sign) + offset
        data[place : place + 4] = struct.pack("<I", 2)
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match="Bad CRC-32"):
        read_archive_member(path, WANTED)


def test_a_member_larger_than_any_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILE_BYTES", 100)
    path = packed(tmp_path / "a.pt2", {**PLAIN, f"a/{WANTED}": bytes(101)})
    with pytest.raises(ArchiveError, match=r"its a/extra/plan\.json is larger than 100 bytes"):
        read_archive_member(path, WANTED)


BROKEN = {
    "empty": (b"", "not a zip file"),
    "text": (b"{}" * 100, "not a zip file"),
    "no members": (b"PK\5\6" + bytes(18), "in 0 folders"),
}


@pytest.mark.parametrize(("data", "says"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_archive(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "a.pt2"
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match=says):
        read_archive_member(path, WANTED)


@pytest.mark.parametrize("form", [None, b"pt3"])
def test_a_zip_of_something_else(tmp_path: Path, form: bytes | None) -> None:
    members = {"a/data": b""} | ({} if form is None else {"a/archive_format": form})
    with pytest.raises(ArchiveError, match="it lacks archive_format, which says pt2"):
        read_archive_member(packed(tmp_path / "a.pt2", members), WANTED)


def test_an_archive_that_is_encrypted_or_packed_otherwise(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.pt2", PLAIN)
    whole = path.read_bytes()
    for offset, value, says in ((8, 1, "encrypted"), (10, 99, "compression method")):
        data = bytearray(whole)
        for sign, less in ((b"PK\x01\x02", 0), (b"PK\x03\x04", 2)):
            data[data.index(sign) + offset - less] = value
        path.write_bytes(data)
        with pytest.raises(ArchiveError, match=says):
            read_archive_member(path, WANTED)


def test_an_archive_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.pt2: No such file"):
        read_archive_member(tmp_path / "gone.pt2", WANTED)
    with pytest.raises(FileError, match="Is a directory"):
        read_archive_member(tmp_path, WANTED)
