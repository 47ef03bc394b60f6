"""Models times behaviours: the rewritten module does what the eager one does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from remat.analysis.plan_figures import use_arena
from remat.graph_capture.errors import RewriteError
from remat.rewriter.arena.library import arena_library
from remat.rewriter.user_module.module import RematModule
from tests.behaviours.behaviours import BEHAVIOURS
from tests.behaviours.trainee import Observed, Trainee, differences, planned
from tests.rewriter.arena.steps_in_arena import needs_compiler
from tests.rows import rows
from tests.threads import torch_threads

MODELS = (
    "plain",
    "dropout",
    "batch_norm_in_place_relu",
    "attention_with_dropout",
    "tied_weights",
    "nested_outputs_and_kwargs",
    "nested_outputs_returned",
    "frozen_parameters",
    "input_requires_grad",
    "two_heads",
    "custom_function",
    "in_place_views",
    "overwritten_buffer",
    "constant_attribute",
    "noise",
    "lstm_cells",
    "bfloat16",
    "gradients_in_another_layout",
)

SUMS, CHECKPOINT = "is a sum of several terms", "is called inside a checkpoint"
REFUSED = {
    ("tied_weights", "one_backward_of_two_forwards"): SUMS,
    ("lstm_cells", "one_backward_of_two_forwards"): SUMS,
    ("tied_weights", "state_dict_assigned"): "was tied to embed.weight .* another parameter now",
    ("batch_norm_in_place_relu", "inside_a_checkpoint"): CHECKPOINT,
    ("overwritten_buffer", "inside_a_checkpoint"): CHECKPOINT,
}
"""What cannot be done exactly, and what is said of it."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def tried(behaviour: str, it: Trainee) -> Observed:
    torch.manual_seed(11)
    return BEHAVIOURS[behaviour](it)


PICKLED_TWICE = (
    "plain",
    "dropout",
    "batch_norm_in_place_relu",
    "tied_weights",
    "noise",
    "bfloat16",
)
"""Models that are also pickled in training by default; all are in eval mode. Each reads its plan
anew, and traces for it."""
OFTEN = (
    *PICKLED_TWICE,
    "attention_with_dropout",
    "nested_outputs_and_kwargs",
    "in_place_views",
    "overwritten_buffer",
)
"""Models that stand for all in a quick run."""
PAIRS = rows(
    ((name, behaviour) for behaviour in BEHAVIOURS for name in MODELS),
    lambda row: row[0] in (PICKLED_TWICE if row[1] == "pickled_in_training" else OFTEN),
)


QUICK_RELEASING = ("tied_weights", "input_requires_grad")
RELEASING = rows(
    ((name, behaviour) for behaviour in BEHAVIOURS for name in MODELS),
    lambda row: row[0] in QUICK_RELEASING and "pickled" not in row[1],
)


@pytest.mark.parametrize(("name", "behaviour"), PAIRS)
def test_a_rewritten_module_behaves_as_the_eager_one(name: str, behaviour: str) -> None:
    require_same(name, behaviour, *planned(name))


@pytest.mark.parametrize(("name", "behaviour"), RELEASING)
def test_so_does_one_that_releases_gradients_as_they_are_made(name: str, behaviour: str) -> None:
    eager, module = planned(name, accumulate=True)
    assert module._remat_compiled_step.gradient_gates is not None
    require_same(name, behaviour, eager, module)


def require_same(name: str, behaviour: str, eager: Trainee, module: RematModule) -> None:
    planned_one = eager.with_module(copy.deepcopy(module))
    if (name, behaviour) in REFUSED:
        with pytest.raises(RewriteError, match=REFUSED[name, behaviour]):
            tried(behaviour, planned_one)
        return
    expected = tried(behaviour, eager.with_module(copy.deepcopy(eager.module)))
    assert differences(expected, tried(behaviour, planned_one)) == []


PAIRS_IN_ARENAS = [
    (name, behaviour)
    for behaviour in BEHAVIOURS
    for name in MODELS
    # What is pickled has no arena, nor has a copy that is traced anew.
    if (name, behaviour) not in {*REFUSED, ("constant_attribute", "shallow_copy")}
    and not behaviour.startswith("pickled")
]


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*requests of a .* went to torch's allocator")
@pytest.mark.parametrize(
    ("name", "behaviour"),
    rows(
        PAIRS_IN_ARENAS,
        lambda row: row[0] == "batch_norm_in_place_relu" and "state" not in row[1],
    ),
)
def test_a_module_in_an_arena_behaves_as_the_eager_one(name: str, behaviour: str) -> None:
    eager, module = planned(name)
    served = copy.deepcopy(module)
    expected = tried(behaviour, eager.with_module(copy.deepcopy(eager.module)))
    with use_arena(served, eager.args, eager.kwargs) as arena:
        found = tried(behaviour, eager.with_module(served))
        assert arena.counts.hits > 0
    assert differences(expected, found) == []
    assert not arena_library().is_armed()
