"""200 measured steps on two ranks under the checks of glibc's heap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug_malloc import debug_malloc
from tests.distributed.launch import ranks

STEPS = 200


@pytest.mark.slow
def test_no_rank_dies_while_its_steps_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    for name, value in debug_malloc().items():
        monkeypatch.setenv(name, value)
    for found in ranks("measured/worker.py", tmp_path, 2, str(STEPS)):
        assert all(peak > 0 for peak in found.values())
