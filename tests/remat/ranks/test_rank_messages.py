"""The thread that shows a rank's life ends with its messages."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from remat.ranks import collective_call
from remat.ranks.collective_call import RankMessages


class SlowStore:
    """A store whose texts from other threads take a while."""

    def __init__(self) -> None:
        self.timeout, self.is_reached = timedelta(seconds=30), threading.Event()

    def clone(self) -> SlowStore:
        return self

    def set(self, _key: str, _text: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.is_reached.set()
            time.sleep(0.2)


class Group:
    """A group of one rank with that store."""

    def __init__(self) -> None:
        self.store = SlowStore()

    def get_group_store(self) -> SlowStore:
        return self.store

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_no_thread_is_in_the_store_once_a_board_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would end it there, in torch's C++, if the process ended now."""
    monkeypatch.setattr(collective_call, "BEAT_S", 0.01)
    monkeypatch.setattr(dist, "PrefixStore", lambda _prefix, store: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0])
    group: Any = Group()
    messages = RankMessages(group, "test")
    assert group.store.is_reached.wait(30)
    messages.close()
    assert not messages._beat.is_alive()
