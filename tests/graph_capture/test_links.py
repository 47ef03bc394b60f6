"""Links: what may be asked for, how they are measured, kept, modelled, and put into graphs."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from remat.graph_capture.costs import measuring
from remat.graph_capture.costs.cache import CostCache, Profile
from remat.graph_capture.costs.measuring import links_below, relinked
from remat.graph_capture.devices import links, pinned_memory
from remat.graph_capture.devices.known_devices import device_table
from remat.graph_capture.devices.links import (
    PINNED_MEMORY,
    PLANNED_SHARE,
    FileMeter,
    LinkPair,
    LinkSpeed,
    LinkSpeeds,
    are_speeds,
    file_pair,
    fitted,
    speed_of,
)
from remat.graph_capture.devices.memory import AUTO_SHARE, LowerTiers, lower_tiers
from remat.graph_capture.devices.pinned_memory import pinned_pair
from remat.graph_capture.errors import BudgetError, FileError, ProfileError, TierError
from remat.graph_capture.graph import Links
from remat.graph_capture.spill_files import Folder, host_folder, require_writable
from tests.copying import copying_chain
from tests.fake_cuda import TITLE, FakeCuda, cuda
from tests.fixed_costs import CLOCKED, LINK, patched

__all__ = ["cuda"]

GIB = 1 << 30
MEASURED = {(measuring, "measured_pair"): CLOCKED[measuring, "measured_pair"]}


def pair(place: str = "a folder", gb_s: float = 1.0) -> LinkPair:
    speed = LinkSpeed(gb_s, gb_s, 10.0)
    return LinkPair(speed, speed, place)


def profile(title: str, links: LinkSpeeds | None, device: str = "cpu") -> Profile:
    return Profile(device, title, str(torch.__version__), {}, links=links)


@pytest.mark.parametrize(
    ("host", "nvme", "says"),
    [
        ("much", None, "host 'much' cannot be read: write it like 120GiB, 64GB or auto"),
        ("120", None, "host '120' has no unit. Did you mean 120 bytes? Write 120MiB or 120GiB"),
        ("120PB", None, "host '120PB' has an unknown unit 'pb'"),
        ("50%", None, "host '50%' cannot be read"),
        (0, None, "give a positive size for host, or leave it out: 0 leaves nothing to use"),
        ("-1GiB", None, "host, or leave it out: '-1GiB' leaves nothing to use"),
        (True, None, "give host as bytes in an int, or as 120GiB, 64GB or auto: True is no size"),
        (1.5, None, "give host as whole bytes in an int, or as a string such as 120GiB, 64GB"),
        (None, "/mnt/nvme:1GiB", "lies below the host, and copies to it pass through the host"),
        ("1GiB", "200GiB", "nvme '200GiB' names no folder: write it like /mnt/nvme:200GiB"),
        ("1GiB", ":200GiB", "nvme ':200GiB' names no folder"),
        ("1GiB", "/mnt/nvme", "nvme '/mnt/nvme' names no size"),
        ("1GiB", 200, "nvme 200 names no folder"),
        ("1GiB", "/mnt/nvme:0GiB", "nvme, or leave it out: '0GiB' leaves nothing to use"),
        ("auto", None, "'auto' means what this machine has free, and h100 is not here"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for(host: Any, nvme: Any, says: str) -> None:
    with pytest.raises(BudgetError) as error:
        lower_tiers(host, nvme, "h100")
    assert says in str(error.value)


def test_nothing_is_asked_for() -> None:
    assert lower_tiers(None, None, "cpu") is None


def test_a_machine_that_is_not_here_may_have_any_size_and_folder() -> None:
    assert lower_tiers("9000TiB", "/mnt/x:2TB", "h100") == LowerTiers(
        9000 << 40, 2 * 10**12, "/mnt/x"
    )


def test_what_is_asked_of_a_cpu_is_free_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_OFFLOAD", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    assert host_folder() == str(tmp_path)
    assert lower_tiers(GIB, None, "cpu") == LowerTiers(GIB)
    assert lower_tiers("auto", f"{tmp_path}:auto", "cpu") == LowerTiers(
        int(AUTO_SHARE * GIB), int(AUTO_SHARE * GIB), str(tmp_path)
    )
    with pytest.raises(BudgetError, match=f"more than the 1.00 GiB that are free in {tmp_path}"):
        lower_tiers("2GiB", None, "cpu")
    with pytest.raises(BudgetError, match=f"give less, or {tmp_path}:auto"):
        lower_tiers("1GiB", f"{tmp_path}:2GiB", "cpu")


def test_what_is_asked_of_a_cuda_device_is_free_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remat.graph_capture.devices import memory

    monkeypatch.setattr(memory, "free_bytes", lambda _: 100)
    assert lower_tiers("auto", None, "cuda:0") == LowerTiers(90)
    with pytest.raises(
        BudgetError, match=r"give less, or auto: .* free in the memory of this machine"
    ):
        lower_tiers(101, None, "cuda:0")


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(FileError, match=f"name a folder on the drive to use: {gone}"):
        lower_tiers("1KiB", f"{gone}:1KiB", "cpu")
    monkeypatch.setenv("REMAT_OFFLOAD", str(gone))
    with pytest.raises(FileError, match="is not a folder"):
        lower_tiers("1KiB", None, "cpu")
    with pytest.raises(FileError, match="name a folder of your own: /proc cannot be written"):
        require_writable("/proc")


@pytest.mark.parametrize(("gb_s", "latency_us"), [(50.0, 10.0), (1.0, 0.0), (0.5, 150.0)])
def test_rate_and_latency_are_found_again(gb_s: float, latency_us: float) -> None:
    sizes = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
    found = fitted({size: latency_us + size / (gb_s * 1e3) for size in sizes})
    assert found == pytest.approx((gb_s, latency_us), abs=1e-6)


def test_noise_gives_no_negative_latency() -> None:
    gb_s, latency_us = fitted({1 << 20: 100.0, 1 << 24: 4000.0})
    assert latency_us == 0.0
    assert (1 << 24) / 4e3 / 1e3 < gb_s < (1 << 20) / 100.0 / 1e3


def test_the_h100_s_copies_are_fitted_within_a_tenth() -> None:
    """As measured with both ways busy (benchmarks/results/gpu/links.json)."""
    up = {65536: 4.637, 1048576: 24.182, 16777216: 325.549, 67108864: 1364.186, 268435456: 5632.426}
    gb_s, latency_us = fitted(up)
    assert 45 < gb_s < 52
    assert 2 < latency_us < 5
    assert all(abs(latency_us + n / gb_s / 1e3 - us) < 0.15 * us for n, us in up.items())


def test_plans_are_made_with_a_part_of_the_slower_rate() -> None:
    speed = speed_of({1: 1.0 + 1e-3, 1000: 2.0}, {1: 2.0 + 1e-3, 1000: 4.0})
    assert speed.gb_s > speed.both_gb_s
    link = speed.planned
    assert link.bytes_per_us == pytest.approx(PLANNED_SHARE * speed.both_gb_s * 1e3)
    assert speed.latency_us == pytest.approx(1.0, abs=0.1)
    assert link.latency_us == speed.both_latency_us == pytest.approx(2.0, abs=0.1)


def test_a_folder_is_measured_within_few_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters: list[FileMeter] = []

    class Watched(FileMeter):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            meters.append(self)

    monkeypatch.setattr(links, "FileMeter", Watched)
    monkeypatch.setattr(links, "REPEATS", 1)
    found = file_pair(str(tmp_path), (2,))
    assert are_speeds(found)
    assert found.place == str(tmp_path)
    assert list(found.threads_gb_s) == [2]
    assert list(tmp_path.iterdir()) == []
    assert not any(meter.files for meter in meters)
    assert sum(meter.moved_bytes for meter in meters) < 2 * GIB
    assert "by 2 threads" in str(found)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    meter, size = FileMeter(str(tmp_path), 3), links.SIZES[0]
    meter.memory[False][:size] = random.Random(0).randbytes(size)
    kept = bytes(meter.memory[False][:size])
    meter._share(True, False, size)
    meter.memory[False][:size] = bytes(size)
    meter._share(False, False, size)
    assert bytes(meter.memory[False][:size]) == kept
    meter.close()


def test_a_full_drive_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileError, match=r"cannot be written \(No space left on device\)"):
        file_pair(str(tmp_path))
    monkeypatch.setattr(links, "require_writable", lambda _: None)
    monkeypatch.setattr(links, "Folder", lambda *_: SimpleNamespace(file=full))
    with pytest.raises(FileError, match=r"cannot be written and read \(No space left on device\)"):
        file_pair(str(tmp_path))


class FakeTensor:
    """Bytes whose copies take time on the clock of a link."""

    def __init__(self, clock: FakeLink, size: int, *, pinned: bool) -> None:
        self.clock, self.size, self.pinned = clock, size, pinned

    def copy_(self, source: FakeTensor, non_blocking: bool) -> None:
        assert non_blocking
        rate = 50e3 if self.pinned and source.pinned else 8e3
        took_us = 5.0 + self.size / rate
        self.clock.now_us += took_us if self.clock.is_queued else max(20.0, took_us)


class FakeLink:
    """A link of 50 GB/s with 5 us of latency, and of 8 GB/s to memory that is not pinned.

    The host takes 20 us to queue a copy."""

    def __init__(self) -> None:
        self.now_us, self.most_bytes = 0.0, 0
        self.is_queued = False  # the device slept meanwhile

    def empty(self, size: int, dtype: Any, device: str = "cpu") -> Any:
        self.most_bytes = max(self.most_bytes, size)
        return FakeTensor(self, size, pinned=device == "cuda:0")

    def pinned(self, size: int) -> Any:
        return FakeTensor(self, size, pinned=True)

    def sleep(self, _: int) -> None:
        self.is_queued = True

    def synchronize(self) -> None:
        self.is_queued = False

    def event(self, **_: Any) -> Any:
        one = SimpleNamespace(us=0.0)
        one.record = lambda: setattr(one, "us", self.now_us)
        one.elapsed_time = lambda end: (end.us - one.us) / 1e3
        return one


def test_a_cuda_device_is_measured_pinned_and_not(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLink()
    monkeypatch.setattr(torch, "empty", fake.empty)
    for name, answer in (("Event", fake.event), ("_sleep", fake.sleep)):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(pinned_memory, "pinned", fake.pinned)
    cuda.reserved_bytes = 999  # segments that stay with the allocator
    found = pinned_pair("cuda:0")
    assert cuda.reserved_bytes == cuda.allocated_bytes
    assert 2 * fake.most_bytes <= 128 << 20
    assert found.place == PINNED_MEMORY
    for way in (found.down, found.up):
        assert (way.gb_s, way.both_gb_s) == pytest.approx((50.0, 50.0))
        assert way.latency_us == pytest.approx(5.0)
    assert found.pageable_gb_s == pytest.approx(8.0, rel=1e-3)
    assert "8 to memory that is not pinned" in str(found)


def test_links_of_the_table() -> None:
    found = links_below("h100", LowerTiers(GIB, 2 * GIB, "/mnt/nvme"))
    table = device_table()
    assert found.d2h.bytes_per_us == found.h2d.bytes_per_us == pytest.approx(51_200)
    assert found.d2h.latency_us == table.link_latency_us
    assert found.write
    assert found.read
    assert found.write.bytes_per_us == pytest.approx(0.8 * table.nvme.write_gb_s * 1e3)
    assert found.read.bytes_per_us == pytest.approx(0.8 * table.nvme.read_gb_s * 1e3)
    assert (found.host_bytes, found.nvme_bytes, found.nvme_path) == (GIB, 2 * GIB, "/mnt/nvme")
    assert found.source == (
        "0.8 of the 64 GB/s that are stated for NVIDIA H100 SXM5, 80 GB; NVMe 0.8 of the 3.5 GB/s "
        "to write and 6.5 to read that are stated for Samsung PM9A3 U.2"
    )
    assert "benchmarks/results/gpu/links.json" in table.link_reason


def test_links_of_this_machine_are_planned_at_nine_tenths_of_what_is_measured() -> None:
    found = links_below("cpu", LowerTiers(GIB))
    assert found.d2h.bytes_per_us == pytest.approx(0.9 * LINK.both_gb_s * 1e3)
    assert found.source.startswith("0.9 of 1 GB/s to a folder and 1 back, measured at once on ")
    assert found.write is found.read is None


def test_links_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def counted(folder: str, threads: Any = ()) -> LinkPair:
        measured.append(folder)
        return pair(folder, float(len(measured)))

    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("REMAT_OFFLOAD", str(tmp_path))
    monkeypatch.setattr(measuring, "file_pair", counted)
    with patched(MEASURED):
        tiers = LowerTiers(GIB, GIB, str(tmp_path))
        first = links_below("cpu", tiers)
        assert links_below("cpu", tiers) == first
        assert measured == [str(tmp_path)] * 2  # one of the host's folder, one of the drive's
        again = links_below("cpu", tiers, measure_again=True)
        assert again.d2h.bytes_per_us > first.d2h.bytes_per_us
        assert links_below("cpu", tiers) == again
        known = measuring.kept_links("cpu")
        assert set(known) == {f"host: {tmp_path}", f"NVMe at {tmp_path}"}


def test_a_kept_link_that_cannot_be_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    cache = CostCache("a machine")
    cache.links["host"] = pair(gb_s=1.0)
    cache.save()
    assert CostCache("a machine").links == {"host": pair(gb_s=1.0)}
    cache.path.write_bytes(cache.path.read_bytes().replace(b'"gb_s":1.0', b'"gb_s":-1.0'))
    with pytest.warns(UserWarning, match="a cost cannot be"):
        assert CostCache("a machine").links == {}


def test_a_cuda_device_has_pinned_memory_below(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(pinned_memory, "pinned_pair", lambda device: pair(PINNED_MEMORY, 50.0))
    with patched(MEASURED):
        found = links_below("cuda:0", LowerTiers(GIB))
    assert found.d2h.bytes_per_us == pytest.approx(45e3)
    assert TITLE in found.source


def test_links_come_from_a_profile() -> None:
    host, drive = pair(gb_s=2.0), pair("/mnt/nvme", 0.5)
    known = profile("another machine", LinkSpeeds(host, drive))
    found = links_below("cpu", LowerTiers(GIB, GIB, "/mnt/nvme"), known)
    assert found.d2h.bytes_per_us == pytest.approx(1.8e3)
    assert found.read
    assert found.read.bytes_per_us == pytest.approx(450)
    assert "another machine" in found.source
    with pytest.raises(ProfileError, match=r"to /mnt/x there, .* --nvme /mnt/x -o FILE"):
        links_below("cpu", LowerTiers(GIB, GIB, "/mnt/x"), known)


def test_a_profile_without_links_serves_its_own_machine() -> None:
    here = measuring.meter_of("cpu").title
    assert links_below("cpu", LowerTiers(GIB), profile(here, None)).d2h.latency_us == 10.0
    with pytest.raises(ProfileError, match="measure the links of another machine to its host"):
        links_below("cpu", LowerTiers(GIB), profile("another machine", None))


def test_a_profile_of_a_device_of_the_table_replaces_its_model() -> None:
    known = profile(TITLE, LinkSpeeds(pair(PINNED_MEMORY, 55.0)), "cuda")
    found = links_below("h100", LowerTiers(GIB, GIB, "/mnt/nvme"), known)
    assert found.d2h.bytes_per_us == pytest.approx(0.9 * 55e3)
    assert found.write
    assert found.write.bytes_per_us == pytest.approx(2800)


def test_profiles_keep_links_and_older_ones_are_read() -> None:
    known = profile("a machine", LinkSpeeds(pair(), pair("/mnt/nvme")))
    assert Profile.from_json(known.to_json()) == known
    older = msgspec.to_builtins(known)
    del older["links"]
    assert Profile.from_json(msgspec.json.encode(older)).links is None
    older["links"] = {"host": msgspec.to_builtins(pair(gb_s=-1.0))}
    with pytest.raises(ProfileError, match="has an impossible link"):
        Profile.from_json(msgspec.json.encode(older))


def test_a_kept_graph_takes_other_rooms() -> None:
    graph = copying_chain()
    found = relinked(graph, LowerTiers(7)).links
    assert isinstance(found, Links)
    assert found == msgspec.structs.replace(graph.links, host_bytes=7)
    bare = msgspec.structs.replace(graph, links=None, device="h100", versions={})
    links = relinked(bare, LowerTiers(7)).links
    assert links is not None
    assert links.d2h.bytes_per_us == pytest.approx(51_200)
    elsewhere = msgspec.structs.replace(bare, device="cpu", versions={"priced_on": "a machine"})
    with pytest.raises(ProfileError, match="measure the links of a machine to its host"):
        relinked(elsewhere, LowerTiers(7))


@pytest.mark.parametrize("call", ["posix_fallocate", "preadv", "pwrite", "statvfs"])
def test_a_system_without_calls_for_files_has_no_tier_of_files(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, call)
    said = rf"plan without {{}}: it keeps values in files, .* on Linux \(.* lacks os\.{call}\)"
    with pytest.raises(TierError, match=said.format("host")):
        lower_tiers("1MiB", None, "cpu")
    with pytest.raises(TierError, match=said.format("nvme")):
        Folder(str(tmp_path), "nvme")
    with pytest.raises(TierError, match=said.format("host")):
        file_pair(str(tmp_path))
    # Another machine may have them.
    assert lower_tiers("1MiB", "/mnt/nvme:1MiB", "h100") == (1 << 20, 1 << 20, "/mnt/nvme")
