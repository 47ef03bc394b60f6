"""Costs of a test run are fixed and go to a folder of their own; Ctrl-C is heard in tests of it.

A shell that starts a job in the background lets it ignore the signal. Tests that run side by side
share the cores: torch's threads, of which each would have as many as there are cores, would
otherwise wait for each other.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.paths import ROOT

# Before torch is imported, which reads it. The usual one, in /tmp, outlives a machine that went
# down in the middle of a compilation: a library that was cut off there fails each later run.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each lever of each solve is held to the rules of a legal step, in processes that tests start too.
os.environ.setdefault("REMAT_CHECK", "1")

SIDE_BY_SIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if SIDE_BY_SIDE > 1:
    # Before torch is imported, which reads it, as do the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // SIDE_BY_SIDE)))

# A busy machine draws examples slowly, which is no fault of theirs.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", help="K/N: every N-th file that has tests, from K on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in `--part`; after `-m`, so that each part has its share."""
    chosen, parts = map(int, config.getoption("--part").split("/"))
    files = {file: i for i, file in enumerate(sorted({item.path for item in items}))}
    left_out = [item for item in items if files[item.path] % parts != chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if files[item.path] % parts == chosen]


def pytest_collection_finish() -> None:
    """Python's collector walks torch's million objects no more, and the others less often.

    Tracing makes so many objects that it took a tenth of the time of tests that trace.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("prices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def costs_without_a_clock(cost_cache: Path) -> Iterator[None]:
    """Of captured models, so that their plans are the same however busy the machine is."""
    from tests.fixed_costs import REPLACED, patched

    with patched(REPLACED):
        yield


_KEEPS_PLANS: list[Any] = []
"""The real one, which is replaced for most tests."""


@pytest.fixture(scope="session", autouse=True)
def no_kept_plans() -> Iterator[None]:
    """A step is planned in each test: the plan of an earlier one is not taken."""
    from remat.caches import known_plans
    from remat.compile import start

    _KEEPS_PLANS.extend([start.keeps_plans, known_plans.keeps_solves])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "keeps_plans", lambda _: False)
        patch.setattr(known_plans, "keeps_solves", lambda: False)
        yield


@pytest.fixture
def kept_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_kept_plans: None) -> Path:
    """Plans of compiled steps are kept in this folder, as they are for users."""
    from remat.compile import start

    monkeypatch.setattr(start, "keeps_plans", _KEEPS_PLANS[0])
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path / "compiled"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_kept_plans: None) -> Path:
    """Plans of caches are kept in this folder, as they are for users."""
    from remat.caches import known_plans

    monkeypatch.setattr(known_plans, "keeps_solves", _KEEPS_PLANS[1])
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path / "planned"


@pytest.fixture
def clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ops and steps are timed, as they are for users; the costs go to this folder."""
    from tests.fixed_costs import CLOCKED

    # By the monkeypatch of the test, which undoes what it does in turn. With two, the other could
    # put back what this one had put there, for all tests that follow.
    for (owner, name), value in CLOCKED.items():
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path
