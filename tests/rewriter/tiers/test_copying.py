"""Threads of links: in order, one error each, and nothing held once a copy has ended."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from remat.graph_capture.errors import TierError
from remat.graph_capture.spill_files import Finalizer
from remat.rewriter.tiers.file_tier import LinkThread, link_thread
from tests.limits import AMPLE_S


class Thing:
    """Something that can be weakly referred to."""


def test_a_link_copies_in_the_order_in_which_copies_are_begun() -> None:
    link, done = LinkThread("test"), list[int]()
    copies = [link.begin(done.append, [i]) for i in range(50)]
    for copy in copies:
        copy.wait()
    assert done == list(range(50))


def test_a_copy_waits_for_one_over_another_link() -> None:
    first, second, done = LinkThread("test"), LinkThread("test"), list[str]()
    held = threading.Event()
    source = first.begin(held.wait, [])
    copy = second.begin(done.append, ["read"], source)
    assert done == []
    held.set()
    copy.wait()
    assert done == ["read"]


ENDS_AMID_COPIES = """
import torch
from remat.rewriter.tiers.file_tier import link_thread

def copied(x):
    for _ in range(2000):
        x.clone()

first, second = link_thread("first"), link_thread("second")
for _ in range(1000):
    second.begin(copied, [torch.ones(20_000)], first.begin(copied, [torch.ones(20_000)]))
"""


def test_a_process_ends_by_itself_while_copies_are_in_torch() -> None:
    """Python would end a thread in C++ otherwise, which aborts the process."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AMID_COPIES], capture_output=True, text=True, timeout=AMPLE_S
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_a_copy_is_given_is_let_go_before_its_end_is_told() -> None:
    link, thing = LinkThread("test"), Thing()
    seen = weakref.ref(thing)
    copy = link.begin(lambda _: None, [thing])
    del thing
    copy.wait()
    assert seen() is None


def failing(_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_each_wait_raises_an_error_of_its_own_which_holds_nothing() -> None:
    link, thing = LinkThread("test"), Thing()
    seen = weakref.ref(thing)
    gc.disable()
    try:
        copy = link.begin(failing, [thing])
        del thing
        errors: list[TierError] = []
        for _ in range(2):
            with pytest.raises(TierError, match="No space left") as caught:
                copy.wait()
            errors.append(caught.value)
        assert errors[0] is not errors[1]
        assert errors[0].__cause__ is errors[1].__cause__
        cause = errors[0].__cause__
        assert isinstance(cause, OSError)
        assert cause.__traceback__ is None
        assert seen() is None
    finally:
        gc.enable()


def test_what_reads_a_copy_that_failed_fails_for_the_same_reason() -> None:
    link, done = LinkThread("test"), list[int]()
    failed = link.begin(failing, [0])
    copy = link.begin(done.append, [1], failed)
    with pytest.raises(TierError, match="No space left") as caught:
        copy.wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert done == []
    copy.settle()
    link.begin(done.append, [2]).wait()
    assert done == [2]


def test_threads_keep_no_process_alive() -> None:
    link_thread("test").begin(lambda: None, []).wait()
    assert link_thread("test") is link_thread("test")
    found = [thread for thread in threading.enumerate() if thread.name == "remat-test"]
    assert [thread.daemon for thread in found].count(False) == 0
    assert found


def test_a_forked_process_starts_threads_of_its_own() -> None:
    link_thread("test").begin(lambda: None, []).wait()
    child = os.fork()
    if not child:
        copied = link_thread("test").begin(lambda: None, [])
        copied.settle()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_ending_is_told_once_with_its_fact() -> None:
    told: list[Finalizer[int]] = []
    thing = Thing()
    ending = Finalizer(thing, told.append, 5)
    assert ending() is thing
    del thing
    assert told == [ending]
    assert told[0].fact == 5
