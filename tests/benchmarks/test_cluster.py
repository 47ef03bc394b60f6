"""Published cluster jobs: the kept results, what the pages say of them, and torchtitan's rule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.cluster.__main__ import RESULTS
from benchmarks.cluster.jobs import JOBS, MODELS
from benchmarks.cluster.rule import again_us
from benchmarks.cluster.said import free_lines, published_lines
from benchmarks.cluster.table import BEGIN, END, PAGE, table
from remat.graph_capture.graph import TrainingGraph
from tests.remat.cluster.stored_jobs import BLOCK_128K, FOLDER

KEPT: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
MEGATRON = ("gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t")


def test_each_job_is_kept_with_its_date_versions_and_commit() -> None:
    assert list(KEPT) == [job.name for job in JOBS]
    for facts in KEPT.values():
        assert facts["date"] > "2026"
        assert facts["versions"]["torch"]
        assert facts["commit"]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_four_are_within_a_tenth(name: str) -> None:
    """Shares of an A100 are fitted to the steps of other software."""
    facts = KEPT[name]
    assert facts["on_its_mesh"]["step_s"] == pytest.approx(facts["published_s"], rel=0.1)


@pytest.mark.parametrize(("name", "tp", "pp"), [("gpt-530b", 8, 35), ("gpt-1t", 8, 64)])
def test_the_published_mesh_is_chosen_freely(name: str, tp: int, pp: int) -> None:
    free = KEPT[name]["free"]
    assert (free["tp"], free["pp"]) == (tp, pp)


@pytest.mark.parametrize("name", list(KEPT))
def test_the_parts_of_a_step_are_its_whole_and_its_bytes_fit(name: str) -> None:
    for which in ("on_its_mesh", "free"):
        one = KEPT[name].get(which)
        if one is not None:
            assert sum(one["takes_s"].values()) == pytest.approx(one["step_s"], abs=1e-3)
            assert min(one["takes_s"].values()) >= 0
            assert sum(one["fullest_gib"].values()) <= one["budget_gib"]
            near = (other["step_s"] for other in one["runners_up"])
            assert all(step_s >= one["step_s"] for step_s in near)


def test_the_page_has_the_table_of_the_kept_results() -> None:
    _, _, rest = PAGE.read_text().partition(BEGIN)
    shown = rest.partition(END)[0]
    assert shown == table(KEPT)
    free = [facts["free"] for facts in KEPT.values() if "free" in facts]
    doubted = [one for one in free if one["states_over"] > 128]
    assert doubted
    assert shown.count(" ? |") == len(doubted)


def test_what_is_said_names_the_source_and_why() -> None:
    said = " ".join([*published_lines("gpt-22b", KEPT["gpt-22b"]), *free_lines(KEPT["gpt-22b"])])
    assert "Korthikanti et al. 2022" in said
    assert "why: the published mesh takes" in said
    assert "GiB of the fullest stage: optimizer states and masters" in said
    wide = {**KEPT["gpt-22b"], "free": {**KEPT["gpt-22b"]["free"], "states_over": 256}}
    assert "doubt: states over 256 ranks" in " ".join(free_lines(wide))


def test_torchtitans_rule_repeats_half_of_the_products_and_no_attention() -> None:
    graph = TrainingGraph.from_json((FOLDER / f"{BLOCK_128K}.json").read_bytes())
    forward = graph.ops[: graph.n_forward]
    products = [op.cost_us for op in forward if op.target == "aten.mm.default"]
    attention = sum(op.cost_us for op in forward if "attention" in op.target)
    again = again_us(graph)
    assert sum(products[1::2]) <= again < sum(op.cost_us for op in forward) - attention
    assert MODELS == "benchmarks.cluster_models"
