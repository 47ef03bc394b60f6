"""Copies to host memory and NVMe within plans over a range of sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.graph_capture.graph import MOST_BYTES
from remat.rewriter.user_module.ranged import RangedModule
from remat.schedules.family import resized_schedule
from remat.schedules.simulate import simulate
from remat.solver.reductions.sizes import Reach
from tests.beside_eager import require_as_planned, require_eagers_steps, same_bits
from tests.sized_models import Batch, Gpt

WORDS, LONGEST = 200, 128
SEQ = {1: ("seq", 16, LONGEST)}


def made() -> Gpt:
    torch.manual_seed(0)
    return Gpt(words=WORDS, longest=LONGEST)


def batch(length: int, seed: int = 0) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(WORDS, (2, 4, length), generator=drawn)
    return tokens, targets


def planned(model: nn.Module, **options: Any) -> Any:
    dynamic = {"tokens": SEQ, "targets": SEQ}
    asked = {"host": "1GiB", "budget": "50%", "dynamic": dynamic, "check": False, **options}
    return remat.rematerialize(model, batch(LONGEST), verbose=False, **asked)


@pytest.fixture(scope="module", params=["host", "nvme"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Gpt, RangedModule]:
    model, below = made(), {}
    if request.param == "nvme":  # little room on the host, so that some goes on to the drive
        below = {"host": "256KiB", "nvme": f"{tmp_path_factory.mktemp('nvme')}:1GiB"}
    return model, planned(model, **below)


def test_several_sizes_are_served_at_the_predicted_peaks(both: tuple[Gpt, RangedModule]) -> None:
    model, module = both
    assert any(one.schedule.moves for one in module.family.members)
    for length in (16, 61, 90, LONGEST - 1, LONGEST):
        require_as_planned(model, module, batch(length), seq=length)


def test_the_room_below_is_judged_at_the_largest_sizes(both: tuple[Gpt, RangedModule]) -> None:
    _, module = both
    graph, links = module.ranged_graph, module.ranged_graph and module.ranged_graph.base.links
    assert graph is not None
    assert links is not None
    for member in module.family.members:
        (most,) = member.corners
        at = graph.at(**most)
        found = simulate(at, resized_schedule(member.schedule, at))
        assert found.host_peak_bytes <= links.room_bytes("host")
    top = module.family.top.schedule
    reach = Reach(graph, MOST_BYTES - 1)
    assert reach.along(top) == len(reach.levels) - 1
    found = simulate(graph.top, resized_schedule(top, graph.top))
    if found.host_peak_bytes:
        import msgspec

        less = msgspec.structs.replace(links, host_bytes=found.host_peak_bytes - 1)
        base = msgspec.structs.replace(graph.base, links=less)
        assert Reach(msgspec.structs.replace(graph, base=base), MOST_BYTES - 1).along(top) < (
            len(reach.levels) - 1
        )


def test_five_steps_are_those_of_eager() -> None:
    eager, model = made(), made()
    require_eagers_steps(eager, model, planned(model), batch, (LONGEST, 90, 23))


def test_a_cache_copies_over_a_learned_range() -> None:
    model = made()
    upto = {"tokens": {1: LONGEST}}
    cache = remat.rematerialize(
        model, budget="50%", host="1GiB", dynamic="auto", upto=upto, check=False, verbose=False
    )
    for length in (90, 23, LONGEST):
        assert same_bits(model, cache, batch(length))
    plans = remat.plans(cache)
    assert len(plans) <= 3
    assert any(one.schedule.moves for plan in plans if plan.family for one in plan.family.members)


def test_a_family_with_copies_is_kept(both: tuple[Gpt, RangedModule], tmp_path: Path) -> None:
    model, module = both
    remat.plans(module)[0].save(tmp_path / "plan.json")
    again = remat.load(tmp_path / "plan.json").apply(model)
    assert same_bits(model, again, batch(LONGEST))
