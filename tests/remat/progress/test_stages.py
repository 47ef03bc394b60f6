"""What a person sees while a plan is made from Python, and the line that says what it is."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from rich import progress
from torch import Tensor, nn

import remat
from remat.analysis import plan_figures
from remat.progress import LoggedStopwatch, Stopwatch, TerminalStopwatch, stopwatch_of_call
from remat.schedules.schedule import Offload
from remat.solved import at_hand_text
from tests.rows import rows
from tests.steps import schedule_of
from tests.together.levers import Language, batch

LINE = re.compile(
    r"remat: Sequential on float32\[64, 32\]: peak .* predicted, .* measured, budget .*; "
    r"overhead .* %, .*; equal to eager; \d+\.\d s"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step_of(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))


def by_rematerialize(verbose: Any) -> None:
    x = torch.randn(64, 32)
    remat.rematerialize(layers(), (x,), budget="1MiB", **verbose)


def by_cache(verbose: Any) -> None:
    cache = remat.rematerialize(layers(), budget="95%", **verbose)
    step_of(cache, torch.randn(64, 32))
    step_of(cache, torch.randn(64, 32))  # by the same plan: nothing more is said


def by_blocks(verbose: Any) -> None:
    x = torch.randn(64, 32)
    remat.rematerialize(layers(), (x,), blocks="*", budget="1MiB", **verbose)


def by_update_in_backward(verbose: Any) -> None:
    model, x = layers(), torch.randn(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    remat.rematerialize(
        model,
        (x,),
        loss_fn=lambda out: out.sum(),
        optimizer_in_backward=optimizer,
        budget="1MiB",
        **verbose,
    )


def by_range(verbose: Any) -> None:
    sizes: Any = {"input": {0: ("batch", 2, 64)}}
    remat.rematerialize(layers(), (torch.randn(64, 32),), budget="1MiB", dynamic=sizes, **verbose)


MADE_BY = {
    "rematerialize": by_rematerialize,
    "no batch": by_cache,
    "blocks": by_blocks,
    "update in backward": by_update_in_backward,
    "range": by_range,
}


@pytest.mark.parametrize("way", MADE_BY)
def test_the_log_has_each_stage_and_what_came_of_it(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="remat"):
        MADE_BY[way]({})
    said = [one.getMessage() for one in caplog.records if one.name == "remat"]
    budget = "95%" if way == "no batch" else "1MiB"
    for stage in ("tracing Sequential", "timing ops", f"solving for {budget}", "comparing a step"):
        # Of a range, the largest sizes come first, alone.
        times = 1 + (way == "range" and stage.startswith("solving"))
        assert sum(line.startswith(stage) for line in said) == times, (stage, said)
    lines = [line for line in said if line.startswith("remat: ")]
    assert len(lines) == 1
    assert lines == said[-1:]
    if way in ("rematerialize", "no batch"):
        assert LINE.fullmatch(lines[0]), lines


def said_of(caplog: pytest.LogCaptureFixture, make: Callable[[], Any]) -> str:
    """The line that says what the plan is."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="remat"):
        make()
    (line,) = (one.getMessage() for one in caplog.records if one.getMessage().startswith("remat: "))
    return line


SIZES = {1: ("length", 16, 64)}
USED: dict[str, tuple[dict[str, Any], str]] = {
    "recomputation": ({"budget": "65%"}, "recomputation"),
    "host": ({"budget": "45%", "host": "1GiB"}, "copies to the host and back"),
    "a number": ({"budget": "65%", "float_inputs": ["scale"]}, "recomputation"),
    "chunks": ({"budget": "45%", "split": "exact"}, r"[^;]* in \d+ chunks"),
    "range": ({"budget": "65%", "dynamic": {"tokens": SIZES, "targets": SIZES}}, "recomputation"),
}


