"""Traces with what torch's own library said of them, kept in `goldens.json`.

``REMAT_CUDA_TORCH=FOLDER python -m tests.schedules.allocator.goldens`` records them anew
(`tests/schedules/allocator/torch_library.py` says what FOLDER holds).
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from remat.formats import MIB
from remat.schedules.caching_allocator import UNLIMITED_BYTES, AllocatorSettings
from remat.schedules.reserved import AllocatorReplay
from tests.schedules.allocator import torch_library
from tests.schedules.allocator.traces import SETTINGS, random_trace, step_traces

FILE = Path(__file__).with_name("goldens.json")
CAPACITIES_BYTES = (UNLIMITED_BYTES, 1024 * MIB, 256 * MIB)


class Golden(msgspec.Struct, frozen=True):
    """A trace, the bytes of the device, and torch's figures under each of `SETTINGS`."""

    capacity_bytes: int
    trace: list[int]
    torchs: dict[str, AllocatorReplay]

    def settings(self, name: str) -> AllocatorSettings:
        """Those of that name, for a device of that size."""
        return msgspec.structs.replace(SETTINGS[name], capacity_bytes=self.capacity_bytes)


class Goldens(msgspec.Struct, frozen=True):
    """All that were recorded, and the release of torch that they are of."""

    torch: str
    goldens: list[Golden]


def goldens() -> list[Golden]:
    """Those of the file."""
    return msgspec.json.decode(FILE.read_bytes(), type=Goldens).goldens


def _traces() -> Iterator[tuple[list[int], int]]:
    source = random.Random(1)
    for i in range(12):
        yield random_trace(source, 150), CAPACITIES_BYTES[i % 3]
    yield from ((trace, UNLIMITED_BYTES) for trace in list(step_traces())[2:40:7])


def _record() -> int:
    why_not = torch_library.why_not()
    if why_not:
        print(why_not, file=sys.stderr)
        return 2
    found: list[Golden] = []
    with tempfile.TemporaryDirectory() as folder:
        program = torch_library.build(Path(folder))
        for trace, capacity_bytes in _traces():
            golden = Golden(capacity_bytes, trace, {})
            for name in SETTINGS:
                golden.torchs[name] = torch_library.served(program, trace, golden.settings(name))
            found.append(golden)
    said = msgspec.json.encode(Goldens(torch_library.release(), found))
    FILE.write_bytes(said.replace(b'{"capacity', b'\n{"capacity') + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(_record())
