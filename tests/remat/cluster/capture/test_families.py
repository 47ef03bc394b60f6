"""Models that people bring are planned as they come: kinds of blocks, two lists, frozen weights."""

from __future__ import annotations

from collections import Counter

import pytest

from remat.cluster.mesh import ClusterRequest, MeshSpec
from remat.cluster.opened_chain import Chains, job_of
from remat.cluster.plan_file import read_cluster_plan
from remat.cluster.planning import ClusterOutcome, plan_cluster
from remat.graph_capture.distributed.collectives import fake_ranks
from remat.graph_capture.errors import CaptureError, RematError

FAMILIES = "tests.remat.cluster.capture.families"


def planned(name: str, seq: int = 32, **asked: int) -> ClusterOutcome:
    spec = MeshSpec(**{"tp": 1, "cp": 1, "microbatch": 1, **asked})
    request = ClusterRequest(8, 16, seq, "h100", 8, "1GiB", asked=spec)
    found = plan_cluster(f"{FAMILIES}:{name}", request, 0)
    assert found.file is not None
    assert read_cluster_plan(found.file.to_json()) == found.file
    return found


# Name, how many blocks of each kind, and what its plan says of `parallelize`.
OF_TRANSFORMERS = [
    # Local and global layers have other masks and run the same operations.
    ("gemma3_text", [4], "is given others than block model.layers.0"),
    ("qwen3_moe", [1, 3], "make all blocks alike: block model.layers.1 runs other operations"),
    # torch's `empty_like` on meta detaches what it makes, in all blocks but the first.
    ("qwen3_moe_alike", [4], ""),
    ("qwen3_adapted", [4], ""),
    ("vit", [4], ""),
    ("bert", [4], ""),
    ("t5", [1, 2, 1, 2], "decoder.block.0 begins another list of blocks"),
    ("bart", [3, 2], "model.decoder.layers.0 begins another list of blocks"),
]
_QUICK = "bert", "bart"


@pytest.mark.parametrize(
    ("name", "kinds", "unrun"),
    [
        pytest.param(*one, marks=() if one[0] in _QUICK else pytest.mark.slow)
        for one in OF_TRANSFORMERS
    ],
)
def test_models_of_transformers_are_planned(name: str, kinds: list[int], unrun: str) -> None:
    pytest.importorskip("transformers")
    if name == "qwen3_adapted":
        pytest.importorskip("peft")
    found = planned(name, pp=1)
    count = Counter(found.job.kind_of_layer)
    assert [count[kind] for kind in sorted(count)] == kinds
    assert unrun in found.job.unrun
    assert bool(unrun) == bool(found.file and found.file.unrun)
    assert found.file
    # Each kind of block has its graph in the file, and then what follows the blocks.
    assert len(found.file.graphs) == len(kinds) + 1
    assert found.ranked[0].stages[0].blocks == sum(kinds)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_masked"), [("qwen3_moe_alike", False), ("gemma3_text", True)])
def test_attention_is_given_a_mask_where_a_device_gives_one(name: str, is_masked: bool) -> None:
    pytest.importorskip("transformers")  # looks whether its positions are those of one sequence
    _, shape = Chains(f"{FAMILIES}:{name}", "").at(1, 32)
    assert shape.unshared.startswith("has a mask") == is_masked


def test_two_lists_of_blocks_have_no_stages() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(CaptureError, match=r"untie .*, or plan without stages with --pp 1"):
        planned("bart", pp=2)


def test_blocks_that_differ_are_cut_into_stages() -> None:
    found = planned("unlike", seq=8, pp=2, virtual_stages=1)
    assert found.file
    assert found.job.kinds == (0, 1, 1)
    assert sum(found.file.layers_per_stage) == 3
    # The first stage has the wide block, which no block of the second stage is.
    of_first, of_last = (set(stage.schedules) for stage in found.file.stages)
    graphs = [one.graph for one in found.file.schedules]
    assert 0 in {graphs[i] for i in of_first}
    assert {graphs[i] for i in of_last} == {1}


def test_frozen_weights_take_no_gradients_and_no_states() -> None:
    whole, head, adapted = (planned(name, 8) for name in ("unlike", "frozen_head", "adapted"))
    assert whole.job.weights["last"].trained_on_rank(1) == whole.job.weights["last"].on_rank(1)
    # The norm behind the blocks trains, and the head does not.
    assert head.job.weights["last"].trained_on_rank(1) == 32
    assert adapted.job.weights["block"].trained_on_rank(1) == 2 * 16 + 2 * 64
    assert adapted.job.weights["first"].trained_on_rank(1) == 0
    held = [one.ranked[0].stages[0].held_bytes for one in (head, adapted)]
    assert held[1]["gradients"] < held[0]["gradients"]
    assert not adapted.job.unrun


def test_blocks_before_all_that_trains_have_no_backward() -> None:
    found = planned("adapted_late", seq=8)
    assert found.job.kinds == (0, 1, 1)
    idle, trained = found.blocks
    assert idle.backward_us == 0
    assert [option.saved_bytes for option in idle.options] == [0]
    assert trained.backward_us > trained.forward_us / 2


def test_parameters_on_the_root_and_tuples_are_planned() -> None:
    found = planned("loose", seq=8)
    # A rate that is a number of Python changes no cost, so blocks are of one kind.
    assert not found.job.kinds
    assert found.job.weights["first"].on_rank(1) == 32 * 16 + 64 * 16 + 1 + 17 * 16
    assert "is given others than block layers.0" in found.job.unrun


def test_a_plan_with_stages_says_that_they_lack_a_mask_of_the_batch() -> None:
    whole, staged = planned("padded", seq=8, pp=1), planned("padded", seq=8, pp=2, virtual_stages=1)
    assert whole.file
    assert not whole.file.unrun
    assert staged.file
    assert staged.file.unrun.startswith("compute argument 1 in the blocks, or plan with --cp 1 and")


def test_blocks_of_the_same_operations_on_other_tensors_are_of_two_kinds() -> None:
    found = planned("rewired", seq=8)
    assert found.job.kinds == (0, 0, 1)


def test_tied_weights_count_once_without_stages() -> None:
    with fake_ranks() as groups:
        request = ClusterRequest(8, 16, 8, asked=MeshSpec(tp=1, cp=1))
        job = job_of(Chains("tests.remat.cluster.capture.chains:tied_chain", ""), request, groups)
    assert job.weights["first"].on_rank(1) == 32 * 16
    assert job.weights["last"].on_rank(1) == 32
    assert job.unstaged.startswith("untie tok.weight, or plan without stages with --pp 1")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("frozen", "let some parameter train: none of Model requires a gradient"),
        ("looks_at_values", r"let forward and the loss run once on the meta device.*families.py:"),
        ("one_sequence", "as batch says in .*: its blocks read 128 numbers at batch=1 and 128 at"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(name: str, said: str) -> None:
    with pytest.raises(RematError, match=said) as found:
        planned(name, seq=8, microbatch=2)
    assert "\n" not in str(found.value)
