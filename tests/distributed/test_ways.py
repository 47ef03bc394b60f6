"""Four ranks over gloo, under every way of data parallelism: eager's bits, the predicted peak."""

from __future__ import annotations

import pytest

from tests.distributed.launch import Found, ranks, require_refused

pytestmark = pytest.mark.slow

FSDP2 = ("full", "full_root_too", "keep", "part")
REPLICAS = ("hsdp", "hsdp_keep", "finer_states", "offload")
MIXED = ("mixed", "mixed_keep", "mixed_part", "mixed_hsdp_reduced")
IN_BUCKETS = ("ddp", "ddp_views", "ddp_static", "ddp_first_buckets", "zero1", "zero1_over_two")
TRAINED = (*FSDP2, *REPLICAS, *MIXED, "replicate", *IN_BUCKETS)
WITHIN = {"zero1": 0.02, "zero1_over_two": 0.02}
"""Of ZeRO-1, where ranks hold whole parameters, and the one that holds most is predicted."""
LIMIT_S = 1800
"""Far more than a launch takes. It ends one that hangs."""
WHOLE = ("whole_keep", "whole_full", "whole_mixed", "summed")
REFUSED = {
    "stale": ("StateChangedError", r"with False, the parameters of"),
    "another_policy": (
        "SignatureError",
        r"(?s)param_dtype=.*bfloat16\[.* is called with float16\[",
    ),
    "no_policy": ("SignatureError", r"planned for .* = bfloat16\[.* is called with float32\["),
    "held_in_bfloat16": (
        "CaptureError",
        r"parameter \S+ is bfloat16, .* needs parameters in float32",
    ),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases in one launch, since starting takes long."""
    names = (*TRAINED, *WHOLE, *REFUSED)
    return ranks("ways_worker.py", tmp_path_factory.mktemp("ways"), 4, *names, limit_s=LIMIT_S)


@pytest.mark.parametrize("case", TRAINED)
def test_eagers_bits_and_the_predicted_peak(four: Found, case: str) -> None:
    here = [one[case] for one in four]
    assert all(one["same"] for one in here)
    assert all(one["n"] == 27 for one in here)
    assert all(one["plan"] == here[0]["plan"] for one in here)
    assert here[0]["overhead"] > 0
    for one in here:
        predicted = pytest.approx(one["predicted_bytes"], rel=WITHIN.get(case, 0.01))
        assert one["measured_bytes"] == predicted


@pytest.mark.parametrize("case", [*WHOLE, *REFUSED])
def test_one_rewritten_model_and_what_is_refused(four: Found, case: str) -> None:
    here = [one[case] for one in four]
    if case in WHOLE:
        assert all(one["same"] and one["n"] == 27 for one in here)
        return
    for one in here:
        require_refused(one, REFUSED[case])
    if case == "stale":
        assert all(one["summed"] == "" for one in here)
