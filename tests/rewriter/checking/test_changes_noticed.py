"""Whatever forward reads: a change between steps is noticed before a step, or by an audit soon.

Sixty changes and more. For each, eager's result is seen to change; a plan may refuse the step, or
an audit end it within eight steps. None may train on as if nothing had happened.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.graph_capture import measure_costs, trace
from remat.graph_capture.errors import AuditError, CaptureError, RewriteError
from remat.rewriter.rewriting import rewrite
from tests.rewriter.checking import state_of_objects, state_of_the_process
from tests.rewriter.checking.state_of_objects import Case, Read
from tests.steps import schedule_of

WITHIN = 8
"""Steps after which a change is noticed at the latest."""
TABLES = (state_of_objects, state_of_the_process)
CASES: dict[str, Case] = {
    name: case
    for table in TABLES
    for name, case in vars(table).items()
    if inspect.isfunction(case) and case.__module__ == table.__name__ and name[0] != "_"
}


class Reader(nn.Module):
    """Multiplies by what it reads."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.read(x)).square().mean()


@pytest.fixture
def state_of_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What changes in these tests is as before after them."""
    monkeypatch.setenv("TESTS_FOLDER", str(tmp_path))
    monkeypatch.setattr(functional, "relu", functional.relu)
    monkeypatch.setattr(nn.Softplus, "forward", nn.Softplus.forward)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    here, threads, errors = os.getcwd(), torch.get_num_threads(), np.geterr()
    limits = sys.getrecursionlimit(), gc.get_threshold()
    environ, precision = dict(os.environ), torch.get_float32_matmul_precision()
    yield
    os.chdir(here)
    torch.set_num_threads(threads)
    np.seterr(**errors)
    sys.setrecursionlimit(limits[0])
    gc.set_threshold(*limits[1])
    os.environ.clear()
    os.environ.update(environ)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.use_deterministic_algorithms(False)


def test_there_are_sixty() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_noticed(case: str, state_of_process: None) -> None:
    noticed = steps_until_noticed(CASES[case])
    assert noticed <= WITHIN


def steps_until_noticed(case: Case) -> int:
    """How many steps after a change one is refused; 0 where no plan is made."""
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    read, change = case(x)
    model = Reader(read)
    try:
        traced = trace(model, (x,))
    except CaptureError:
        return 0
    module = rewrite(model, schedule_of(measure_costs(traced), "store_all"), trace=traced)
    step(module, x)
    expected = model(x).detach()
    change()
    now = model(x).detach()
    assert now.dtype != expected.dtype or not torch.equal(now, expected), "nothing has changed"
    for n in range(1, WITHIN + 1):
        try:
            step(module, x)
        except (AuditError, RewriteError):
            return n
    return WITHIN + 1


def step(module: Any, x: Tensor) -> None:
    module.zero_grad()
    module(x).backward()
