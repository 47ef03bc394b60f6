"""Each test of compiled steps begins with none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from remat.compile import graph_context


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing is compiled, and no plan is listed: of many, only the last are."""
    torch._dynamo.reset()
    graph_context._plans.clear()
    yield
    torch._dynamo.reset()
