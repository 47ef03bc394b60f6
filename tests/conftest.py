"""Prices of a test run go to a folder of their own; Ctrl-C is heard in tests of it.

A shell that starts a job in the background lets it ignore the signal.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def price_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("prices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE", str(folder))
        yield folder
