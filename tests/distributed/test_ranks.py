"""Two ranks over gloo: the bits of the same wrapper around eager, the predicted peak."""

from __future__ import annotations

import re

import pytest

from tests.distributed.launch import Found, ranks, require_refused, torchrun

TRAINED = ("ddp_blocks", "fsdp2")
"""Each way of planning, each way of sharding, once."""
MORE = ("ddp", "fsdp2_blocks_min", "in_lower_precision")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases on two ranks, in one launch, since starting takes longest."""
    return ranks("worker.py", tmp_path_factory.mktemp("two"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_eagers_bits_the_predicted_peak_and_one_plan(two: Found, case: str) -> None:
    require_eagers_bits(two, case)
    require_the_predicted_peak_of_one_plan(two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_other_ways_do_too(two: Found, case: str) -> None:
    require_eagers_bits(two, case)
    if case != "in_lower_precision":
        require_the_predicted_peak_of_one_plan(two, case)


def require_eagers_bits(ranks_found: Found, case: str) -> None:
    """Gradients are those of the same wrapper around eager."""
    for found in ranks_found:
        assert found[case]["same"]
        assert found[case]["n"] == 27


def require_the_predicted_peak_of_one_plan(ranks_found: Found, case: str) -> None:
    for found in ranks_found:
        assert found[case]["overhead"] > 0
        predicted_bytes = found[case]["predicted_bytes"]
        assert found[case]["measured_bytes"] == pytest.approx(predicted_bytes, rel=0.02)
    assert ranks_found[0][case]["plan"] == ranks_found[1][case]["plan"]


REFUSED = {
    "another_step": ("AgreementError", r"the step captured on rank 1 is not that of rank 0"),
    "too_little": ("BudgetError", r"the lowest peak that a schedule is known to reach"),
    "sharded_first": ("CaptureError", r"make the plan first.*scale is a DTensor.*FSDP2"),
    "ddp_first": ("CaptureError", r"DistributedDataParallel\(remat\.rematerialize\(model, "),
    "cast_later": (
        "SignatureError",
        r"(?s)under torch\.autocast, or plan model\.to\(torch\.bfloat16",
    ),
    "sharded_inside": ("StateChangedError", r"submodule up is sharded by itself"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_on_every_rank(two: Found, case: str) -> None:
    for found in two:
        require_refused(found[case], REFUSED[case])


@pytest.mark.slow
def test_the_example_trains() -> None:
    said = torchrun(2, "tests/distributed/script.py", "examples/train_fsdp.py")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert losses[-1] < 0.9 * losses[0]
    peaks = re.findall(r"rank \d: predicted peak ([\d.]+) MiB, measured ([\d.]+) MiB", said)
    assert len(peaks) == 2
    for predicted, measured in peaks:
        assert float(measured) == pytest.approx(float(predicted), rel=0.02)
