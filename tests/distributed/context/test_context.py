"""Plans with context parallel ranks, applied over gloo: eager's bits, one rank's gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from remat.cluster.mesh import ClusterRequest, MeshSpec
from remat.cluster.planning import plan_cluster
from tests.distributed.launch import Found, ranks, require_refused

pytestmark = pytest.mark.slow

LIMIT_S = 600
"""Far more than a launch takes. It ends one that hangs."""
PLANS = {
    "cp2.json": ("rotary", 2, 8, "2500KiB", MeshSpec(1, 2, 1, 2, 1, 2)),
    "learned.json": ("learned", 2, 8, "2500KiB", MeshSpec(1, 2, 1, 2, 1, 2)),
    "dp2cp2.json": ("rotary", 4, 16, "2MiB", MeshSpec(1, 2, 1, 2, 1, 4)),
    "pp2cp2.json": ("rotary", 4, 8, "2MiB", MeshSpec(1, 2, 2, 2, 1, 2)),
    "cp4.json": ("rotary", 4, 8, "1850KiB", MeshSpec(1, 4, 1, 2, 1, 4)),
    "ring2.json": ("one", 2, 8, "2000KiB", MeshSpec(1, 2, 1, 2, 1, 2)),
    "ring2of2.json": ("few", 4, 8, "1850KiB", MeshSpec(1, 4, 1, 2, 1, 4)),
    "cp2tp2.json": ("rotary", 4, 8, "2MiB", MeshSpec(2, 2, 1, 2, 1, 2)),
}
"""By file: the model, GPUs, sequences of a step, bytes of each GPU, and the mesh."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    folder = tmp_path_factory.mktemp("context")
    for name, (model, gpus, batch, budget, asked) in PLANS.items():
        request = ClusterRequest(gpus, batch, 64, "h100", 8, budget, asked=asked)
        found = plan_cluster(f"tests.distributed.context.models:{model}", request, 0).file
        assert found is not None, name
        (folder / name).write_bytes(found.to_json())
    return lambda n, *cases: ranks("context/worker.py", folder, n, *cases, limit_s=LIMIT_S)


TWO = ("cp2", "learned", "ring2", "refused")
FOUR = ("pp2", "dp2", "tp2", "cp4", "ring2of2")
"""The case whose peak is measured comes first, beside no threads of other cases."""


@pytest.fixture(scope="module")
def two(run: Callable[..., Found]) -> Found:
    return run(2, *TWO)


@pytest.fixture(scope="module")
def four(run: Callable[..., Found]) -> Found:
    """All cases on four ranks, in one launch, since starting takes long."""
    return run(4, *FOUR)


@pytest.mark.parametrize("case", ["cp2", "learned", "ring2"])
def test_recomputation_has_the_bits_of_eager_blocks(two: Found, case: str) -> None:
    for one in (found[case] for found in two):
        assert one["same"]
        assert one["n"] > 120
        assert max(one["overhead"].values()) > 0


@pytest.mark.parametrize("case", ["cp2", "learned", "cp4", "ring2", "ring2of2"])
def test_gradients_are_those_of_one_rank_with_all_tokens(
    two: Found, four: Found, case: str
) -> None:
    """In bfloat16: positions that begin anew on each rank would be off by the whole of it.

    Each of two heads of keys goes to two ranks of four. In rings, tokens go round.
    """
    for one in (found[case]["alone"] for found in (four if case in FOUR else two)):
        assert one["n"] > 60
        assert one["off"] < 0.04


@pytest.mark.parametrize("case", FOUR)
def test_with_each_other_parallelism(four: Found, case: str) -> None:
    for one in (found[case] for found in four):
        assert one["same"]
        assert one["n"] > 60
        if case == "pp2":
            least, most = one["measured_bytes"]
            assert 0.99 * least <= one["predicted_bytes"] <= 1.01 * most


REFUSED = {
    "own_rotation": ("CaptureError", r"(?s)--cp 1.*Block layers\.0 depends on the position of a t"),
    "target": ("PlanError", r"pass \[batch, 64, \.\.\.\].*target has a tensor of \[2\]"),
    "short": ("PlanError", r"the microbatch in args has a tensor of \[2, 32\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ranks_cannot_share_is_refused_on_each(two: Found, case: str) -> None:
    for said in (found["refused"][case] for found in two):
        require_refused(said, REFUSED[case])
        assert said["text"].count("\n") <= 1
