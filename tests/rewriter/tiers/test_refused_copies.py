"""Plans with copies that cannot be carried out are refused before anything runs, in one line."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from remat.graph_capture import capture, spill_files
from remat.graph_capture.errors import PlanError, RematError, RewriteError, ScheduleError, TierError
from remat.ranks.same_order import agreed_load
from remat.rewriter.checkpoint_policy import checkpoint_policy
from remat.rewriter.graphs.copies import CopyTimes, copy_times
from remat.rewriter.plans.loading import plan_of
from remat.rewriter.rewriting import rewrite
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import simulate
from tests.links import links, with_links
from tests.rewriter.tiers.copied import inserted
from tests.rewriter.tiers.plans import Copied, copied


@functools.cache
def plan() -> Copied:
    return copied("plain")


def refused(
    error: type[RematError], text: str, run: object, *args: object, **options: object
) -> None:
    with pytest.raises(error, match=text) as caught:
        run(*args, **options)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_plan_with_copies_needs_a_graph_with_links() -> None:
    text = r"has no such link: capture with host= \(and nvme=\), or solve without"
    refused(ScheduleError, text, rewrite, plan().model, plan().schedule, plan().args)


def test_an_emitter_without_a_tier_refuses_copies() -> None:
    from remat.graph_capture import trace
    from remat.rewriter.graphs.emit import emit

    traced = trace(plan().model, plan().args)
    text = "solve without offloading: .* and has nowhere to copy to"
    refused(RewriteError, text, emit, traced.joint, plan().schedule, writes=False)


def test_a_plan_of_one_size_that_copies_is_not_taken_over_a_range() -> None:
    graph = capture(plan().model, plan().args, dynamic={"args[0]": {0: ("rows", 16, 128)}})
    given = plan().model, plan().schedule
    refused(ScheduleError, r"solve on graph.at\(...\) of the range", rewrite, *given, over=graph)


def test_torchs_checkpointing_copies_nothing() -> None:
    text = "torch's checkpointing does not"
    refused(RewriteError, text, checkpoint_policy, plan().graph, plan().schedule)


def test_a_plan_file_whose_graph_has_lost_its_links_is_refused(tmp_path: Path) -> None:
    kept = plan_of(plan().module())
    assert kept.graph is not None
    bare = msgspec.structs.replace(kept, graph=msgspec.structs.replace(kept.graph, links=None))
    refused(PlanError, "no such link: capture with host=", agreed_load, bare, plan().model)
    without = msgspec.structs.replace(kept, graph=None)
    refused(ScheduleError, "no such link: capture with host=", agreed_load, without, plan().model)


def test_a_folder_that_is_not_there_is_refused_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(spill_files.HOST_FOLDER, str(tmp_path / "missing"))
    refused(TierError, r"missing, the folder of the host tier: No such file", plan().module)


def test_a_disk_that_has_filled_up_is_told_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(spill_files.HOST_FOLDER, str(tmp_path))
    module = plan().module()
    state = torch.get_rng_state()
    monkeypatch.setattr(spill_files.os, "statvfs", lambda _: Full())
    refused(
        TierError, r"keeps up to \d+ bytes in .*which has 4096 bytes free", module, *plan().args
    )
    assert torch.equal(torch.get_rng_state(), state)


class Full:
    f_bavail, f_frsize = 1, 4096


def test_a_folder_of_nvme_that_is_not_there_is_refused(tmp_path: Path) -> None:
    value = next(step.value for step in plan().schedule.steps if isinstance(step, Offload))
    at = next(i for i, step in enumerate(plan().schedule.steps) if step == Fetch(value))
    moved: list[tuple[int, Step]] = [
        (at, Offload(value, "nvme")), (at, Free(value, "host")),
        (at, Fetch(value, "host")), (at, Free(value, "nvme")),
    ]  # fmt: skip
    schedule = inserted(plan().schedule, moved)
    missing = msgspec.structs.replace(links(), nvme_path=str(tmp_path / "missing"))
    given = plan().model, schedule, plan().args
    text = r"missing, the folder of the nvme tier.*give nvme= another folder"
    refused(TierError, text, rewrite, *given, costed=with_links(plan().graph, missing))


def test_an_op_that_runs_on_the_host_is_refused() -> None:
    from remat.graph_capture import trace
    from remat.rewriter.graphs.emit import emit

    last = Compute(plan().graph.ops[-1].name)
    steps = [msgspec.structs.replace(s, at="host") if s == last else s for s in plan().plain.steps]
    schedule = msgspec.structs.replace(plan().plain, steps=tuple(steps))
    text = rf"runs {last.op} there, and a rewritten module runs all ops on its device"
    refused(RewriteError, text, emit, trace(plan().model, plan().args).joint, schedule)


def test_what_autograd_holds_does_not_leave_the_device() -> None:
    model, args = nn.Linear(8, 8), (torch.randn(4, 8),)
    graph = with_links(capture(model, args))
    from tests.steps import schedule_of

    base = schedule_of(graph, "store_all")
    tangent = next(v.name for v in graph.values if v.kind == "tangent")
    at = next(i for i, step in enumerate(base.steps) if step == Compute("tangents")) + 1
    steps: list[tuple[int, Step]] = [
        (at, Offload(tangent)), (at, Free(tangent)),
        (at, Fetch(tangent)), (at, Free(tangent, "host")),
    ]  # fmt: skip
    refused(ScheduleError, "is held by the caller", simulate, graph, inserted(base, steps))


OFF, GONE, BACK = Offload("x"), Free("x"), Fetch("x")
WRITE, READ = Compute("write"), Compute("read")


def times(*steps: Step) -> CopyTimes:
    schedule = Schedule(steps, "hash")
    return copy_times(schedule, lambda op: ("x",) if op == "write" else ())


def test_a_copy_waits_for_a_write_to_what_it_copies() -> None:
    assert times(OFF, READ, GONE, BACK) == CopyTimes()
    assert times(WRITE, OFF, GONE, BACK) == CopyTimes()
    assert times(OFF, READ, WRITE, GONE, BACK) == CopyTimes({0}, {2: [("x", 0)]})
    assert times(OFF, WRITE, READ) == CopyTimes({0}, {1: [("x", 0)]})


@pytest.mark.parametrize(
    "steps",
    [
        (OFF, GONE, BACK, WRITE, GONE, BACK),
        (OFF, Offload("x", "nvme"), WRITE, GONE, BACK),
        (OFF, Free("x", "host"), WRITE, GONE),
    ],
)
def test_a_copy_that_a_write_makes_stale_is_refused(steps: tuple[Step, ...]) -> None:
    refused(RewriteError, "copy .* later.*before an op writes to it in place", times, *steps)


def test_a_copy_made_anew_after_a_write_is_taken() -> None:
    host = Free("x", "host")
    assert times(OFF, GONE, BACK, host, WRITE, OFF, GONE, BACK) == CopyTimes()
