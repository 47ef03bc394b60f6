"""Profiles: kept, sent elsewhere, used again, and what a model of a device learns from them."""

from __future__ import annotations

import statistics
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from torch import nn

import remat
from remat.graph_capture import capture, trace
from remat.graph_capture.costs import step_time
from remat.graph_capture.costs.cache import OpWork, Profile, ProfiledOp, WholeStepTimes, work_of
from remat.graph_capture.costs.op_costs import examples
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.devices.known_devices import Efficiency, WorkKind, modelled_device
from remat.graph_capture.errors import DeviceError, ProfileError
from remat.graph_capture.graph import ACCUMULATE
from remat.graph_capture.joint.nodes import target_name

pytestmark = pytest.mark.usefixtures("clocked")

DEVICE = "h100"
ELSEWHERE = "another machine, 96 threads"


def model(width: int = 48) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 8))


def step(width: int = 48) -> dict[str, Any]:
    return {"model": model(width), "args": (torch.randn(16, 32),), "loss_fn": torch.sum}


def changed(profile: Profile, **fields: Any) -> Profile:
    return msgspec.structs.replace(profile, **fields)


def made_profile(shares: dict[str, Efficiency], **asked: Any) -> tuple[Profile, Roofline]:
    """A profile of a device that reaches just these shares of its peaks."""
    device = modelled_device(DEVICE)
    roofline = Roofline(device, shares, launch_us=1.0)
    traced = trace(**(asked or step()), device=DEVICE)
    ops = {
        key: ProfiledOp(roofline.cost_us(target_name(node), work_of(node)), 512, work=work_of(node))
        for key, node in examples(traced.joint).items()
    }
    return Profile(DEVICE, "a made H100", "2.13.0", ops), roofline


def test_a_profile_serves_as_the_measurement_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        step_time.StepRounds, "whole", lambda *_: WholeStepTimes(1e6, 5.0, 90.0, 60.0)
    )
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    profile = remat.profile(**step())
    measured = capture(**step())
    assert measured.time_us == pytest.approx(1e6)
    monkeypatch.setattr(step_time.StepRounds, "whole", lambda *_: WholeStepTimes(1.0))
    again = capture(**step(), profile=Profile.from_json(profile.to_json()))
    assert again.ops == measured.ops
    assert again.values == measured.values
    assert {op.cost_origin for op in again.ops} == {"measured", "unpriced"}
    assert [op.target for op in again.ops if op.cost_origin == "unpriced"] == ["remat.tangents"]
    assert again.notes == (f"measured on {profile.title} with torch {torch.__version__}",)
    assert measured.notes == ()


def test_a_profile_times_the_step_that_hands_gradients_over_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time.StepRounds, "whole", lambda *_: WholeStepTimes(1e6))
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    profile = changed(remat.profile(**step()), title=ELSEWHERE)
    graph = capture(**step(), accumulate=True, profile=profile)
    assert any(op.target == ACCUMULATE for op in graph.ops)
    assert graph.time_us == pytest.approx(1e6)


def test_costs_of_another_machine_are_taken_as_they_are(tmp_path: Path) -> None:
    profile = changed(remat.profile(**step()), title=ELSEWHERE)
    slow = {k: msgspec.structs.replace(one, cost_us=1e6) for k, one in profile.ops.items()}
    path = tmp_path / "profile.json"
    path.write_bytes(changed(profile, ops=slow, steps={}).to_json())
    graph = capture(**step(), profile=path)
    assert {op.cost_us for op in graph.ops} == {0.0, 1e6}
    assert graph.versions["priced_on"] == ELSEWHERE
    fast = remat.rematerialize(**step(), budget="100%", profile=path)
    assert isinstance(fast, torch.fx.GraphModule)


def test_ops_that_a_profile_lacks_are_measured_on_its_own_machine_only() -> None:
    profile = remat.profile(**step())
    assert {op.cost_origin for op in capture(**step(56), profile=profile).ops} >= {"measured"}
    with pytest.raises(ProfileError, match=r"another machine.* lacks \d+ of \d+ distinct ops"):
        capture(**step(56), profile=changed(profile, title=ELSEWHERE))


def test_a_profile_of_another_torch_is_used_and_said_to_be() -> None:
    profile = changed(remat.profile(**step()), torch="2.10.0")
    with pytest.warns(UserWarning, match=r"is from torch 2\.10\.0 and is used with"):
        graph = capture(**step(), profile=profile)
    assert "torch 2.10.0, not with this" in graph.notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(**step(), profile=remat.profile(**step()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not a profile of this release"),
        (b"{", "is not a profile of this release"),
        (b"\xff\xfe", "is not a profile of this release"),
        (b"[]", "is not a profile of this release"),
        (b'{"device": "cpu", "title": "x", "torch": "2", "ops": 3}', "is not a profile"),
        (b'{"device": "cpu", "title": "x", "torch": "2", "ops": {}, "schema_version": 9}', "9"),
        (
            b'{"device": "cpu", "title": "x", "torch": "2", "ops": {"aten.mm": {"cost_us": -1}}}',
            "an impossible cost, of aten.mm",
        ),
        (
            b'{"device": "cpu", "title": "x", "torch": "2", '
            b'"ops": {"aten.mm": {"cost_us": 1, "work": {"kind": "magic"}}}}',
            "magic",
        ),
        (
            b'{"device": "cpu", "title": "x", "torch": "2", "ops": {}, '
            b'"steps": {"a": {"step_us": -1}}}',
            "an impossible time",
        ),
        (
            b'{"device": "cpu", "title": "x", "torch": "2", "ops": {}, '
            b'"steps": {"a": {"step_us": 1, "again_us": 2, "priced_us": -3}}}',
            "an impossible time",
        ),
    ],
)
def test_files_that_are_no_profiles_are_refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(text)
    with pytest.raises(ProfileError, match=said) as caught:
        capture(**step(), profile=str(path))
    assert str(caught.value).startswith("measure it again with remat profile MODEL -o FILE: ")
    assert "broken.json" in str(caught.value)


