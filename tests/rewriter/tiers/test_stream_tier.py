"""The order of events over two streams, on streams that run as late as they may."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from remat.graph_capture.errors import TierError
from remat.rewriter.tiers.file_tier import HostPlaces, all_bytes
from remat.rewriter.tiers.stream_tier import Arriving, StreamTier
from tests.links import links
from tests.rewriter.tiers.lazy_streams import LazyMachine

ROOM = HostPlaces({}, 1 << 16)
SEEDS = range(40)


def tier(nvme: Path | None = None, nvme_bytes: int = 0) -> StreamTier:
    found = msgspec.structs.replace(links(), nvme_path=str(nvme or ""))
    made = StreamTier("cpu", ROOM, found, nvme_bytes)
    made.require_room()
    return made


def value(seed: int, n: int = 64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def drop(machine: LazyMachine, x: Tensor) -> None:
    """Its block goes to whoever asks next, and the computing stream writes to it before."""
    machine.computing.put(lambda: x.fill_(float("nan")))
    machine.free.append(all_bytes(x.untyped_storage()))


def round_trips(machine: LazyMachine, made: StreamTier, n: int = 6) -> list[bool]:
    """Values that go out at one place and come back into each other's blocks; which are right."""
    found: list[bool] = []
    for i in range(n):
        x = torch.empty(64)
        machine.computing.put(lambda x=x, i=i: x.copy_(value(i)))
        handle = made.offload(x, 0)
        handle = made.leave(handle, x)
        drop(machine, x)
        del x
        back = made.arrive(made.fetch(handle))
        machine.computing.put(lambda b=back, i=i: found.append(torch.equal(b, value(i))))
        drop(machine, back)
        del handle, back
    machine.run()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_values_come_back_however_late_streams_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LazyMachine(seed)
    machine.install(monkeypatch)
    assert round_trips(machine, tier()) == [True] * 6
    assert machine.ranges == 1


def arrive_at_once(pending: Arriving) -> Tensor:
    pending.copied = None
    return pending.x


class Deaf:
    """A computing stream whose present nobody waits for."""

    def __init__(self, machine: LazyMachine) -> None:
        self.machine = machine

    def wait_event(self, event: Any) -> None:
        self.machine.computing.wait_event(event)

    def record_event(self) -> Any:
        event = self.machine.computing.record_event()
        event.is_passed = True
        return event


@pytest.mark.parametrize("broken", ["leave", "arrive", "present"])
def test_without_a_wait_some_order_loses_a_value(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = 0
    for seed in SEEDS:
        machine = LazyMachine(seed)
        machine.install(monkeypatch)
        made = tier()
        if broken == "leave":
            monkeypatch.setattr(made, "leave", lambda handle, x: handle)
        elif broken == "arrive":
            monkeypatch.setattr(made, "arrive", arrive_at_once)
        else:
            monkeypatch.setattr(torch.cuda, "current_stream", lambda *_, m=machine: Deaf(m))
        wrong += round_trips(machine, made) != [True] * 6
    assert wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fetch_that_is_dropped_writes_into_nobodys_block(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LazyMachine(seed)
    machine.install(monkeypatch)
    made = tier()
    x = value(1)
    handle = made.leave(made.offload(x, 0), x)
    pending = made.fetch(handle)
    block = all_bytes(pending.x.untyped_storage())[:256]
    del pending  # as where backward fails
    machine.computing.put(lambda: block.fill_(7))
    machine.run()
    assert bool((block == 7).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_place_waits_for_its_former_tenants(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that share bytes with a third come and go before it, and are still being read."""
    machine = LazyMachine(seed)
    machine.install(monkeypatch)
    made = tier()
    found: list[bool] = []
    for i, place in enumerate((0, 256, 128, 0, 128)):
        x = value(i)
        handle = made.leave(made.offload(x, place), x)
        back = made.arrive(made.fetch(handle))
        machine.computing.put(lambda b=back, i=i: found.append(torch.equal(b, value(i))))
        del handle, x, back
    machine.run()
    assert found == [True] * 5
    assert machine.ranges == 1


def test_a_second_forward_gets_a_range_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LazyMachine()
    machine.install(monkeypatch)
    made = tier()
    xs = [value(i) for i in range(3)]
    handles = [made.leave(made.offload(x, 0), x) for x in xs]
    backs = [made.arrive(made.fetch(handle)) for handle in handles]
    machine.run()
    assert all(map(torch.equal, backs, xs))
    assert machine.ranges == 3
    del handles
    gc.collect()
    assert len([made.leave(made.offload(x, 0), x) for x in xs]) == machine.ranges == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_values_go_on_to_files_and_come_back(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LazyMachine(seed)
    machine.install(monkeypatch)
    made = tier(tmp_path, 1)
    found: list[bool] = []
    for i in range(4):
        x = torch.empty(64)
        machine.computing.put(lambda x=x, i=i: x.copy_(value(i)))
        on_host = made.leave(made.offload(x, 0), x)
        on_disk = made.write(on_host)
        drop(machine, x)
        del on_host, x
        again = made.read(on_disk, 0)
        back = made.arrive(made.fetch(again))
        machine.computing.put(lambda b=back, i=i: found.append(torch.equal(b, value(i))))
        del on_disk, again, back
    machine.run()
    assert found == [True] * 4
    assert machine.ranges == 1
    assert not list(tmp_path.iterdir())


def test_what_is_on_the_host_anyway_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LazyMachine()
    machine.install(monkeypatch)
    made = tier()
    monkeypatch.setattr(made, "device", torch.device("meta"))
    x = value(0)
    handle = made.leave(made.offload(x, 0), x)
    below = made.read(made.write(handle), 0)
    assert made.arrive(made.fetch(below)) is x
    assert not any(stream.queue for stream in machine.streams)


def test_any_strides_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LazyMachine(eager=True)
    machine.install(monkeypatch)
    made = tier()
    whole = torch.arange(60, dtype=torch.float64)
    x = whole[3:].as_strided((4, 5), (1, 7))
    back = made.arrive(made.fetch(made.offload(x, 0)))
    assert torch.equal(back, x)
    assert (back.stride(), back.storage_offset()) == (x.stride(), x.storage_offset())
    assert back.untyped_storage().nbytes() == whole.nbytes


def test_gaps_between_places_may_not_break_the_hosts_room() -> None:
    with pytest.raises(TierError, match=r"take 65536 bytes of pinned memory.*room for 60000"):
        StreamTier("cpu", ROOM, links(host_bytes=60000), 0)


def test_forwards_in_flight_may_not_break_the_hosts_room(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LazyMachine()
    machine.install(monkeypatch)
    made = StreamTier("cpu", ROOM, links(host_bytes=5 * ROOM.size_bytes // 2), 0)
    x = value(0)
    handles = [made.offload(x, 0) for _ in range(2)]
    with pytest.raises(
        TierError, match=r"^call backward before .* 3 forwards in flight copy 196608 .* for 163840"
    ):
        made.offload(x, 0)
    del handles[0]
    handles.append(made.offload(x, 0))
    assert machine.ranges == 2
