"""What ranks of a group tell one another, beside their collectives: short texts in its store.

A store needs no partner. A rank that has failed can say so while another waits for something else,
and what the user's program sends through the group stays in its order. While a rank is at work, a
thread of its own shows that it lives. So a long solve is told from a process that has ended.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import torch.distributed as dist

BEAT_S = 2.0
"""Seconds between two signs of life."""
SILENT_S = 60.0
"""A rank that has shown none for so long has ended, or its process stands still."""
PAUSE_S = 0.02
_LAST_BEAT_S = 5.0
"""Longest wait for the last sign of life to reach the store."""
LINGER_S = 10.0
"""How long a rank stays for the others to read its last word: the store may end with it."""

_calls: weakref.WeakKeyDictionary[Any, defaultdict[str, Iterator[int]]] = (
    weakref.WeakKeyDictionary()
)
"""By group and purpose, the numbers of its calls. All ranks of a group count alike."""


class RankFailure(msgspec.Struct, frozen=True):
    """The error of one rank, for the others; `rank` among all, `kind` the name of its class."""

    rank: int
    kind: str
    text: str
    place: str = ""


class RankMessages:
    """Texts of one call; the n-th calls with the same `what` on all ranks belong together."""

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        calls = _calls.setdefault(group, defaultdict(itertools.count))
        store: Any = group.get_group_store()
        self._store: Any = dist.PrefixStore(f"remat/{what}/{next(calls[what])}", store)
        self.timeout_s = store.timeout.total_seconds()
        self.rank, self.size = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._show_life, daemon=True)
        # Before the thread runs: others see at once that this rank has come.
        self._store.set(f"beat/{self.rank}", "0")
        self._beat.start()

    @property
    def others(self) -> list[int]:
        """Numbers in the group, not among all ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def post(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        # Asked first, since `get` waits until somebody posts.
        return self._store.get(key).decode() if self._store.check([key]) else None

    def first(self, key: str) -> str:
        """The number in the group of the first rank to ask for this key."""
        # The store compares and sets in one request, so two ranks cannot both be first.
        return self._store.compare_set(key, "", str(self.rank)).decode()

    def fail(self, failure: RankFailure) -> None:
        # The first error stays: later ones mostly follow from it.
        self._store.compare_set("failure", "", msgspec.json.encode(failure).decode())

    def failure(self) -> RankFailure | None:
        text = self.read("failure")
        return None if text is None else msgspec.json.decode(text, type=RankFailure)

    def leave(self) -> None:
        """Say that this rank reads no more; wait `LINGER_S` at most for the others to say so."""
        self.post(f"left/{self.rank}", "")
        end = time.monotonic() + LINGER_S
        # A rank that never came leaves nothing to read.
        waited_for = [rank for rank in self.others if self.read(f"beat/{rank}") is not None]
        while waited_for and time.monotonic() < end:
            waited_for = [rank for rank in waited_for if self.read(f"left/{rank}") is None]
            time.sleep(PAUSE_S)

    def close(self) -> None:
        self._ended.set()
        # Python ends a thread that comes back from the store while the process ends, and torch's
        # C++ then aborts. Not waited for longer, as the store may be out of reach.
        self._beat.join(_LAST_BEAT_S)

    def _show_life(self) -> None:
        # A connection of its own: one serves a request at a time.
        store = self._store.clone()
        for number in itertools.count(1):
            if self._ended.wait(BEAT_S):
                return
            try:
                store.set(f"beat/{self.rank}", str(number))
            except RuntimeError:
                # The store has ended. Whoever reads from it next gets the error.
                return


class RankWatch:
    """How long ago a rank has last shown that it lives."""

    def __init__(self, messages: RankMessages, rank: int) -> None:
        self._messages, self._rank = messages, rank
        self._last: str | None = None
        self._heard = time.monotonic()

    @property
    def has_come(self) -> bool:
        """Whether it has come to this call at all, as far as `silent_s` has seen."""
        return self._last is not None

    def silent_s(self) -> float:
        """Since its last sign; since the watch began, if there was none."""
        sign = self._messages.read(f"beat/{self._rank}")
        if sign != self._last:
            # Signs are numbers that change: clocks of two machines need not agree.
            self._last, self._heard = sign, time.monotonic()
        return time.monotonic() - self._heard
