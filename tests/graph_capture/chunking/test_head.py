"""Which heads are found in a trace, and what is said of those that cannot run in chunks."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from remat.graph_capture.capture_api import capture
from remat.graph_capture.chunking import same_bits
from remat.graph_capture.chunking.regions import find_regions
from remat.graph_capture.chunking.replace import chunk_parts
from remat.graph_capture.chunking.same_bits import matches_eager_bitwise
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import trace
from remat.graph_capture.tracing.traced_step import with_edits
from remat.schedules.derived import with_choices
from tests.graph_capture.chunking.language_models import (
    SPLIT,
    LanguageModel,
    batch,
    made,
    plain,
)
from tests.rows import each_nth


def with_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return plain(logits, target), logits


def of_classes_second(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), target)


def scaled(logits: Tensor, target: Tensor) -> Tensor:
    return plain(logits * 0.5, target)


def with_entropy(logits: Tensor, target: Tensor) -> Tensor:
    log_p = functional.log_softmax(logits.flatten(0, 1), dim=-1)
    return functional.nll_loss(log_p, target.flatten()) + log_p.exp().mean()


def with_all_logarithms(logits: Tensor, target: Tensor) -> Tensor:
    """What label smoothing adds, but over all rows together."""
    log_p = functional.log_softmax(logits.flatten(0, 1), dim=-1)
    return functional.nll_loss(log_p, target.flatten()) - 1e-3 * log_p.sum()


def even_rows(logits: Tensor, target: Tensor) -> Tensor:
    return plain(logits[:, ::2], target[:, ::2])


WEIGHT = "remat.linear_cross_entropy_weight.default"
WHOLE: dict[str, tuple[Any, str]] = {
    "half_smoothed": (with_all_logarithms, r"probabilities are also read by sum_1"),
    "returned": (with_logits, r"its logits are also read by output"),
    "classes_second": (of_classes_second, r"not over the last of two dimensions"),
    "scaled": (scaled, r"its logits pass through aten\.mul\.Tensor \(mul\)"),
    "entropy": (with_entropy, r"log_softmax is read by|are also read by \w+"),
    "skipped_rows": (even_rows, r"slice_1 skips rows|skips rows"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_run_in_chunks_is_said_with_its_place(name: str) -> None:
    loss, text = WHOLE[name]
    model, args = LanguageModel(loss), batch()
    with pytest.warns(UserWarning, match=text) as found:
        graph = capture(model, args, split="exact")
    assert graph.regions == ()
    assert any(re.search(r"\(head .*\w+\.py:\d+\)|\w+\.py:\d+", str(one.message)) for one in found)


@pytest.mark.parametrize("name", each_nth(4, SPLIT))
def test_choices_are_the_graphs_that_a_trace_in_chunks_gives(name: str) -> None:
    """The graph with a choice has the hash of the trace that the rewriter makes."""
    model, args = made(name)
    graph = capture(model, args, split="exact")
    (region,) = graph.regions
    assert [choice.chunks for choice in region.choices] == [2, 4, 8, 16]
    for choice in region.choices:
        planned = with_choices(graph, {region.name: choice})
        assert planned.hash == traced_in_chunks(model, args, region.name, choice.chunks).hash
        assert planned.base_us == graph.time_us
        TrainingGraph.from_json(planned.to_json())


def traced_in_chunks(
    model: LanguageModel, args: tuple[Tensor, Tensor], region: str, chunks: int
) -> TrainingGraph:
    edit = functools.partial(chunk_parts, told=((region, chunks, True),))
    return with_edits(trace(model, args), (edit,)).graph


def test_sums_that_16_bits_hide_are_made_by_whole_rows() -> None:
    """The softmax's kernel sums in float32 what it returns in bfloat16."""
    grows: list[float] = []
    for model in (LanguageModel(plain, dtype=torch.bfloat16), made("bfloat16_upcast")[0]):
        (region,) = capture(model, batch(), split="exact", device="l4").regions
        ops = [op for choice in region.choices for _, op in choice.ops if op.target == WEIGHT]
        grows.append(ops[-1].cost_us / ops[0].cost_us)
    assert grows[0] > 4 * grows[1]


def test_what_gives_other_bits_is_no_exact_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_bits, "matches_eager_bitwise", lambda _: False)
    model = LanguageModel(plain, dtype=torch.bfloat16)
    with pytest.warns(
        UserWarning, match=r"\(LanguageModel\) stays whole: in chunks its bits would differ"
    ):
        assert capture(model, batch(rows=3), split="exact").regions == ()
    (region,) = capture(model, batch(rows=3), split="tolerance").regions
    assert {choice.exact for choice in region.choices} == {False}


def test_a_wrong_chunk_is_seen() -> None:
    """The comparison of bits would find a kernel that sums in another order."""
    (found,) = find_regions(trace(*made("plain")), is_exact=False)
    assert not matches_eager_bitwise(found)


def test_no_region_where_none_is_asked_for() -> None:
    model, args = made("plain")
    assert capture(model, args, split="none").regions == ()


def test_a_large_head_may_run_in_exact_chunks_without_being_asked_for() -> None:
    model, args = made("plain")[0], batch(16)
    assert capture(model, args).regions == capture(model, args, split="exact").regions != ()


class FewClasses(torch.nn.Module):
    """A head that takes little of what the step does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        self.head = torch.nn.Linear(512, 100)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.layers(x)), target)


def test_a_small_head_stays_whole_unless_it_is_asked_for() -> None:
    """Of few bytes, and of a small part of the step's."""
    for model, args in (
        made("plain"),
        (FewClasses(), (torch.rand(256, 512), torch.randint(100, (256,)))),
    ):
        assert capture(model, args).regions == ()
        assert capture(model, args, split="exact").regions


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole_by_default_is_not_warned_of(name: str) -> None:
    model = LanguageModel(WHOLE[name][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert capture(model, batch(16)).regions == ()
