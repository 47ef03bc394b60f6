"""Published step times beside predicted ones: the rows that are kept, and two of them anew."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from msgspec.structs import replace

import remat
from benchmarks.gpu.published import fit, steps, table
from benchmarks.gpu.published.models import BUILDERS
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.devices.known_devices import (
    DEVICES_FILE,
    SHARES_FILE,
    Efficiency,
    device_table,
    modelled_device,
    shares_of,
)

CASES = steps.read_cases().cases
ROWS: table.Rows = json.loads(table.RESULTS.read_text())["rows"]
MOST, MOST_IN_THE_MEDIAN = 1.35, 1.15
SMALL = ("mpt-125m 32x2048, a100", "gpt2 8x1024, h100")


@pytest.mark.parametrize("name", CASES)
def test_a_kept_row_is_near_what_was_published(name: str) -> None:
    row, case = ROWS[name], CASES[name]
    assert row["published_ms"] == case.published_ms
    assert (row["device"], row["side"], row["source"]) == (case.device, case.side, case.source)
    assert row["ratio"] == pytest.approx(row["published_ms"] / row["predicted_ms"], rel=0.01)
    assert table.off(row) <= MOST


def test_rows_that_no_share_was_fitted_to_are_no_further_off() -> None:
    assert ROWS.keys() == CASES.keys()
    held_out = [table.off(row) for row in ROWS.values() if row["side"] == "held out"]
    assert len(held_out) >= len(ROWS) / 2
    assert statistics.median(held_out) <= MOST_IN_THE_MEDIAN


def test_each_family_is_on_both_sides() -> None:
    sides: dict[str, set[str]] = {}
    for case in CASES.values():
        sides.setdefault(case.family, set()).add(case.side)
    assert {frozenset(found) for found in sides.values()} == {frozenset(table.SIDES)}


@pytest.mark.parametrize("name", SMALL)
def test_a_row_traced_anew_is_the_kept_one(name: str) -> None:
    case = CASES[name]
    roofline = Roofline.assumed(modelled_device(case.device))
    found_ms = steps.predicted_ms(case, steps.step_of(case), roofline)
    assert found_ms == pytest.approx(ROWS[name]["predicted_ms"], rel=0.005)


def test_a_prediction_is_that_of_a_capture_and_the_update_on_top() -> None:
    sizes: dict[str, Any] = {"batch": 4, "seq": 512, "layers": 1, "width": 256, "heads": 4}
    case = steps.Case("MPT", "fitted", "a100", 1.0, "", "mpt", sizes)
    model, batch = BUILDERS["mpt"](**sizes)
    graph = remat.capture(model, batch, device="a100", split="none")
    captured_ms = sum(op.cost_us for op in graph.ops) / 1e3
    roofline, step = Roofline.assumed(modelled_device("a100")), steps.step_of(case)
    assert steps.predicted_ms(case, step, roofline) == pytest.approx(captured_ms)
    numbers = sum(p.numel() for p in model.parameters())
    update = steps.Optimizer(passes=7, ops=1)
    with_update = replace(case, optimizer=update)
    traffic_us = (
        7 * 4 * numbers / (roofline.device.bytes_per_us * roofline.shares["other"].bandwidth)
    )
    launches_us = len(list(model.parameters())) * roofline.launch_us
    added_ms = steps.predicted_ms(with_update, step, roofline) - captured_ms
    assert added_ms == pytest.approx((traffic_us + launches_us) / 1e3, rel=0.01)


def test_a_fit_follows_many_steps_and_leaves_other_generations_alone() -> None:
    name = SMALL[0]
    case, step = CASES[name], steps.step_of(CASES[name])
    device = modelled_device(case.device)
    slower = {k: Efficiency(s.rate / 1.2, s.bandwidth / 1.2) for k, s in shares_of(device).items()}
    ms = steps.predicted_ms(case, step, Roofline(device, slower, device_table().launch_us))
    made = {str(i): (replace(case, published_ms=ms), step) for i in range(10)}
    start_ms = steps.predicted_ms(case, step, fit.roofline_of(case, fit.start()))
    found = fit.solved(made)
    found_ms = steps.predicted_ms(case, step, fit.roofline_of(case, found))
    assert abs(found_ms - ms) < 0.4 * abs(start_ms - ms)
    assert found == fit.solved(made)
    assert found["hopper"] == fit.start()["hopper"]  # of which nothing was seen


def test_shares_stay_within_what_is_possible_and_where_nothing_was_fitted() -> None:
    shares, start = json.loads(SHARES_FILE.read_text()), fit.start()
    fitted = {tuple(place) for place in json.loads(fit.START_FILE.read_text())["fitted"]}
    assert shares.keys() == start.keys()
    for generation, kinds in shares.items():
        assert kinds.keys() == start[generation].keys()
        for kind, one in kinds.items():
            for what, share in one.items():
                assert fit.LEAST <= share <= fit.MOST
                if (generation, kind, what) not in fitted:
                    assert share == start[generation][kind][what]


def test_the_docs_show_the_kept_rows() -> None:
    text = table.PAGE.read_text()
    shown = text.partition(table.BEGIN)[2].partition(table.END)[0]
    assert shown == table.table(ROWS)


def test_each_device_has_a_generation_with_shares() -> None:
    known = json.loads(SHARES_FILE.read_text())
    devices = json.loads(DEVICES_FILE.read_text())["devices"]
    assert {one["generation"] for one in devices.values()} == known.keys() - {"any"}
