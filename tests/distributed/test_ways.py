"""Four ranks over gloo, under every way of data parallelism: eager's bits, the predicted peak."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.distributed.launch import Found, ranks

FSDP2 = ("full", "full_root_too", "keep", "part")
REPLICAS = ("hsdp", "hsdp_keep", "finer_states", "offload")
MIXED = ("mixed", "mixed_keep", "mixed_part", "mixed_hsdp_reduced")
IN_BUCKETS = ("ddp", "ddp_views", "ddp_static", "ddp_first_buckets", "zero1", "zero1_over_two")
OTHERS = ("replicate", *IN_BUCKETS)
WITHIN = {"zero1": 0.02, "zero1_over_two": 0.02}
"""Of ZeRO-1, where ranks hold whole parameters, and the one that holds most is predicted."""
LIMIT_S = 600
"""Far more than a launch takes. It ends one that hangs."""


Launched = Callable[[tuple[str, ...]], Found]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """What cases found, by rank: a group of them is launched once, as starting takes long."""
    done: dict[tuple[str, ...], Found] = {}

    def found(group: tuple[str, ...]) -> Found:
        if group not in done:
            folder = tmp_path_factory.mktemp("ways")
            done[group] = ranks("ways_worker.py", folder, 4, *group, limit_s=LIMIT_S)
        return done[group]

    return found


def cases(*groups: tuple[str, ...]) -> pytest.MarkDecorator:
    """Each case, with the launch that it is one of."""
    each = [(group, case) for group in groups for case in group]
    return pytest.mark.parametrize(("group", "case"), each, ids=[case for _, case in each])


@pytest.mark.slow
@cases(FSDP2, REPLICAS, MIXED, OTHERS)
def test_eagers_bits_and_the_predicted_peak(
    launched: Launched, group: tuple[str, ...], case: str
) -> None:
    here = [one[case] for one in launched(group)]
    assert all(one["same"] for one in here)
    assert all(one["n"] == 27 for one in here)
    assert all(one["plan"] == here[0]["plan"] for one in here)
    assert here[0]["overhead"] > 0
    for one in here:
        predicted = pytest.approx(one["predicted_bytes"], rel=WITHIN.get(case, 0.01))
        assert one["measured_bytes"] == predicted


WHOLE = ("whole_keep", "whole_full", "whole_mixed", "summed")
REFUSED = {
    "stale": ("StateChangedError", r"set_reshard_after_backward\(False\) left the parameters of"),
    "another_policy": ("SignatureError", r"bfloat16\[.* is called with float16\[.*param_dtype="),
    "no_policy": ("SignatureError", r"planned for .* = bfloat16\[.* is called with float32\["),
    "held_in_bfloat16": ("CaptureError", r"parameter \S+ is bfloat16, .* held in float32"),
}


@pytest.mark.slow
@cases((*WHOLE, *REFUSED))
def test_one_rewritten_model_and_what_is_refused(
    launched: Launched, group: tuple[str, ...], case: str
) -> None:
    here = [one[case] for one in launched(group)]
    if case in WHOLE:
        assert all(one["same"] and one["n"] == 27 for one in here)
        return
    kind, text = REFUSED[case]
    for one in here:
        assert one["error"] == kind
        assert re.search(text, one["text"])
    if case == "stale":
        assert all(one["summed"] == "" for one in here)
