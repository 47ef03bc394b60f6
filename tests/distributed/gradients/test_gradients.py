"""Gradients of parts are those of one rank: what blocks are given, losses, steps in a row."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from remat.cluster.mesh import ClusterRequest, MeshSpec
from remat.cluster.planning import plan_cluster
from tests.distributed.gradients.models import LOSSES, MAKES
from tests.distributed.launch import Found, ranks, require_refused

pytestmark = pytest.mark.slow

LIMIT_S = 600
"""Far more than a launch takes. It ends one that hangs."""
ZERO_BUBBLE = "InterleavedZeroBubble"
PLANS = {
    "one.json": ("given", 1, 8, MeshSpec(1, 1, 1, 2, 1, 1)),
    "dp2.json": ("given", 2, 16, MeshSpec(1, 1, 1, 2, 1, 2)),
    "pp2.json": ("given", 2, 8, MeshSpec(1, 1, 2, 2, 1, 1)),
    "zero_bubble.json": ("given", 2, 8, MeshSpec(1, 1, 2, 2, 2, 1, ZERO_BUBBLE)),
    "cp2.json": ("attends", 2, 8, MeshSpec(1, 2, 1, 2, 1, 2)),
    "pp2cp2.json": ("attends", 4, 8, MeshSpec(1, 2, 2, 2, 1, 2)),
    "dp2cp2.json": ("attends", 4, 16, MeshSpec(1, 2, 1, 2, 1, 4)),
    "pp2dp2.json": ("given", 4, 16, MeshSpec(1, 1, 2, 2, 1, 2)),
}
"""By file: the model, GPUs, sequences of a step, and the mesh."""
ROUNDED = 0.03
"""Gradients in bfloat16 that ranks sum in another order, over their norm."""
GIVEN = [f"one {name}" for name in MAKES]
GIVEN += ["dp2 drawn", "dp2 padding", "dp2 gated", "pp2 positions", "pp2 rate", "pp2 counted"]
GIVEN += ["cp2 rate", "pp2cp2 rate"]
STEPS = [f"{plan} accumulated" for plan in ("one", "dp2", "pp2", "zero_bubble", "zbv")]
LOOKS = [f"{plan} evaluated" for plan in ("one", "dp2", "pp2", "zero_bubble", "zbv", "pp2dp2")]
OF_LOSS = [f"{plan} losses" for plan in ("one", "dp2", "pp2", "cp2", "pp2cp2", "dp2cp2", "pp2dp2")]
OTHERS = ["one copied", "pp2 copied", "pp2 refused", "pp2 moved"]
CASES = (*GIVEN, *STEPS, *LOOKS, *OF_LOSS, *OTHERS)
N_RANKS = {name.removesuffix(".json"): gpus for name, (_, gpus, *_) in PLANS.items()} | {"zbv": 2}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Found]]:
    """What each rank found in a case; all cases of as many ranks run in one launch."""
    folder, known = tmp_path_factory.mktemp("gradients"), dict[int, Found]()
    for name, (model, gpus, batch, asked) in PLANS.items():
        request = ClusterRequest(gpus, batch, 32, "h100", 8, "64MiB", asked=asked)
        made = plan_cluster(f"tests.distributed.gradients.models:{model}", request, 0).file
        assert made is not None, name
        (folder / name).write_bytes(made.to_json())

    def of_case(case: str) -> list[Found]:
        n = N_RANKS[case.split()[0]]
        if n not in known:
            names = [name for name in CASES if N_RANKS[name.split()[0]] == n]
            known[n] = ranks("gradients/worker.py", folder, n, *names, limit_s=LIMIT_S)
        return [one[case] for one in known[n]]

    return of_case


def room(case: str) -> float:
    """Stages add up what one rank does, in its order; ranks with other tokens do not."""
    return 0.0 if case.split()[0] in ("one", "pp2", "zero_bubble", "zbv") else ROUNDED


@pytest.mark.parametrize("case", GIVEN)
def test_what_blocks_are_given_is_made_in_each_step(
    found: Callable[[str], list[Found]], case: str
) -> None:
    for one in found(case):
        assert one["off"] <= room(case)


@pytest.mark.parametrize("case", [*STEPS, *LOOKS])
def test_steps_in_a_row_and_looks_between_them(
    found: Callable[[str], list[Found]], case: str
) -> None:
    for one in found(case):
        off = {what: far for what, far in one.items() if what != "step"}
        assert len(off) == (3 if case in STEPS else 12)
        assert max(off.values()) <= room(case)
        if case in LOOKS:
            assert re.match(r"call schedule\.eval\(x, target=y, losses=", one["step"]["text"])


@pytest.mark.parametrize("case", OF_LOSS)
def test_losses_count_tokens_as_one_rank_does(
    found: Callable[[str], list[Found]], case: str
) -> None:
    for one in found(case):
        assert len(one) in (3 * len(LOSSES), 9, 6)
        assert max(one.values()) <= room(case)


@pytest.mark.parametrize("case", ["one copied", "pp2 copied"])
def test_a_copy_of_a_part_runs_its_own_modules(
    found: Callable[[str], list[Found]], case: str
) -> None:
    assert all(one["apart"] for one in found(case))


REFUSED = {
    "batch": ("SignatureError", r"^drop or pad .* 4 microbatches, so args of \[\(8, 32\)\]"),
    "length": ("SignatureError", r"is given \[\(8, 31\)\]"),
    "drawn": ("CaptureError", r"--pp 1: block layers\.0 gets it, .* or from random numbers"),
    "padding": ("CaptureError", r"--pp 1: block layers\.0 gets it, computed from the batch"),
    "learned": ("CaptureError", r"--pp 1: block layers\.0 gets it, .* from parameters"),
}


def test_what_stages_cannot_be_given_is_refused_on_all(
    found: Callable[[str], list[Found]],
) -> None:
    for one in found("pp2 refused"):
        for case, as_told in REFUSED.items():
            require_refused(one[case], as_told)
            assert "\n" not in one[case]["text"]
    for one in found("pp2 moved"):
        assert one["error"] == "StateChangedError"
        assert re.match(r"plan with --cp 1 and --pp 1, or compute it in the", one["text"])
