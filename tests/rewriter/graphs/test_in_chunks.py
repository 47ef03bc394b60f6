"""Steps whose head and loss run in chunks: eager's bits, the predicted peak, plans in files."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.budgets import unmodified
from remat.graph_capture.chunking import same_bits
from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import CaptureError, RewriteError, ScheduleError
from remat.ranks.same_order import agreed_load, agreed_rewrite
from remat.rewriter.checking.comparison import SPLIT_FLOAT32
from remat.rewriter.checkpoint_policy import checkpoint_policy
from remat.rewriter.plans.loading import plan_of, save_plan
from remat.schedules.derived import in_chunks
from remat.schedules.schedule import ChunkedRegion
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.reductions.chunked_regions import named
from tests.graph_capture.chunking.language_models import (
    N_CLASSES,
    SPLIT,
    LanguageModel,
    batch,
    made,
    plain,
    weighted,
)
from tests.rewriter.graphs.least_in_chunks import require_lower_peak
from tests.rows import each_nth
from tests.steps import schedules_of


@pytest.mark.parametrize("name", each_nth(3, SPLIT))
def test_eagers_bits_within_what_no_plan_without_chunks_reaches(name: str) -> None:
    model, args = made(name)
    require_lower_peak(model, args, 0.8)


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
def test_smoothed_labels_with_weights_of_classes_are_eagers(reduction: str) -> None:
    """With rows that are ignored, over which eager sums the weights in an order of its own."""
    model, args = made("with_bias")
    for seed in range(3):
        torch.manual_seed(seed)
        model = weighted(LanguageModel(plain, bias=True), label_smoothing=0.1, reduction=reduction)
        module = remat.rematerialize(model, args, budget="min", split="exact", check=True)
        assert module.schedule.chunks


@pytest.mark.parametrize("name", ["with_bias", "smoothed", "bfloat16_shifted_with_bias"])
def test_a_bias_with_sums_in_another_order_is_within_the_tolerance(name: str) -> None:
    model, args = made(name)
    module = remat.rematerialize(model, args, budget="min", split="tolerance", check=True)
    assert [one.exact for one in module.schedule.chunks] == [False]


@pytest.mark.parametrize("ignored", [0, N_CLASSES - 1, -1])
@pytest.mark.parametrize("split", ["exact", "tolerance"])
def test_whatever_a_loss_ignores_it_runs_in_chunks(split: Any, ignored: int) -> None:
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows, labels = logits.flatten(0, 1), target.flatten()
        return nn.functional.cross_entropy(rows, labels, ignore_index=ignored)

    torch.manual_seed(0)
    model, (tokens, target) = LanguageModel(loss), batch()
    some = target.masked_fill(target == -100, ignored)
    module = remat.rematerialize(model, (tokens, some), budget="min", split=split, check=True)
    assert module.schedule.chunks
    assert not module(tokens, some).isnan()
    # As eager, which divides by the number of rows that count.
    assert module(tokens, torch.full_like(target, ignored)).isnan()


class TwoHeads(nn.Module):
    """Two losses of one step, as where several tokens are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.after = LanguageModel(plain), LanguageModel(plain, bias=True)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.next(tokens, target) + 0.5 * self.after(tokens, target)
        return loss


@pytest.mark.parametrize("accumulate", [False, True])
def test_two_heads_run_in_the_same_number_of_chunks(accumulate: bool) -> None:
    torch.manual_seed(0)
    model, args = TwoHeads(), batch()
    module = remat.rematerialize(
        model, args, budget="min", split="exact", accumulate=accumulate, check=True
    )
    (chunks,) = module.schedule.chunks
    assert chunks.region == "_log_softmax, _log_softmax_1"


def test_ten_steps_of_training_are_eagers_to_the_bit() -> None:
    model, args = made("with_bias")
    model = weighted(model)
    plan = remat.rematerialize(model, args, budget="min", split="exact", check=False)
    assert plan.schedule.chunks
    eager = copy.deepcopy(model)
    assert trained(eager, args) == trained(plan, args)
    for mine, eagers in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, eagers)