def test_a_profile_serves_its_own_device_alone() -> None:
    here = remat.profile(**step())
    with pytest.raises(ProfileError, match="the profile is of cpu, not h100"):
        capture(**step(), device=DEVICE, profile=here)
    with pytest.raises(ProfileError, match="the profile is of h100, not a CPU"):
        capture(**step(), profile=changed(here, device=DEVICE))
    with pytest.raises(DeviceError, match="no device 'h1000'"):
        capture(**step(), device="h1000", profile=here)


SHARES = dict.fromkeys(get_args(WorkKind), Efficiency(0.6, 0.4))


def big_step() -> dict[str, Any]:
    """On ``meta``, with ops long enough to tell a rate from a launch."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 4096))
    x = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    return {"model": net.to(torch.bfloat16), "args": (x,), "loss_fn": torch.sum}


def test_the_model_is_fitted_to_what_was_measured() -> None:
    profile, made = made_profile(SHARES, **big_step())
    assumed = Roofline.assumed(made.device)
    fitted = assumed.fitted(profile)
    assert fitted.launch_us == pytest.approx(made.launch_us, abs=1.0)
    work = work_of_first(profile, "matmul")
    for target in ("aten.mm.default", "aten.never_measured.default"):
        assert fitted.cost_us(target, work) == pytest.approx(made.cost_us(target, work), rel=0.05)
    assert fitted.shares["attention"] == assumed.shares["attention"]
    assert statistics.median(assumed.errors(profile)) < 0.05


def work_of_first(profile: Profile, kind: str) -> OpWork:
    return next(one.work for one in profile.ops.values() if one.work.kind == kind)


def test_errors_leave_each_op_out_of_its_own_fit() -> None:
    assumed = Roofline.assumed(modelled_device(DEVICE))
    work = OpWork("matmul", "bfloat16", 10**12, 10**6)
    twice_us = assumed.launch_us + 2 * (assumed.cost_us("", work) - assumed.launch_us)
    seen = ProfiledOp(twice_us, work=work)
    one = Profile(DEVICE, "a made H100", "2.13.0", {"aten.mm.default(1)": seen})
    assert assumed.fitted(one).cost_us("aten.mm.default", work) == pytest.approx(twice_us, rel=0.01)
    assert assumed.errors(one) == [pytest.approx(0.5, abs=0.01)]
    two = changed(one, ops={**one.ops, "aten.mm.default(2)": seen})
    assert assumed.errors(two) == [pytest.approx(0.0, abs=0.01)] * 2
    assert assumed.errors(changed(one, ops={})) == []


def test_each_cost_says_whether_it_was_measured() -> None:
    profile, _ = made_profile(SHARES, **big_step())
    known = {k: one for k, one in profile.ops.items() if one.work.kind == "matmul"}
    graph = capture(**big_step(), device=DEVICE, profile=changed(profile, ops=known))
    matmuls = {
        op.name for op in graph.ops if op.target in ("aten.addmm.default", "aten.mm.default")
    }
    assert matmuls == {op.name for op in graph.ops if op.cost_origin == "measured"}
    assert {op.cost_origin for op in graph.ops} == {"measured", "modelled", "unpriced"}
    assert graph.cost_origin == "mixed"
    assert f"{len(matmuls)} of {len(graph.ops)} ops" in graph.notes[0]
    assert "measured on a made H100 with torch 2.13.0" in graph.notes[0]
    assert "in the median" in graph.notes[1]
    budget_bytes = remat.solve(graph, "auto", "cut").budget_bytes
    assert budget_bytes == int(modelled_device(DEVICE).memory_bytes * 0.9)


def test_a_model_of_this_machine_is_nearer_once_it_is_fitted() -> None:
    """Though the peaks are those of a device that is nothing like it."""
    widths = (256, 384, 512, 768, 1024)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
    profile = remat.profile(nn.Sequential(*layers), (torch.randn(64, 256),), loss_fn=torch.sum)
    assumed = Roofline.assumed(modelled_device("t4"))
    before = [abs(assumed.cost_us("", o.work) / o.cost_us - 1) for o in profile.ops.values()]
    assert statistics.median(assumed.errors(profile)) < 0.8 * statistics.median(before)
