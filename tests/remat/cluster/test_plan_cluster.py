"""`remat cluster` on a small decoder: the screen, the file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from remat.cli.main import app
from remat.cluster import opened_chain
from remat.cluster.mesh import ClusterRequest, Degrees, Mesh, MeshSpec
from remat.cluster.pipeline_replay import FOR_WEIGHTS
from remat.cluster.plan_file import ClusterFile, read_cluster_plan
from remat.cluster.planning import modelled_notes, plan_cluster
from remat.graph_capture.errors import PlanError
from remat.schedules.simulate import simulate

CHAINS = "tests.remat.cluster.capture.chains"
SMALL = f"{CHAINS}:small_llama"
SIZES = ("--gpus", "8", "--node-size", "4", "--batch", "16", "--seq", "32")


def remat(*words: str, columns: int = 160) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["cluster", *words])


@pytest.fixture(scope="module")
def planned() -> ClusterFile:
    asked = MeshSpec(tp=2, cp=1, pp=2, microbatch=4, virtual_stages=1)
    request = ClusterRequest(8, 16, 32, "h100", 4, "1200KiB", asked=asked)
    found = plan_cluster(SMALL, request)
    assert found.file is not None
    return found.file


def test_the_file_is_read_back_to_the_same_plan(planned: ClusterFile) -> None:
    assert read_cluster_plan(planned.to_json()) == planned


def test_the_file_speaks_torchtitans_words(planned: ClusterFile) -> None:
    mesh = planned.parallelism
    assert mesh.gpus == 8
    assert (mesh.tensor_parallel_degree, mesh.pipeline_parallel_degree) == (2, 2)
    assert mesh.pipeline_parallel_schedule == "1F1B"
    assert sum(planned.layers_per_stage) == 4
    assert [path for stage in planned.stages for path in stage.blocks] == [
        f"layers.{i}" for i in range(4)
    ]


def test_each_schedule_is_what_the_judge_says(planned: ClusterFile) -> None:
    for one in planned.schedules:
        graph = planned.graphs[one.graph]
        assert one.schedule.graph_hash == graph.hash
        found = simulate(graph, one.schedule)
        assert found.time_us >= graph.time_us
    for stage in planned.stages:
        assert stage.peak_bytes <= planned.budget_bytes
        assert stage.peak_bytes == pytest.approx(sum(stage.held_bytes.values()), rel=0.02)


def test_less_room_is_more_recomputation(planned: ClusterFile) -> None:
    asked = MeshSpec(tp=2, cp=1, pp=2, microbatch=4, virtual_stages=1)
    overheads: list[float] = []
    for budget in ("64MiB", "1200KiB", "1MiB"):
        request = ClusterRequest(8, 16, 32, "h100", 4, budget, asked=asked)
        found = plan_cluster(SMALL, request, 0)
        overheads.append(found.ranked[0].stages[0].overhead if found.ranked else 1.0)
    assert overheads == sorted(overheads)
    assert overheads[0] == 0.0
    assert overheads[-1] > 0


def test_a_second_plan_reads_its_parts_from_disk() -> None:
    request = ClusterRequest(4, 8, 32, "h100", 4, "1GiB", asked=MeshSpec(tp=1, cp=1))
    first, second = (plan_cluster(SMALL, request) for _ in range(2))
    assert second.captured == 0
    assert second.read > 0
    assert first.file == second.file


def test_parts_are_priced_anew_where_the_table_of_devices_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ClusterRequest(4, 8, 32, "h100", 4, "1GiB", asked=MeshSpec(tp=1, cp=1))
    plan_cluster(SMALL, request)
    table = opened_chain.device_table()
    changed = msgspec.structs.replace(table, launch_us=2 * table.launch_us)
    monkeypatch.setattr(opened_chain, "device_table", lambda: changed)
    assert plan_cluster(SMALL, request).read == 0


def test_the_screen_says_what_is_modelled(tmp_path: Path) -> None:
    kept = tmp_path / "cluster.json"
    done = remat(SMALL, *SIZES, "--tp", "2", "--pp", "2", "-o", str(kept))
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "modelled all times are modelled, none is measured" in said
    assert "overlap without any" in said
    assert "mesh tp 2" in said
    for column in ("blocks", "flight", "again", "OS", "borders", "peak"):
        assert column in said
    again = remat(str(kept))
    assert again.exit_code == 0, again.stderr
    assert "mesh tp 2" in " ".join(again.stdout.split())


def test_the_screen_says_what_keeps_parallelize_from_running_the_plan() -> None:
    padded = "tests.remat.cluster.capture.families:padded"
    sizes = ("--gpus", "4", "--node-size", "4", "--batch", "16", "--seq", "8", "--tp", "1")
    text = "not by remat.cluster.parallelize as the model is: compute argument 1 in the blocks"
    for stages in ("1", "2"):
        done = remat(padded, *sizes, "--cp", "1", "--pp", stages)
        assert done.exit_code == 0, done.stderr
        assert (text in " ".join(done.stdout.split())) == (stages == "2")


def test_a_zero_bubble_is_planned_and_shown(tmp_path: Path) -> None:
    kept = tmp_path / "cluster.json"
    fixed = [
        "--tp",
        "1",
        "--pp",
        "2",
        "--virtual-stages",
        "2",
        "--schedule",
        "InterleavedZeroBubble",
    ]
    done = remat(SMALL, *SIZES, *fixed, "-o", str(kept))
    assert done.exit_code == 0, done.stderr
    assert "InterleavedZeroBubble, 2 virtual stages a rank" in done.stdout
    assert "for W" in done.stdout
    plan = read_cluster_plan(kept.read_bytes())
    for stage in plan.stages:
        assert stage.held_bytes[FOR_WEIGHTS] > 0
        assert stage.peak_bytes == pytest.approx(sum(stage.held_bytes.values()), rel=0.02)
        assert all(cost.weight_us > 0 for cost in stage.costs)


def test_runners_up_are_within_5_percent_as_replayed(planned: ClusterFile) -> None:
    near = [one.step_us for one in planned.runners_up]
    assert near == sorted(near)
    assert all(planned.predicted.step_us <= us <= 1.05 * planned.predicted.step_us for us in near)


def test_states_over_many_nodes_are_doubted() -> None:
    request = ClusterRequest(256, 1024, 8192, "h100")

    def notes(shard: int) -> str:
        mesh = Mesh(Degrees(1, 1, 1, 256, 1, 4, 1), shard, shard, reduce_each=True)
        return " ".join(modelled_notes(request.cluster(), request, mesh, 1))

    assert "flattered" not in notes(8)
    assert "states over 64 ranks may look too good" in notes(64)
    assert "more were not compared" not in notes(64)
    assert "more were not compared" in notes(256)


def test_more_context_parallel_ranks_than_heads_form_a_ring_where_asked_for(tmp_path: Path) -> None:
    kept = tmp_path / "ring.json"
    done = remat(SMALL, *SIZES, "--tp", "1", "--cp", "8", "-o", str(kept))
    assert done.exit_code == 0, done.stderr
    said = "tokens go round 2 groups, each of 4 ranks that share heads: attention sums in another"
    assert said in " ".join(done.stdout.split())
    plan = read_cluster_plan(kept.read_bytes())
    assert plan.context_ring == 2
    for wrong in (0, 3, 16):
        with pytest.raises(PlanError, match="8 ranks have no ring of"):
            read_cluster_plan(msgspec.structs.replace(plan, context_ring=wrong).to_json())


def test_json_is_one_object() -> None:
    done = remat(SMALL, *SIZES, "--json", "--tp", "1", "--cp", "1", "--pp", "1")
    said = json.loads(done.stdout)
    assert said["parallelism"]["tensor_parallel_degree"] == 1
    assert said["layers_per_stage"] == [4]
    assert len(said["graph_hashes"]) == 2


def test_nothing_fits_ends_with_3() -> None:
    done = remat(SMALL, *SIZES, "--budget", "100KiB", "--tp", "1", "--cp", "1")
    assert done.exit_code == 3
    assert "no mesh of 8 GPUs fits 100.0 KiB each" in " ".join(done.stderr.split())


REFUSED = [
    ((SMALL, "--gpus", "8"), "give --batch"),
    (
        (SMALL, *SIZES, "--host", "64GiB"),
        "--host 64GiB --optimizer adamw --microbatches 1 --sharding kind=fsdp2,world=8, or leave",
    ),
    ((SMALL, *SIZES, "--tp", "3"), "divides 8 GPUs: tp 3 x cp 1 x pp 1 does not"),
    ((SMALL, *SIZES, "--tp", "4"), "cannot be split over tp 4: with a part of its heads"),
    ((SMALL, *SIZES, "--tp", "8"), "--tp 8 spans nodes of 4 GPUs"),
    (
        (SMALL, *SIZES[:-3], "2", "--seq", "32", "--tp", "1", "--cp", "1", "--pp", "4"),
        "1 microbatches of 1 are fewer than 4 stages",
    ),
    ((f"{CHAINS}:skip", *SIZES), "the result of block layers.0 is read by aten.add.Tensor"),
    ((f"{CHAINS}:tied_chain", *SIZES, "--pp", "2"), "untie tok.weight, or plan without stages"),
    ((SMALL, *SIZES, "--budget", "60%"), "'60%' only makes sense for one step on one device"),
    ((SMALL, *SIZES, "--device", "t4"), "no links between t4 GPUs are known"),
    ((SMALL, *SIZES, "--device", "cpu"), "'cpu' is not in the table of devices"),
    ((SMALL, *SIZES, "--gpus", "10"), "10 GPUs are not whole nodes of 4"),
    (
        (f"{CHAINS}:small_gpt", *SIZES, "--cp", "2"),
        "cp 2 shares the heads of attention over ranks, and this attention is not torch.nn",
    ),
    ((SMALL, *SIZES, "--seq", "0"), "give --seq"),
    ((SMALL, *SIZES, "--pp", "8"), "stages are at most 4 and have a microbatch each"),
    (
        (SMALL, *SIZES, "--pp", "1", "--virtual-stages", "2"),
        "no mesh splits 8 GPUs and a batch of 16 x 32",
    ),
    (
        (SMALL, *SIZES, "--batch", "17", "--pp", "2"),
        "17 sequences do not divide into microbatches of 1 for 4",
    ),
    ((SMALL, *SIZES, "--schedule", "ZBVZeroBubble"), "not 'ZBVZeroBubble'"),
    (
        (SMALL, *SIZES, "--schedule", "InterleavedZeroBubble"),
        "is for blocks without collectives",
    ),
    (
        (SMALL, *SIZES, "--schedule", "InterleavedZeroBubble", "--tp", "1", "--cp", "2"),
        "is for blocks without collectives",
    ),
    (
        (SMALL, *SIZES, "--schedule", "1F1B", "--virtual-stages", "2"),
        "--schedule 1F1B is not for 2 on each rank",
    ),
    ((SMALL, *SIZES, "--schedule", "1F1B", "--pp", "1"), "no mesh splits 8 GPUs and a batch of 16"),
    ((f"{CHAINS}:made", *SIZES), "write it as def factory(batch=1, seq=8192)"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    done = remat(*words)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_plan_for_another_world_is_refused(planned: ClusterFile, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(planned.to_json())
    done = remat(str(path), "--gpus", "16")
    assert done.exit_code == 2
    assert "is for 8 GPUs" in " ".join(done.stderr.split())


def changed(plan: ClusterFile, **fields: object) -> bytes:
    return msgspec.structs.replace(plan, **fields).to_json()


def test_a_file_that_was_changed_is_refused(planned: ClusterFile) -> None:
    stage = planned.stages[0]
    cases = {
        "its degrees make 8 ranks, not 16": {"gpus": 16},
        "its microbatches do not make a batch of 17": {"batch": 17},
        "it has 1 stages for 2 ranks": {"stages": planned.stages[:1]},
        "a block is in two stages": {"stages": (stage, stage)},
        "stage 0 is over the budget": {"budget_bytes": 1},
        "a stage names a missing schedule": {"schedules": ()},
    }
    for said, fields in cases.items():
        with pytest.raises(PlanError, match=said):
            read_cluster_plan(changed(planned, **fields))
    steps = planned.schedules[0].schedule.steps
    cut = msgspec.structs.replace(planned.schedules[0].schedule, steps=steps[:-3])
    one = msgspec.structs.replace(planned.schedules[0], schedule=cut)
    with pytest.raises(PlanError, match="schedule 0 does not fit its graph"):
        read_cluster_plan(changed(planned, schedules=(one, *planned.schedules[1:])))
    with pytest.raises(PlanError, match="is not a plan for a cluster"):
        read_cluster_plan(planned.to_json()[:-9])
    with pytest.raises(PlanError, match="its kind is 'other'"):
        read_cluster_plan(changed(planned, kind="other"))


def test_a_folder_that_cannot_be_written_is_warned_about_and_the_plan_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("no folder")
    monkeypatch.setenv("REMAT_CACHE", str(blocked))
    request = ClusterRequest(4, 8, 32, "h100", 4, "1GiB", asked=MeshSpec(tp=1, cp=1))
    with pytest.warns(UserWarning, match="parts of clusters are not kept") as told:
        assert plan_cluster(SMALL, request).file is not None
    assert sum("are not kept" in str(one.message) for one in told) == 1
