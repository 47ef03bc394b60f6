"""Every way in which a plan runs, with copies: files of plans, caches, arenas, updates, blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import remat
from examples.gpt import GPT, Sizes
from remat.analysis.plan_figures import use_arena
from remat.graph_capture import capture_api, spill_files
from remat.graph_capture.graph import TrainingGraph
from remat.ranks.same_order import agreed_load
from remat.rewriter import compiled
from remat.rewriter.checking.check import check
from remat.rewriter.plans.loading import plan_of, save_plan
from remat.rewriter.rewriting import rewrite
from remat.rewriter.tiers import stream_tier
from remat.rewriter.tiers.file_tier import host_places
from remat.schedules.schedule import Offload, Schedule
from remat.schedules.simulate import simulate
from tests.links import links, with_links
from tests.models import make, mlp
from tests.rewriter.arena.steps_in_arena import needs_compiler
from tests.rewriter.tiers.copied import out_at_once, with_random_copies
from tests.rewriter.tiers.lazy_streams import LazyMachine
from tests.rewriter.tiers.plans import (
    Copied,
    after_backward,
    copied,
    is_clean,
    large,
    same,
    step,
)
from tests.steps import schedule_of


@functools.cache
def plan() -> Copied:
    return copied()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the host, in which nothing is left once a test has ended."""
    (tmp_path / "host").mkdir()
    monkeypatch.setenv(spill_files.HOST_FOLDER, str(tmp_path / "host"))
    yield tmp_path / "host"
    assert is_clean(tmp_path / "host")


def test_a_kept_plan_with_copies_loads_and_trains(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_of(plan().module()), path)
    module = agreed_load(path, plan().model)
    assert module.schedule == plan().schedule
    assert check(plan().model, module, plan().args, steps=1).differences == ()


def test_links_of_a_capture_are_known_when_its_plan_is_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = capture_api.add_costs
    monkeypatch.setattr(capture_api, "add_costs", lambda *a, **k: with_links(real(*a, **k)))
    model, args, *_ = make("plain")
    graph = remat.capture(model, args)
    assert graph.links == links()
    schedule = out_at_once(graph, schedule_of(graph, "store_all"), large(graph))
    assert check(model, rewrite(model, schedule), args, steps=1).differences == ()


@needs_compiler
def test_an_arena_serves_a_step_with_copies() -> None:
    module = plan().module()
    wanted = step(plan().model, plan().args)
    with use_arena(module, plan().args) as arena:
        for _ in range(3):
            assert same(step(module, plan().args), wanted)
        assert arena.counts.unplanned == arena.counts.occupied == 0
        assert arena.counts.hits > 0


def test_gradients_that_are_released_may_have_been_copied() -> None:
    model, args, *_ = make("dropout")
    traced = remat.graph_capture.trace(model, args, accumulate=True)
    graph = with_links(remat.graph_capture.measure_costs(traced))
    schedule = with_random_copies(graph, schedule_of(graph, "store_all"), 0, tries=30)
    assert schedule.moves
    assert schedule.releases_gradients
    module = rewrite(model, schedule, trace=traced, costed=graph)
    assert check(model, module, args, accumulate=True, steps=1).differences == ()


def test_a_part_of_a_model_runs_a_plan_with_copies() -> None:
    """As blocks do: eager around a rewritten part, which runs twice a step."""
    part, x = mlp(nn.Dropout(0.2)), torch.randn(32, 64)
    graph = with_links(remat.capture(part, (x,)))
    base = schedule_of(graph, "chen_sqrt")
    schedule = with_random_copies(graph, base, 1)
    assert schedule.moves
    fast = rewrite(part, schedule, (x,), costed=graph)

    def run(block: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        part.zero_grad()
        first = block(x)
        second = block(x.cos())
        first.square().mean().backward()
        second.exp().mean().backward()
        return [first.detach(), *(p.grad.clone() for p in part.parameters() if p.grad is not None)]

    assert same(run(fast), run(part))


GPT_SIZES = Sizes(layers=2, width=64, heads=4, seq=32, batch=4, vocab=128, dropout=0.1)


@functools.cache
def gpt() -> tuple[nn.Module, tuple[Tensor, ...], TrainingGraph]:
    torch.manual_seed(0)
    model, drawn = GPT(GPT_SIZES), torch.randint(128, (4, 33))
    args = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    return model, args, with_links(remat.capture(model, args, split="none"), links(1.0))


def test_activations_of_a_gpt_go_out_and_come_back() -> None:
    model, args, graph = gpt()
    plain = schedule_of(graph, "store_all")
    wide = [
        v.name for v in graph.values
        if v.producer and v.shape[-1:] == (4 * GPT_SIZES.width,) and v.name in large(graph)
    ]  # fmt: skip
    schedule = out_at_once(graph, plain, wide)
    assert sum(isinstance(one, Offload) for one in schedule.steps) == len(wide) > 1
    module = rewrite(model, schedule, args, costed=graph)
    found = check(model, module, args, steps=1)
    assert found.differences == ()
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes
    assert found.plan_peak_bytes < simulate(graph, plain).peak_bytes


class Streams:
    """A `StreamTier` in place of files, on streams that run at once or late."""

    def __init__(self, patch: pytest.MonkeyPatch, graph: TrainingGraph, schedule: Schedule) -> None:
        self.machine = LazyMachine(eager=True)
        self.machine.install(patch)
        # On a CPU the memory of a tensor is read by ops at once, so streams have to run at once.
        self.machine.computing.wait_event = lambda _: self.machine.run()  # type: ignore[method-assign]
        places = host_places(graph, schedule)
        made = stream_tier.StreamTier("cpu", places, links(), 1)
        made.require_room()
        self.tier, self.places = made, places
        patch.setattr("remat.rewriter.compiled.tier_for", lambda *_: made)


@pytest.mark.parametrize("seed", range(3))
def test_graphs_run_over_streams_and_pinned_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = with_random_copies(plan().graph, plan().plain, seed)
    streams = Streams(monkeypatch, plan().graph, schedule)
    judged = simulate(plan().graph, schedule)
    assert streams.places.size_bytes >= judged.host_peak_bytes
    module = rewrite(plan().model, schedule, plan().args, costed=plan().graph)
    wanted = step(plan().model, plan().args)
    for _ in range(2):
        assert same(step(module, plan().args), wanted)
    assert streams.machine.ranges == 1
    torch.manual_seed(3)
    losses: list[Any] = [module(*plan().args) for _ in range(2)]
    assert same(after_backward(module, losses[0])[:-1], wanted[:-1])


def test_a_tier_is_made_for_the_device_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = msgspec.structs.replace(plan().graph, device="cuda:0")
    LazyMachine().install(monkeypatch)
    found = simulate(plan().graph, plan().schedule)
    made = compiled.tier_for(graph, plan().schedule, links(), found)
    assert isinstance(made, stream_tier.StreamTier)
    assert made.places.size_bytes >= found.host_peak_bytes
    assert compiled.tier_for(graph, plan().plain, None, found) is None
