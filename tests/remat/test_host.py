"""`host=` and `nvme=` where a capture is made: links in the graph, or one clear line before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.devices.links import PLANNED_SHARE
from remat.graph_capture.errors import (
    BudgetError,
    FileError,
    SolverError,
)
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.plans.loading import plan_of
from tests.fixed_costs import LINK

GIB = 1 << 30


def small() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    return model, (torch.randn(4, 8),)


def test_a_capture_has_links_only_if_asked(tmp_path: Path) -> None:
    model, args = small()
    bare = remat.capture(model, args)
    assert bare.links is None
    linked = remat.capture(model, args, host="1MiB", nvme=f"{tmp_path}:2MiB")
    links = linked.links
    assert links is not None
    assert (links.host_bytes, links.nvme_bytes, links.nvme_path) == (
        1 << 20,
        2 << 20,
        str(tmp_path),
    )
    assert links.d2h.bytes_per_us == pytest.approx(PLANNED_SHARE * LINK.both_gb_s * 1e3)
    assert linked.hash == bare.hash
    again = TrainingGraph.from_json(linked.to_json())
    assert again.links == links


def test_a_device_that_is_not_here_has_those_of_the_table() -> None:
    model, args = small()
    links = remat.capture(model, args, device="rtx4090", host="9000TiB").links
    assert links is not None
    assert links.d2h.bytes_per_us == pytest.approx(25_600)


def test_one_rank_of_several_has_them_too() -> None:
    model, args = small()
    sharding = remat.Sharding("ddp", 2)
    assert remat.capture(model, args, sharding=sharding, host=GIB, device="h100").links is not None


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"host": "much"}, BudgetError, "host 'much' cannot be read"),
    ({"host": 0}, BudgetError, "give a positive size for host"),
    ({"nvme": "/tmp:1GiB"}, BudgetError, "lies below the host"),
    ({"host": "1KiB", "nvme": "1GiB"}, BudgetError, "names no folder"),
    ({"host": "1KiB", "nvme": "/no/where:1GiB"}, FileError, "/no/where is not a folder"),
    ({"host": "9000TiB"}, BudgetError, "is more than the"),
]


@pytest.mark.parametrize(("given", "kind", "says"), BAD)
@pytest.mark.parametrize("call", ["capture", "rematerialize", "blocks", "no batch"])
def test_bad_input_is_refused_before_anything_is_captured(
    call: str, given: dict[str, Any], kind: type[Exception], says: str, monkeypatch: Any
) -> None:
    def captured(*_: Any, **__: Any) -> None:
        raise AssertionError("a capture was begun")

    # In every trace, by whichever name a module that may yet be imported knows it.
    monkeypatch.setattr("remat.graph_capture.tracing.trace.refuse_module", captured)
    model, args = small()
    calls: dict[str, Callable[[], Any]] = {
        "capture": lambda: remat.capture(model, args, **given),
        "rematerialize": lambda: remat.rematerialize(model, args, budget="60%", **given),
        "blocks": lambda: remat.rematerialize(model, args, blocks="*", budget="60%", **given),
        "no batch": lambda: remat.rematerialize(model, budget="60%", **given),
    }
    with pytest.raises(kind) as error:
        calls[call]()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_backend_of_torch_compile_takes_no_host() -> None:
    from remat.compile.graph_context import read_options

    for name in ("host", "nvme"):
        with pytest.raises(SolverError) as error:
            read_options({"budget": "60%", name: "1GiB"})
        assert f"leave out {name}, or use remat.rematerialize" in str(error.value)
        assert "use remat.rematerialize(model, ..., host=...)" in str(error.value)


def test_a_module_is_planned_with_a_host() -> None:
    model, args = small()
    target = torch.randn(4, 4)
    module = remat.rematerialize(
        model, args, budget="100%", host="1MiB", loss_fn=nn.functional.mse_loss, target=target
    )
    loss: Any = module(*args, target=target)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    plan = plan_of(module)
    assert plan.graph is None or plan.graph.links is not None
