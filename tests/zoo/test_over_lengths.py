"""Models of Hugging Face transformers over a range of lengths: eager's bits at each of eight."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import remat
from remat.schedules.family import resized_schedule
from remat.schedules.simulate import simulate
from tests.zoo.case import Case
from tests.zoo.catalogue import ZOO

SEQ = ("seq", 8, 32)
LENGTHS = (8, 11, 14, 17, 21, 25, 29, 32)

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def cut(case: Case, length: int) -> Case:
    """The same batch with texts of a length."""
    kwargs = {
        name: given[:, :length].contiguous() if isinstance(given, torch.Tensor) else given
        for name, given in case.kwargs.items()
    }
    return dataclasses.replace(case, kwargs=kwargs)


@pytest.mark.parametrize("name", ["Hugging Face Llama", "Hugging Face BERT"])
def test_it_trains_as_eager_at_each_length(name: str) -> None:
    entry = ZOO[name]
    if entry.is_missing:
        pytest.skip(f"{entry.needs} is not installed: pip install 'remat[zoo]'")
    case = entry.make()
    first = cut(case, 20)
    texts = [key for key, given in case.kwargs.items() if isinstance(given, torch.Tensor)]
    module = remat.rematerialize(
        case.model, first.args, first.kwargs, budget="80%", loss_fn=case.loss_fn,
        dynamic={key: {1: SEQ} for key in texts}, check=False,
    )  # fmt: skip
    for length in LENGTHS:
        one = cut(case, length)
        found = remat.check(case.model, module, one.args, one.kwargs, loss_fn=case.loss_fn, steps=1)
        assert found.differences == (), length
        assert not found.exceeds(module.family.budget_bytes), length
        assert module.ranged_graph is not None
        graph, member = module.ranged_graph.at(seq=length), module.family.at(seq=length)
        predicted = simulate(graph, resized_schedule(member.schedule, graph))
        assert abs(predicted.peak_bytes / found.plan_peak_bytes - 1) <= 0.01, length
