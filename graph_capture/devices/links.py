"""Links between tiers of memory and between ranks: as measured, and as plans are made with them."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from remat.formats import MIB
from remat.graph_capture.errors import FileError
from remat.graph_capture.graph import MOST_US, Link
from remat.graph_capture.spill_files import File, Folder, require_writable

# Plans take this part of a measured rate: a link that is loaded to the full is late in each step in
# which it is a little slower, and its stalls add up. At the full rate, a GPT on an RTX 4090 took
# 7.7 % more than eager on a link of 95 % of it, where 5.3 % were planned.
PLANNED_SHARE = 0.9
BYTES_PER_US_IN_GB_S = 1e3  # bytes a microsecond in a GB/s
_MOST_GB_S = 1e6
PINNED_MEMORY = "pinned memory"  # not pinned, copies are slow and wait


class LinkSpeed(msgspec.Struct, frozen=True):
    gb_s: float  # 10⁹ bytes a second, alone
    both_gb_s: float  # with the other way busy
    latency_us: float  # of each copy, beside its bytes
    both_latency_us: float = 0.0  # with the other way busy

    @property
    def planned(self) -> Link:
        # A step copies both ways at once.
        latency_us = max(self.latency_us, self.both_latency_us)
        return Link(PLANNED_SHARE * self.both_gb_s * BYTES_PER_US_IN_GB_S, latency_us)


class LinkPair(msgspec.Struct, frozen=True):
    down: LinkSpeed  # to the lower tier
    up: LinkSpeed
    place: str  # the lower tier: ``pinned memory``, or the folder of its files
    pageable_gb_s: float = 0.0  # down to memory that is not pinned; 0 where there is none
    threads_gb_s: dict[int, float] = {}  # there and back, by more threads a copy

    def __str__(self) -> str:
        text = (
            f"{self.down.gb_s:.3g} GB/s to {self.place} and {self.up.gb_s:.3g} back; at once "
            f"{self.down.both_gb_s:.3g} and {self.up.both_gb_s:.3g}"
        )
        if self.pageable_gb_s:
            text += f"; {self.pageable_gb_s:.3g} to memory that is not pinned"
        more = [f"{n} threads {gb_s:.3g}" for n, gb_s in self.threads_gb_s.items()]
        return text + (f"; a copy by {', by '.join(more)}" if more else "")


class LinkSpeeds(msgspec.Struct, frozen=True):
    host: LinkPair
    nvme: LinkPair | None = None


def are_speeds(pair: LinkPair) -> bool:
    ways, others = (pair.down, pair.up), (pair.pageable_gb_s, *pair.threads_gb_s.values())
    rates = [gb_s for way in ways for gb_s in (way.gb_s, way.both_gb_s)]
    return (
        all(0 <= gb_s <= _MOST_GB_S for gb_s in others)
        and all(0 < gb_s <= _MOST_GB_S for gb_s in rates)
        and all(0 <= us <= MOST_US for way in ways for us in (way.latency_us, way.both_latency_us))
    )


def fitted(times_us: Mapping[int, float]) -> tuple[float, float]:
    """Rate in GB/s and latency in µs, from times of a copy by its bytes; of two sizes or more."""
    # latency + size / rate = time, each equation divided by its time, so that small copies count.
    rows = np.array([(1 / time_us, size / time_us) for size, time_us in times_us.items()])
    latency_us, us_per_byte = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
    if latency_us < 0 or us_per_byte <= 0:  # noise: all of the time is of the bytes
        latency_us, us_per_byte = 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    return 1 / us_per_byte / BYTES_PER_US_IN_GB_S, latency_us


def speed_of(alone_us: Mapping[int, float], both_us: Mapping[int, float]) -> LinkSpeed:
    """One way, from the times of its copies by size: alone, and with the other way busy."""
    gb_s, latency_us = fitted(alone_us)
    both_gb_s, both_latency_us = fitted(both_us)
    # By noise alone a fit can say that a busy link is faster.
    return LinkSpeed(gb_s, min(gb_s, both_gb_s), latency_us, both_latency_us)


# Links between ranks. A collective takes a start and the time of its bytes: the alpha-beta model
# (R. Hockney 1994, https://doi.org/10.1016/S0167-8191(06)80021-9). A rank of n moves the share (n -
# 1) / n of the whole, twice for a sum that all get (the "bus bandwidth" of nccl-tests,
# https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Links inside the node and
# each GPU's card work at once. A ring takes one hop for each further node.
#
# `beside`: how much longer computations take that lose multiprocessors to a collective. Without it,
# a plan that moves all weights for each microbatch looks better than it is. No rank times a
# collective by itself: it would wait for the others for ever.

# All-to-all: each rank sends every other one a part of its own. Send: whole, all ranks at once.
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
_MOST_BESIDE = 10


class Traffic(msgspec.Struct, frozen=True):
    kind: Collective
    whole_bytes: float  # of the whole tensor: all shards together
    ranks: int  # that take part
    here: int  # the most of them that one node has

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.here)

    @property
    def shares(self) -> tuple[float, float]:
        """Of the whole: what a rank moves inside its node, and over its own card."""
        n, here = self.ranks, self.here
        if self.kind == "all_to_all":
            return (here - 1) / n, 1 - here / n
        if self.kind == "send":
            return float(here > 1), float(n > here)
        return (here - 1) / here, (1 - here / n) / here


class CollectiveTimes(msgspec.Struct, frozen=True):
    kind: Collective
    ranks: int
    size_bytes: tuple[int, ...]  # of the whole, ascending
    time_us: tuple[float, ...]
    apart: int = 1  # ranks between two neighbours of the group

    @property
    def is_sound(self) -> bool:
        pairs = zip(self.size_bytes, self.size_bytes[1:], strict=False)
        return (
            0 < len(self.size_bytes) == len(self.time_us)
            and all(a < b for a, b in pairs)
            and self.size_bytes[0] > 0
            and all(0 < us <= MOST_US for us in self.time_us)
            and min(self.ranks, self.apart) > 0
        )

    def us(self, size_bytes: float) -> float:
        """Between two sizes, and in proportion above the largest."""
        if size_bytes > self.size_bytes[-1]:  # beyond the largest only bytes count
            return self.time_us[-1] * size_bytes / self.size_bytes[-1]
        return float(np.interp(size_bytes, self.size_bytes, self.time_us))


class RankLinks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Links of one rank with a GPU of its own, one way, and what collectives reach over them."""

    inside_gb_s: float  # to the ranks of its node
    between_gb_s: float  # to those of others
    inside_us: float  # start of a collective in a node
    between_us: float  # start of one over several
    hop_us: float  # of each further node of a ring
    beside: float  # what is computed beside a collective takes so many times as long
    source: str
    node_size: int = 8  # ranks
    measured: tuple[CollectiveTimes, ...] = ()  # these go before the model

    def __str__(self) -> str:
        return (
            f"{self.inside_gb_s:.3g} GB/s in a node and {self.between_gb_s:.3g} GB/s between, "
            f"{self.source}"
        )

    def us(self, kind: Collective, size_bytes: float, ranks: int, apart: int = 1) -> float:
        """`size_bytes`: all shards together; `apart`: ranks between two neighbours of the group."""
        return self.collective_us(Traffic(kind, size_bytes, ranks, self._in_node(ranks, apart)))

    def collective_us(self, traffic: Traffic) -> float:
        """Of a collective that waits for none of its ranks."""
        if traffic.ranks <= 1:
            return 0.0
        for one in self.measured:
            at = one.kind, one.ranks, self._in_node(one.ranks, one.apart)
            if at == (traffic.kind, traffic.ranks, traffic.here):
                return one.us(traffic.whole_bytes)
        ways = zip(traffic.shares, (self.inside_gb_s, self.between_gb_s), strict=True)
        moving_us = max(
            traffic.whole_bytes * share / (gb_s * BYTES_PER_US_IN_GB_S) for share, gb_s in ways
        )
        start_us = self.inside_us
        if traffic.nodes > 1:
            # A ring takes one hop for each further node.
            hops = 0 if traffic.kind == "send" else traffic.nodes - 1
            start_us = self.between_us + self.hop_us * hops
        # A sum that all get is reduced in shards, and these are then gathered.
        return (2 if traffic.kind == "all_reduce" else 1) * (start_us + moving_us)

    def send_us(self, size_bytes: float, *, far: bool) -> float:
        return self.collective_us(Traffic("send", size_bytes, 2, 1 if far else 2))

    def both_us(self, compute_us: float, collective_us: float) -> float:
        """Time until both are done, where one goes on beside the other."""
        lost = 1 - 1 / self.beside  # of its speed, to multiprocessors of the collective
        return max(collective_us, compute_us + collective_us * lost)

    def _in_node(self, ranks: int, apart: int) -> int:
        return max(1, min(ranks, self.node_size // apart))


def wrong_in(links: RankLinks) -> str:
    """What of links cannot be, in words, or empty: a file that was edited may say anything."""
    starts = links.inside_us, links.between_us, links.hop_us
    is_rate = all(0 < rate <= _MOST_GB_S for rate in (links.inside_gb_s, links.between_gb_s))
    if not is_rate or not all(0 <= us <= MOST_US for us in starts):
        return "an impossible rate or latency: rates are above 0 GB/s"
    if not 1 <= links.beside <= _MOST_BESIDE:
        return f"beside {links.beside}: give 1 for no slowdown, or a bit more"
    if links.node_size < 1:
        return f"nodes of {links.node_size} ranks: give 1 or more"
    for one in links.measured:
        if not one.is_sound:
            return (
                f"an impossible table of {one.kind} over {one.ranks} ranks: give as many times as "
                "sizes, all above 0, in ascending sizes"
            )
    return ""


# Files of a folder are the links of a CPU, and those to NVMe, copied by a step's own code. Less
# than a GiB goes each way, and a series ends at `_MOST_S`: a drive with its cache full is slower.

SIZES = (MIB, 4 * MIB, 16 * MIB)
MORE_THREADS = (2, 4)
REPEATS, _MOST_S = 3, 1.0  # of one series, which is copies of one size one way
_COPIES_BESIDE = 24  # copies the other way, after which a very uneven link is alone


class FileMeter:
    """Copies between memory and files of a folder; `threads` share each copy. OSError: no room."""

    def __init__(self, folder: str, threads: int = 1) -> None:
        require_writable(folder)
        self.folder, self.threads = Folder(folder, "host"), threads
        # Threads, files and memory of their own for each way, as both may copy at once.
        self.pools = {is_down: ThreadPoolExecutor(threads) for is_down in (True, False)}
        self.files = {(way, size): self._parts(size) for way in (True, False) for size in SIZES}
        # Ones, so that all pages are there.
        self.memory = {is_down: bytearray(b"1" * max(SIZES)) for is_down in (True, False)}
        self.moved_bytes = 0

    def _parts(self, size_bytes: int) -> list[File]:
        ends = [size_bytes * i // self.threads for i in range(self.threads + 1)]
        return [File(self.folder, end - start) for start, end in pairwise(ends)]

    def fill(self) -> None:
        for is_down, size_bytes in self.files:  # without holes, which touch no drive
            self._share(True, is_down, size_bytes)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()
        self.files.clear()

    def speed(self, is_down: bool) -> LinkSpeed:
        return speed_of(self.times_us(is_down), self._times_beside_us(is_down))

    def times_us(self, is_down: bool, sizes: tuple[int, ...] = SIZES) -> dict[int, float]:
        found = dict[int, float]()
        for size in sizes:
            times, end = list[float](), time.perf_counter() + _MOST_S
            while len(times) < REPEATS and not (times and time.perf_counter() > end):
                start = time.perf_counter()
                self._share(is_down, is_down, size)
                times.append(1e6 * (time.perf_counter() - start))
            found[size] = min(times)
        return found

    def _times_beside_us(self, is_down: bool) -> dict[int, float]:
        ended = threading.Event()

        def other() -> None:
            for _ in range(_COPIES_BESIDE):  # not for ever: a drive's cache must not be exhausted
                if not ended.is_set():
                    self._share(not is_down, not is_down, max(SIZES))

        with ThreadPoolExecutor(1) as busy:
            beside = busy.submit(other)
            try:
                found = self.times_us(is_down)
            finally:
                ended.set()
            beside.result()
        return found

    def _share(self, is_down: bool, which: bool, size_bytes: int) -> None:
        """One copy of memory into the files `which` of that size, or of them into memory."""
        self.moved_bytes += size_bytes
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory[which]))
        doing = list[Future[None]]()
        for file in self.files[which, size_bytes]:
            copy = file.write_from if is_down else file.read_to
            doing.append(self.pools[which].submit(copy, at))
            at += file.size_bytes
        for one in doing:
            one.result()


def file_pair(folder: str, threads: Sequence[int] = ()) -> LinkPair:
    """Both ways between memory and files in `folder`, by one thread each, as a step copies.
    `threads` are tried only for a look at what they would reach."""
    try:
        with contextlib.closing(FileMeter(folder)) as meter:
            meter.fill()
            down, up = meter.speed(is_down=True), meter.speed(is_down=False)
        by_threads = {n: _threads_gb_s(folder, n) for n in threads}
        return LinkPair(down, up, folder, threads_gb_s=by_threads)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"name another folder: files in {folder} cannot be written and read ({error.strerror})"
        ) from error


def _threads_gb_s(folder: str, threads: int) -> float:
    size_bytes = SIZES[-1]
    with contextlib.closing(FileMeter(folder, threads)) as meter:
        meter.fill()
        both_us = sum(meter.times_us(way, (size_bytes,))[size_bytes] for way in (True, False))
    return 2 * size_bytes / both_us / BYTES_PER_US_IN_GB_S
