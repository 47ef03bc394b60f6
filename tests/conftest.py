"""Prices of a test run go to a folder of their own; torch runs on two threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def price_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("prices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE", str(folder))
        yield folder
