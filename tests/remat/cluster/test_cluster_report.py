"""`remat report` of a kept plan for a cluster: mesh, timeline and bytes on one page."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from remat.cli.main import app
from remat.cluster.mesh import ClusterRequest, MeshSpec
from remat.cluster.pictures import (
    bytes_picture,
    cluster_page,
    mesh_picture,
    rank_of,
    shown,
    timeline_picture,
)
from remat.cluster.plan_file import ClusterFile, read_cluster_plan
from remat.cluster.planning import plan_cluster
from remat.cluster.replayed_plan import replay_of
from remat.graph_capture.errors import PlanError

SMALL = "tests.remat.cluster.capture.chains:small_llama"


def planned(asked: MeshSpec) -> ClusterFile:
    found = plan_cluster(SMALL, ClusterRequest(8, 16, 32, "h100", 4, "1400KiB", asked=asked))
    assert found.file is not None
    return found.file


@pytest.fixture(scope="module")
def staged() -> ClusterFile:
    return planned(MeshSpec(tp=2, cp=1, pp=2, microbatch=1, virtual_stages=2))


def test_the_replay_of_the_file_is_the_time_that_it_states(staged: ClusterFile) -> None:
    replay = replay_of(staged)
    assert replay.bubble == pytest.approx(staged.predicted.bubble)
    assert replay.time_us <= staged.predicted.step_us
    for rank, stage in zip(replay.ranks, staged.stages, strict=True):
        moving = ("saved activations", "while a block runs")
        standing = sum(size for name, size in stage.held_bytes.items() if name not in moving)
        assert rank.peak_bytes + standing == stage.peak_bytes
        assert len(rank.spans) == 2 * staged.virtual_stages * staged.microbatches
        assert rank.spans[-1].after_bytes == 0
        assert all(a.end_us <= b.begin_us for a, b in zip(rank.spans, rank.spans[1:], strict=False))


def test_each_picture_is_sound_and_stays_within_its_plane(staged: ClusterFile) -> None:
    replay = replay_of(staged)
    for picture in (
        mesh_picture(staged), timeline_picture(staged, replay), bytes_picture(staged, replay)
    ):  # fmt: skip
        root = ElementTree.fromstring(picture.file("#222222"))
        assert root.get("aria-label") == picture.says
        for path in root.iter("{http://www.w3.org/2000/svg}path"):
            for x, y in re.findall(r"M(\d+) (-?\d+)", path.get("d", "")):
                assert 0 <= int(x) <= picture.width
                assert 0 <= int(y) <= picture.height


def test_a_mesh_has_each_gpu_once(staged: ClusterFile) -> None:
    mesh = staged.parallelism
    ranks = mesh.data_parallel_replicate_degree * mesh.data_parallel_shard_degree
    firsts = [rank_of(mesh, s, r) for s in range(2) for r in range(ranks)]
    assert firsts == list(range(0, 8, 2))
    picture = mesh_picture(staged).inline()
    assert "stage 1, data parallel rank 0: GPUs 4 to 5, node 1" in picture


def test_of_many_the_first_and_the_last_are_drawn() -> None:
    assert shown(3, 4) == [0, 1, 2]
    assert shown(64, 4) == [0, 1, 2, 63]


def test_a_page_without_a_pipeline_has_its_microbatches_in_turn() -> None:
    plan = planned(MeshSpec(tp=1, cp=1, pp=1, microbatch=1))
    spans = replay_of(plan).ranks[0].spans
    assert [str(span.action) for span in spans[:3]] == ["0F0", "0B0", "0F1"]
    assert "The step of each rank" in cluster_page(plan, replay_of(plan))


def test_the_verb_writes_the_page_of_a_file(staged: ClusterFile, tmp_path: Path) -> None:
    kept, page = tmp_path / "cluster.json", tmp_path / "page.html"
    kept.write_bytes(staged.to_json())
    done = CliRunner().invoke(app, ["report", str(kept), "-o", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert re.search(
        r'<main id="main">\s*<h1>Predicted to fit 8 h100, 1\.37 MiB each\. \S+ s a step', text
    )
    assert text.count("<svg") == 3
    assert "<script" not in text
    assert not re.search(r"(src|href)=.(?!#|data:)", text)
    for note in ("all times are modelled", "Meshes within 5 %", "saved activations"):
        assert note in text


def test_a_file_of_before_is_read_and_refused_a_page(staged: ClusterFile) -> None:
    stages = tuple(msgspec.structs.replace(stage, costs=()) for stage in staged.stages)
    old = msgspec.structs.replace(staged, stages=stages)
    assert read_cluster_plan(old.to_json()) == old
    with pytest.raises(PlanError, match=r"old\.json does not say what its stages take"):
        replay_of(old, "old.json")
    cut = msgspec.structs.replace(
        staged, stages=tuple(msgspec.structs.replace(s, costs=s.costs[:1]) for s in staged.stages)
    )
    with pytest.raises(PlanError, match="stage 0 does not have one cost for each virtual stage"):
        read_cluster_plan(cut.to_json())