def trained(model: nn.Module, args: tuple[Any, ...]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses: list[float] = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_another_order_of_sums_says_its_tolerance_and_is_held_to_it() -> None:
    model, args = made("plain")
    module = remat.rematerialize(model, args, budget="min", split="tolerance")
    assert [one.exact for one in module.schedule.chunks] == [False]
    found = remat.check(model, module, args, steps=1)
    assert found.tolerance == SPLIT_FLOAT32
    assert 0 < found.largest_error < SPLIT_FLOAT32
    strict = remat.check(model, module, args, steps=1, tolerance=0.0)
    assert strict.differences == ("gradient of head.weight",)


@pytest.mark.parametrize("ending", ["json", "pt2"])
def test_a_kept_plan_runs_in_chunks_too(tmp_path: Path, ending: str) -> None:
    model, args = made("shifted")
    module = remat.rematerialize(model, args, budget="min", split="exact", check=False)
    save_plan(plan_of(module), tmp_path / f"plan.{ending}")
    loaded = agreed_load(tmp_path / f"plan.{ending}", model, args)
    assert loaded.schedule == module.schedule
    assert remat.check(model, loaded, args, steps=1).differences == ()


def test_a_plan_for_a_device_that_is_not_here_is_compared_here() -> None:
    """Modelling a device compares no bits. Rewriting does."""
    model, args = made("plain")
    model.dropout.p = 0.0  # else CUDA's dropout, which this machine does not run
    graph = remat.capture(model, args, split="exact", device="h100")
    result = remat.solve(graph, "min")
    assert result.schedule is not None
    module = agreed_rewrite(model, result.schedule)
    assert remat.check(model, module, args, steps=1).differences == ()


def test_chunks_that_give_other_bits_here_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device that is not here compares no bits; this one would, and finds others."""
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model, args = LanguageModel(plain), batch(rows=5)
    graph = remat.capture(model, args, split="exact", device="h100")
    result = remat.solve(graph, "min")
    assert result.schedule is not None
    monkeypatch.setattr(same_bits, "matches_eager_bitwise", lambda _: False)
    with pytest.raises(RewriteError, match=r"in \d+ chunks gives other bits than eager here"):
        agreed_rewrite(model, result.schedule)


def test_what_does_not_go_together_is_refused() -> None:
    model, args = made("plain")
    graph = remat.capture(model, args, split="exact")
    schedule = remat.solve(graph, "min").schedule
    assert schedule is not None
    with pytest.raises(RewriteError, match="in chunks, which torch's checkpointing cannot"):
        checkpoint_policy(graph, schedule)
    with pytest.raises(ScheduleError, match=r"the graph has no region of that name"):
        simulate(remat.capture(model, args, split="none"), schedule)


@pytest.mark.parametrize("split", ["exactly", True, ("exact",)])
def test_another_split_is_not_taken_for_one_that_is_known(split: Any) -> None:
    model, args = made("plain")
    with pytest.raises(CaptureError, match="give split='none', 'exact'"):
        remat.rematerialize(model, args, budget="min", split=split)


def test_a_plan_of_an_unknown_number_of_chunks_is_refused() -> None:
    import msgspec

    model, args = made("plain")
    graph = remat.capture(model, args, split="exact")
    schedule = remat.solve(graph, "min").schedule
    assert schedule is not None
    chunks = (ChunkedRegion(schedule.chunks[0].region, 3),)
    with pytest.raises(ScheduleError, match="in 3 chunks, and the graph has costs for 2, 4, 8, 16"):
        simulate(graph, msgspec.structs.replace(schedule, chunks=chunks))


def test_the_unmodified_step_is_the_captured_one() -> None:
    model, args = made("plain")
    with_regions = unmodified(remat.capture(model, args, split="exact"))
    without = unmodified(remat.capture(model, args, split="none"))
    assert with_regions.peak_bytes == without.peak_bytes


def test_chunks_are_allowed_where_nothing_is_said_and_the_wing_takes_them() -> None:
    model, args = made("plain")[0], batch(16)
    assert remat.rematerialize(model, args, budget="min", check=True).schedule.chunks
    cached = remat.rematerialize(model, budget="min", check=False)
    cached(*args).backward()
    (schedule,) = schedules_of(cached)
    assert schedule.chunks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert remat.rematerialize(
        model, args, optimizer_in_backward=optimizer, budget="min"
    ).schedule.chunks


def test_several_ranks_stay_whole_where_nothing_is_said() -> None:
    model, args = made("plain")[0], batch(16)
    ranks = Sharding("fsdp2", 2)
    assert remat.capture(model, args, sharding=ranks).regions == ()
    module = remat.rematerialize(model, args, budget="min", sharding=Sharding("ddp", 2))
    assert module.schedule.chunks == ()


def test_a_whole_model_under_fsdp2_runs_in_chunks_where_that_is_asked_for() -> None:
    model, args = made("plain")[0], batch(16)
    ranks = Sharding("fsdp2", 2)
    asked = {"split": "exact", "sharding": ranks, "check": True}
    module = remat.rematerialize(model, args, budget="min", **asked)
    assert module.schedule.chunks


def test_a_step_that_fits_stays_as_captured() -> None:
    model, args = made("plain")[0], batch(16)
    graph = remat.capture(model, args)
    assert graph.regions
    schedule = remat.solve(graph, "100%").schedule
    assert schedule is not None
    assert schedule.chunks == ()
    assert schedule.graph_hash == remat.capture(model, args, split="none").hash


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 7, 16, 40])
@pytest.mark.parametrize("columns", [5, 16, 33, 64])
def test_twenty_shapes_are_exact_or_stay_whole(rows: int, columns: int, dtype: str) -> None:
    """`remat.check` runs at the end of `rematerialize` and compares bits."""
    torch.manual_seed(rows * columns)
    name = "shifted" if dtype == "float32" else "bfloat16_shifted_with_bias"
    loss, options = SPLIT[name]
    model, args = LanguageModel(loss, **options), batch(rows, columns)
    assert int(args[0].max()) < N_CLASSES
    module = remat.rematerialize(model, args, budget="min", split="exact", check=True)
    assert all(one.exact for one in module.schedule.chunks)


def test_parameters_are_updated_during_a_backward_in_chunks() -> None:
    """Both levers at once: ten steps of AdamW are eager's to the bit."""
    model, args = made("with_bias")
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fast = remat.rematerialize(
        model, args, optimizer_in_backward=optimizer, budget="min", split="exact"
    )
    assert fast.schedule.chunks
    assert fast.schedule.updates
    expected = trained(eager, args)
    torch.manual_seed(1)
    losses: list[float] = []
    for _ in range(10):
        loss = fast(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == expected
    for mine, eagers in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, eagers)


class Classifier(nn.Module):
    """A head of any number of classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(48, classes)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), target)


@pytest.mark.parametrize(("rows", "classes"), [(300, 257), (7, 130)])
def test_each_number_of_chunks_of_an_odd_shape_is_exact_or_left_out(
    rows: int, classes: int
) -> None:
    """A last block of one class or row takes a kernel that may sum otherwise."""
    torch.manual_seed(0)
    model, args = Classifier(classes), (torch.randn(rows, 48), torch.randint(classes, (rows,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no number of chunks is exact
        graph = remat.capture(model, args, split="exact")
    for region in graph.regions:
        for choice in region.choices:
            chosen = (ChunkedRegion(region.name, choice.chunks, exact=True),)
            found = solve_within(in_chunks(graph, chosen), 1 << 60, "store_all").schedule
            assert found is not None
            module = agreed_rewrite(model, named(found, chosen, graph))
            assert remat.check(model, module, args, steps=1).differences == ()
