"""Plans for a range of sizes in files: kept, judged, and loaded in a model that has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import remat
from remat.graph_capture.errors import PlanError
from remat.ranks.same_order import agreed_load
from remat.rewriter.plans.loading import plan_of, read_plan, save_plan
from remat.rewriter.user_module.ranged import RangedModule
from remat.schedules.family import Family, Member
from remat.schedules.plan import PlanFile
from remat.schedules.simulate import simulate
from tests.beside_eager import same_bits
from tests.rows import each_nth
from tests.sized_models import SIZED, Experts, Sized


@pytest.fixture(scope="module")
def kept() -> tuple[Sized, RangedModule, PlanFile]:
    torch.manual_seed(0)
    sized = SIZED["experts"]()
    module = remat.rematerialize(
        sized.model, sized.batch(tokens=16), budget="70%", dynamic=sized.dynamic,
        solver="cut", check=False,
    )  # fmt: skip
    return sized, module, plan_of(module)


@pytest.mark.parametrize("name", each_nth(2, ["plan.json", "plan.pt2"]))
def test_a_plan_for_a_range_is_read_back_and_trains_another_model(
    name: str, kept: tuple[Sized, RangedModule, PlanFile], tmp_path: Path
) -> None:
    sized, module, plan = kept
    save_plan(plan, tmp_path / name)
    assert read_plan(tmp_path / name) == plan
    torch.manual_seed(1)
    other = Experts()
    loaded = agreed_load(tmp_path / name, other)
    assert isinstance(loaded, RangedModule)
    assert loaded.family == module.family
    for tokens in (4, 46, 100, 300):
        assert same_bits(other, loaded, sized.batch(tokens=tokens))
    assert plan_of(loaded) == plan
    with pytest.raises(remat.RematError, match="planned for tokens from 4 to 300"):
        loaded(*sized.batch(tokens=301))


def test_a_batch_is_held_to_the_range(kept: tuple[Sized, RangedModule, PlanFile]) -> None:
    sized, _, plan = kept
    for tokens in (4, 100):
        assert isinstance(agreed_load(plan, Experts(), sized.batch(tokens=tokens)), RangedModule)
    with pytest.raises(
        PlanError, match=r"does not fit: .*Experts was planned for tokens from 4 to"
    ):
        agreed_load(plan, Experts(), sized.batch(tokens=301))
    with pytest.raises(PlanError, match="does not fit"):
        agreed_load(plan, Experts(), (*sized.batch(tokens=16), torch.ones(3)))


def test_it_can_be_shown_as_the_plan_of_the_largest_sizes(
    kept: tuple[Sized, RangedModule, PlanFile],
) -> None:
    _, module, plan = kept
    assert plan.graph is not None
    assert plan.over is not None
    found = simulate(plan.graph, plan.schedule)
    assert found.peak_bytes == module.family.top.peak_bytes


def _with_top(family: Family, **changes: Any) -> Family:
    top = msgspec.structs.replace(family.top, **changes)
    return msgspec.structs.replace(family, members=(*family.members[:-1], top))


def _reaching_too_far(family: Family) -> Family:
    first = msgspec.structs.replace(family.members[0], corners=family.top.corners)
    return msgspec.structs.replace(family, members=(first, *family.members[1:]))


def _with_a_step_less(family: Family) -> Family:
    schedule = family.top.schedule
    return _with_top(
        family, schedule=msgspec.structs.replace(schedule, steps=schedule.steps[:-1][1:])
    )


def _without_members(family: Family) -> Family:
    members: tuple[Member, ...] = ()
    return msgspec.structs.replace(family, members=members)


@pytest.mark.parametrize(
    "edit",
    [
        _reaching_too_far,
        _with_a_step_less,
        _without_members,
        lambda family: _with_top(family, corners=({"tokens": 299},)),
        lambda family: _with_top(family, corners=({"tokens": 300}, {"tokens": 900})),
        lambda family: _with_top(family, corners=({"tokens": 300}, {"other": 4})),
        lambda family: _with_top(family, peak_bytes=family.top.peak_bytes - 1),
        lambda family: msgspec.structs.replace(family, budget_bytes=1000),
    ],
)  # fmt: skip
def test_a_family_that_was_edited_is_refused(
    edit: Callable[[Family], Family], kept: tuple[Sized, RangedModule, PlanFile]
) -> None:
    _, _, plan = kept
    assert plan.over is not None
    over = msgspec.structs.replace(plan.over, family=edit(plan.over.family))
    with pytest.raises(PlanError, match="was edited"):
        agreed_load(msgspec.structs.replace(plan, over=over), Experts())


def test_a_range_of_another_batch_is_refused(kept: tuple[Sized, RangedModule, PlanFile]) -> None:
    _, _, plan = kept
    assert plan.over is not None
    (place,) = plan.over.places
    for wrong in (
        msgspec.structs.replace(place, leaf=5),
        msgspec.structs.replace(place, dim=5),
        msgspec.structs.replace(place, symbol="other"),
    ):
        over = msgspec.structs.replace(plan.over, places=(wrong,))
        with pytest.raises(PlanError, match="cannot read the range in the plan file"):
            agreed_load(msgspec.structs.replace(plan, over=over), Experts())


def test_a_model_whose_values_have_other_sizes_is_refused(
    kept: tuple[Sized, RangedModule, PlanFile],
) -> None:
    _, _, plan = kept
    model = Experts()
    with pytest.raises(PlanError, match="the model's class"):
        agreed_load(plan, nn.Linear(16, 16))
    model.gate.weight.requires_grad_(False)
    with pytest.raises(PlanError, match=r"gate.weight was trained and is frozen"):
        agreed_load(plan, model)


def test_the_plan_of_a_cache_is_that_of_the_range_it_used_last() -> None:
    sized = SIZED["experts"]()
    cache = remat.rematerialize(
        sized.model, budget="100%", solver="cut", check=False, upto={"x": {0: 40}}
    )
    cache(*sized.batch(tokens=8))
    over = plan_of(cache).over
    assert over is not None
    assert [str(symbol) for symbol in over.family.symbols] == ["x_0 from 2 to 40"]