@pytest.mark.parametrize("way", rows(USED, ("host", "a number").__contains__))
def test_the_line_names_each_lever_with_what_it_saves_and_costs(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, args = Language(returns_logits=False), batch(0, is_text=True)
    given, lever = USED[way]
    line = said_of(caplog, lambda: remat.rematerialize(model, args, check=False, **given))
    assert re.search(rf"; {lever}: [1-9][\d.]* [KM]iB less for \d[\d.]* %; ", line), line
    assert (", with scale read at each step: " in line) == (way == "a number")
    if way == "host":
        fits = {**given, "budget": "100%"}
        line = said_of(caplog, lambda: remat.rematerialize(model, args, check=False, **fits))
        assert " less for " not in line


@pytest.mark.parametrize("way", MADE_BY)
def test_nothing_is_said_where_that_is_asked_for(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with caplog.at_level(logging.INFO, logger="remat"):
        MADE_BY[way]({"verbose": False})
    assert not [one for one in caplog.records if one.name == "remat"]
    assert shown.getvalue() == ""


def test_a_batch_of_another_size_says_that_nothing_is_solved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = remat.rematerialize(layers(), budget="95%")
    step_of(cache, torch.randn(64, 32))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="remat"):
        step_of(cache, torch.randn(48, 32))
    said = [one.getMessage() for one in caplog.records if one.name == "remat"]
    assert said[0] == "tracing Sequential ..."
    assert "runs as it is, peak" in said[1]
    assert "its first step is compared with eager" in said[1]
    assert len(said) == 2


def test_a_step_with_copies_does_not_run_as_it_is() -> None:
    graph = remat.capture(layers(), (torch.randn(64, 32),))
    plain = schedule_of(graph, "store_all")
    copied = Offload(plain.steps[0].op)  # pyright: ignore[reportAttributeAccessIssue]
    moving = msgspec.structs.replace(plain, steps=(*plain.steps, copied))
    said = [at_hand_text("a", one, 0, None, 0.0, is_compared=True) for one in (plain, moving)]
    assert ["runs as it is" in text for text in said] == [True, False]
    assert "a schedule at hand" in said[1]


def test_a_terminal_has_one_line_that_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with caplog.at_level(logging.INFO, logger="remat"):
        by_rematerialize({})
    assert "tracing Sequential" in shown.getvalue()
    assert not [one for one in caplog.records if one.name == "remat"]
    last = shown.getvalue().splitlines()[-1]
    assert LINE.search(last), last


def test_what_a_model_prints_goes_where_it_went(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prints(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            print(sys.stdout is standard, sys.stderr is shown)
            return super().forward(input)

    standard, shown = sys.stdout, Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    remat.rematerialize(Prints(4, 4), (torch.ones(2, 4),), budget="100%")
    said = capsys.readouterr().out.split("\n")[:-1]
    assert said
    assert set(said) == {"True True"}


def test_a_wrong_value_is_told_when_the_model_is_wrapped() -> None:
    with pytest.raises(remat.RematError, match="give True or False: verbose='yes' is unknown"):
        remat.rematerialize(layers(), budget="1MiB", verbose="yes")


def test_the_clock_counts_from_the_beginning_and_the_bar_does_not_run_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, done = Terminal(), list[float]()
    update = progress.Progress.update

    def noted(self: progress.Progress, task: Any, **facts: Any) -> None:
        done.append(facts["completed"])
        update(self, task, **facts)

    monkeypatch.setattr(progress.Progress, "update", noted)
    monkeypatch.setattr(sys, "stderr", shown)
    stopwatch = stopwatch_of_call(verbose=True)
    stopwatch.began -= 100
    with stopwatch.stage("profile", "timing ops") as told:
        for i in (1, 3, 2, 4):
            told(i, 4)
        told(0, 9, text="timing 9 pieces")
    assert done == [1, 3, 3, 4, 0]
    assert "100 s" in shown.getvalue()
    assert stopwatch.seconds["profile"] < 100


def test_other_ranks_and_files_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert type(stopwatch_of_call(verbose=True)) is LoggedStopwatch
    monkeypatch.setattr(sys, "stderr", None)
    assert type(stopwatch_of_call(verbose=True)) is LoggedStopwatch
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert type(stopwatch_of_call(verbose=True)) is TerminalStopwatch
    assert type(stopwatch_of_call(verbose=False)) is Stopwatch
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert type(stopwatch_of_call(verbose=True)) is LoggedStopwatch


@pytest.mark.parametrize(
    ("options", "is_told"), [({}, True), ({"sharding": remat.Sharding("ddp", 2)}, False)]
)
def test_the_first_plan_for_a_gpu_names_compiled_code(
    options: Any, is_told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_figures, "has_cuda_allocator", lambda _: True)
    model = nn.Sequential(*(nn.Tanh() for _ in "123"), nn.Linear(32, 1))
    with caplog.at_level(logging.INFO, logger="remat"):
        remat.rematerialize(model, (torch.randn(64, 32),), budget="100%", check=False, **options)
    said = [one.getMessage() for one in caplog.records if one.name == "remat"]
    assert any("compare with compile=True: " in line for line in said) == is_told
