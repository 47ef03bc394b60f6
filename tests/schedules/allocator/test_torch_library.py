"""The replay against torch's own library, request by request; skipped where that is not at hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from remat.schedules.reserved import serve_trace
from tests.schedules.allocator import torch_library
from tests.schedules.allocator.traces import SETTINGS, random_traces, step_traces

WHY_NOT = torch_library.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

N_RANDOM = {"default": 200, "expandable": 200}
N_RANDOM_ELSE = 50


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_library.build(tmp_path_factory.mktemp("made_up_cuda"))


@pytest.mark.parametrize("name", SETTINGS)
def test_random_traces(program: Path, name: str) -> None:
    n_failed, count = 0, N_RANDOM.get(name, N_RANDOM_ELSE)
    for trace, capacity_bytes in random_traces(count):
        settings = msgspec.structs.replace(SETTINGS[name], capacity_bytes=capacity_bytes)
        torchs = torch_library.served(program, trace, settings)
        assert serve_trace(trace, settings) == torchs
        n_failed += torchs.failed_request is not None
    assert 0 < n_failed < count


@pytest.mark.parametrize("name", ["default", "expandable"])
def test_steps_of_plans(program: Path, name: str) -> None:
    traces = list(step_traces())
    assert len(traces) == 40
    for trace in traces:
        assert serve_trace(trace, SETTINGS[name]) == torch_library.served(
            program, trace, SETTINGS[name]
        )
