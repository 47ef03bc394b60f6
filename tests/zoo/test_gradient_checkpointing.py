"""Checkpointing of transformers, by either name: a plan in its bytes computes less again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import remat
from remat.budgets import unmodified
from remat.graph_capture import measure_costs, trace
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from tests.limits import AMPLE_S
from tests.zoo.catalogue import ZOO
from tests.zoo.hugging_face import checkpoint

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

OFF = {"Hugging Face GPT-2": 0.001, "Hugging Face Llama": 0.001, "Hugging Face BERT": 0.03}
"""How far a predicted peak may be from the measured one. BERT's is
too low by one result of a layer under autocast, for a reason that is not found."""


@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize("is_lower", [False, True], ids=["float32", "autocast"])
def test_in_the_bytes_of_checkpointing_a_plan_computes_less_again(
    name: str, is_lower: bool
) -> None:
    entry = ZOO[name]
    if entry.is_missing:
        pytest.skip(f"{entry.needs} is not installed: pip install 'remat[zoo]'")
    case = entry.make()
    model: Any = case.model
    checkpoint(model)
    batch: dict[str, Any] = {"loss_fn": case.loss_fn, "target": case.target}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_lower):
        traced = trace(model, case.args, case.kwargs, **batch)
        graph = measure_costs(traced)
        eager, plan = unmodified(graph), remat.solve(graph, "100%", "cut", time_limit_s=AMPLE_S)
        assert plan.schedule is not None
        module = rewrite(model, plan.schedule, trace=traced)
        found = check(model, module, case.args, case.kwargs, steps=1, **batch)
    assert found.equal
    assert eager.peak_bytes == pytest.approx(found.baseline_peak_bytes, rel=OFF[name])
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
    assert eager.overhead > 0
    assert plan.overhead < eager.overhead
