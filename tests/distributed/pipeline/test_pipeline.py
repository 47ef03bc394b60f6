"""A cluster's plan applied on ranks over gloo: eager's bits, the predicted peak, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat.cli.main import app
from remat.cluster.mesh import ClusterRequest, MeshSpec
from remat.cluster.planning import plan_cluster
from tests.distributed.launch import Found, ranks, require_refused, torchrun

LIMIT_S = 600
"""Far more than a launch takes. It ends one that hangs."""
FACTORY = "tests.distributed.pipeline.models:decoder"
PLANS = {
    "pp2.json": (2, 32, "4MiB", MeshSpec(1, 1, 2, 4, 1, 1)),
    "wide.json": (2, 32, "64MiB", MeshSpec(1, 1, 2, 4, 1, 1)),
    "interleaved.json": (2, 32, "4500KiB", MeshSpec(1, 1, 2, 4, 2, 1, "Interleaved1F1B")),
    "wide_interleaved.json": (2, 32, "64MiB", MeshSpec(1, 1, 2, 4, 2, 1, "Interleaved1F1B")),
    "zero_bubble.json": (2, 32, "6MiB", MeshSpec(1, 1, 2, 4, 2, 1, "InterleavedZeroBubble")),
    "pp2dp2.json": (4, 64, "3500KiB", MeshSpec(1, 1, 2, 4, 1, 2)),
    "pp2dp2tp2.json": (8, 64, "2MiB", MeshSpec(2, 1, 2, 4, 1, 2)),
    "pp1dp2.json": (2, 64, "5MiB", MeshSpec(1, 1, 1, 4, 1, 2)),
}
"""By file: GPUs, sequences of a step, bytes of each GPU, and the mesh."""
Planned = Callable[..., Path]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """A folder with some of the plans."""
    folder = tmp_path_factory.mktemp("plans")

    def made(*names: str) -> Path:
        for name in names:
            gpus, batch, budget, asked = PLANS[name]
            request = ClusterRequest(gpus, batch, 64, "h100", 8, budget, asked=asked)
            found = plan_cluster(FACTORY, request, 0).file
            assert found is not None, name
            (folder / name).write_bytes(found.to_json())
        return folder

    return made


@pytest.fixture(scope="module")
def two(planned: Planned) -> Found:
    folder = planned("pp2.json")
    return ranks("pipeline/worker.py", folder, 2, "1f1b", "refused", "loaded", limit_s=LIMIT_S)


@pytest.mark.slow
def test_1f1b_has_eagers_bits_and_the_predicted_peak(two: Found) -> None:
    for stage, one in enumerate(found["1f1b"] for found in two):
        assert one["same"]
        # Two steps: gradients of each parameter of the stage, and losses on the last one.
        assert one["n"] == 2 * (4 * 6 + (1, 3 + 8)[stage])
        assert one["measured_bytes"] == pytest.approx(one["predicted_bytes"], rel=0.01)
        # One input and two gradients in flight, of 4 x 64 x 64 in bfloat16, in place of 8.
        assert one["received_bytes"] == [(2, 1)[stage] * 32768]


def test_the_first_stage_recomputes_more(two: Found) -> None:
    first, last = (sum(found["1f1b"]["overhead"].values()) for found in two)
    assert first > last > 0


REFUSED = {
    "torch": ("PlanError", r"^make it again with .* is for torch 2\.0, and this is "),
    "shapes": ("PlanError", r"blocks read bfloat16\[5, 64, 64\] here, .* bfloat16\[4, 64, 64\]"),
    "dtype": ("PlanError", r"mp_policy.* float32\[4, 64, 64\] here"),
    "microbatches": ("PlanError", r"--pp 1: 1 microbatches are fewer than 2 stages"),
    "schedule": ("PlanError", r"--virtual-stages 2 .* ZBVZeroBubble is not for 1, "),
    "no_room": ("PlanError", r"larger --budget.* stage \d need .* for activations here"),
    "hook": ("CaptureError", r"block layers\.3: remove the backward hook on submodule up"),
    "tied": ("CaptureError", r"untie tok\.weight, .* are in two stages"),
    "skips": ("CaptureError", r"result of block layers\.0 is read by .* not a chain"),
    "mask": ("CaptureError", r"--pp 1: block layers\.0 gets it, computed from the batch"),
    "blocks": ("PlanError", r"block layers\.0 is not in this Sequential"),
    "another_model": ("PlanError", r"model of rank 1 is not that of rank 0"),
    "no_tp_plan": ("PlanError", r"pass tp_plan, .* 2 tensor parallel ranks"),
    "replicated": ("PlanError", r"of block layers\.0 in tp_plan.* splits no parameter"),
    "world": ("PlanError", r"plan again with --gpus 2: .* for 4 GPUs"),
    "on_meta": ("PlanError", r"pass materialize=.* on the meta device and cannot train"),
    "no_function": (
        "PlanError",
        r"pass materialize as a function of a path and a module.* not a str",
    ),
    "left_on_meta": ("PlanError", r"it left tok\.weight without storage"),
}


def test_a_model_on_the_meta_device_is_given_values_where_it_runs(two: Found) -> None:
    for stage, one in enumerate(found["loaded"] for found in two):
        assert one["same"]
        assert one["n"] == 2 * (4 * 6 + (1, 3 + 8)[stage])
        blocks = [f"layers.{i}" for i in range(4 * stage, 4 * stage + 4)]
        assert sorted(one["asked_for"]) == sorted(["tok", *(("norm", "out") * stage), *blocks])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_on_each_rank(two: Found, case: str) -> None:
    for said in (found["refused"][case] for found in two):
        require_refused(said, REFUSED[case])
        assert "\n" not in said["text"]


@pytest.mark.slow
def test_the_example_trains_on_four(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    words = "--gpus 4 --batch 64 --seq 64 --pp 2 --tp 1 --shard 2 --microbatch 4 --virtual-stages 1"
    words += " --budget 4500KiB"
    made = CliRunner().invoke(
        app, ["cluster", "examples/train_cluster.py:factory", *words.split(), "-o", str(plan)]
    )
    assert made.exit_code == 0, made.output
    script = ("tests/distributed/script.py", "examples/train_cluster.py", str(plan))
    said = torchrun(4, *script, limit_s=LIMIT_S)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert losses[-1] < 0.9 * losses[0]
    peaks = re.findall(r"rank \d: predicted peak ([\d.]+) MiB, measured ([\d.]+) MiB", said)
    assert len(peaks) == 4
    for predicted, measured in peaks:
        assert float(measured) == pytest.approx(float(predicted), rel=0.01)


SCHEDULES = ("gpipe", "interleaved", "looped", "zero_bubble", "zbv", "dualpipe")


@pytest.fixture(scope="module")
def others(planned: Planned) -> Found:
    """All other cases on two ranks, in one launch, since starting takes long."""
    folder = planned(
        "wide.json", "interleaved.json", "wide_interleaved.json", "zero_bubble.json", "pp1dp2.json"
    )
    names = (*SCHEDULES, "plain", "drawn")
    return ranks("pipeline/worker.py", folder, 2, *names, limit_s=3 * LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULES)
def test_all_schedules_have_eagers_bits(others: Found, case: str) -> None:
    for one in (found[case] for found in others):
        assert one["same"]
        assert one["n"] > 40
        # Between two stages of a rank, as a V has them, nothing is received; that is not counted.
        within = 0.03 if case in ("zbv", "dualpipe") else 0.01
        assert one["measured_bytes"] == pytest.approx(one["predicted_bytes"], rel=within)


@pytest.mark.slow
def test_stages_are_sharded_by_fsdp2_with_masters_in_float32(planned: Planned) -> None:
    for found in ranks("pipeline/worker.py", planned("pp2dp2.json"), 4, "sharded", limit_s=LIMIT_S):
        one = found["sharded"]
        assert one["same"]
        assert one["measured_bytes"] == pytest.approx(one["predicted_bytes"], rel=0.01)


@pytest.mark.slow
def test_a_plan_without_a_pipeline_is_a_plain_loop(others: Found) -> None:
    for found in others:
        assert found["plain"]["same"]
        assert found["plain"]["n"] > 100
        assert re.search(r"ranks of stage 0 different values", found["drawn"]["text"])


@pytest.mark.slow
def test_stages_tensor_and_data_parallel_ranks_on_eight(planned: Planned) -> None:
    folder = planned("pp2dp2tp2.json")
    here = ranks("pipeline/worker.py", folder, 8, "split", limit_s=2 * LIMIT_S)
    found = [one["split"] for one in here]
    assert all(one["same"] for one in found)
    # Another plan a stage, and one for all ranks of a stage.
    overheads = [sum(one["overhead"].values()) for one in found]
    assert len(set(overheads[:4])) == len(set(overheads[4:])) == 1
    assert overheads[0] > overheads[4]
