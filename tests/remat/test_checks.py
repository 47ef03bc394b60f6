"""What is said when a step differs from eager's: by how much, where, and a way out that works."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor, fx, nn

import remat
from remat.checks import cause_text, failures
from remat.graph_capture.errors import RewriteError
from remat.rewriter.checking import check
from remat.rewriter.inductor import compiler

WIDTH = 8


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if type(x) is Tensor else x.exp()


class Net(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = torch.tanh(block(x))
        return self.last(x).sum()


def said_of(model: nn.Module, x: Tensor) -> str:
    with pytest.raises(RewriteError) as raised:
        remat.rematerialize(model, (x,), budget="100%", solver="store_all", check=True)
    return str(raised.value)


def test_code_that_sees_the_trace_is_named_with_its_line_and_the_way_out_works() -> None:
    model, x = Net(Odd()), torch.randn(4, WIDTH)
    said = said_of(model, x)
    line = Odd.forward.__code__.co_firstlineno + 1
    assert "differs from eager in output (off by up to " in said
    assert "gradient of body.0.weight (off by up to " in said
    assert f"test_checks.py:{line} in module last" in said
    assert "rematerialize(model, args, blocks=pattern)" in said
    assert "report" not in said
    blocks = remat.rematerialize(model, (x,), blocks="body.*", budget="100%")
    assert remat.check(model, blocks, (x,), steps=1).equal


class Numbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if type(x) is Tensor else 3.0)


def test_another_number_at_the_same_op_is_named_with_its_line() -> None:
    line = Numbers.forward.__code__.co_firstlineno + 1
    assert f"test_checks.py:{line} in module last" in said_of(Net(Numbers()), torch.randn(4, WIDTH))


def test_what_eager_does_not_repeat_is_said_to_be_so() -> None:
    class Ticking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * time.perf_counter()

    said = said_of(Net(Ticking()), torch.randn(4, WIDTH))
    assert "eager itself gives another output each time it runs the same step" in said
    assert "Pass what changes as an argument" in said


def found_with(**changes: object) -> check.Check:
    equal = dict.fromkeys(("outputs_equal", "gradients_equal", "buffers_equal", "rng_equal"), True)
    figures = dict.fromkeys(("baseline_peak_bytes", "plan_peak_bytes"), 1000)
    times = {"baseline_step_us": 1.0, "plan_step_us": 1.0, "gradients": 1, "gradients_total": 1}
    return check.Check(**{**equal, **figures, **times, **changes})  # type: ignore[arg-type]


def test_each_cause_has_its_own_way_out() -> None:
    other = found_with(differences=("output",), distances=(0.5,))
    assert "on one rank, names the line" in cause_text(other)
    assert "something else when traced" in cause_text(
        msgspec.structs.replace(other, diverges_at="")
    )
    by_inductor = msgspec.structs.replace(other, tolerance=0.01, rounding="inductor")
    assert "Leave out compile=True" in cause_text(by_inductor)
    in_chunks = cause_text(msgspec.structs.replace(other, tolerance=1e-5, rounding="chunks"))
    assert in_chunks.startswith("Ask for eager's bits with split='exact'")
    assert "off by 1e-05 of a result's norm" in in_chunks
    assert "compile" not in in_chunks
    asked_for = msgspec.structs.replace(other, tolerance=0.01)
    assert cause_text(asked_for) == cause_text(other)
    (only,) = failures(other, 1000)
    assert only.startswith("output (off by up to 0.5). ")


def test_a_peak_above_the_budget_says_by_how_much_and_what_to_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = check.check

    def larger(*given: object, **options: object) -> check.Check:
        found = honest(*given, **options)  # pyright: ignore
        return msgspec.structs.replace(found, plan_peak_bytes=found.plan_peak_bytes + 1024)

    monkeypatch.setattr(check, "check", larger)
    model, x = Net(nn.Tanh()), torch.randn(4, WIDTH)
    with pytest.raises(
        RewriteError, match=r"something in the step that the trace does not see, .*, takes 1\.0 KiB"
    ):
        remat.rematerialize(model, (x,), budget="100%", solver="store_all", check=True)


def test_refusals_of_inductors_code_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(change: Callable[[pytest.MonkeyPatch], None]) -> str:
        model, x = Net(nn.Tanh()), torch.randn(4, WIDTH)
        with monkeypatch.context() as patched:
            change(patched)
            with pytest.raises(RewriteError) as raised:
                remat.rematerialize(model, (x,), budget="100%", compile=True, check=False)
        return str(raised.value)

    writes = refused(lambda p: p.setattr(compiler, "mutates", lambda _: True))
    assert "Inductor decomposes linear (tests/remat/test_checks.py:" in writes
    assert "leave out compile=True" in writes
    require, graph = compiler._require_same_inputs, fx.Graph()
    graph.output(graph.placeholder("more"))
    other = fx.GraphModule({}, graph)
    inputs = refused(
        lambda p: p.setattr(compiler, "_require_same_inputs", lambda one, _: require(one, other))
    )
    assert "with other inputs than planned (" in inputs
    assert "leave out compile=True" in inputs
