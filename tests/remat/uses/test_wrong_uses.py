"""Uses that could train without the plan: each gives a plan, a refusal or one warning."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import remat
from remat.graph_capture.errors import RematError
from remat.rewriter.user_module.own_forward import Unplanned
from tests.remat.uses.planned_nets import (
    PLAN,
    PLANNINGS,
    REFUSED,
    WARNED,
    Lit,
    Net,
    Planning,
    Use,
    cache,
    net,
    outcome,
    rematerialized,
    rows,
    sequence,
    train,
    whole,
)


def doubled(self: Any, x: Tensor) -> Tensor:
    """Another forward, which calls no planned one."""
    return self.head(self.body(x)) * 2


def in_eval(plan: Planning, steps: int = 1) -> None:
    whole(plan(net()).eval(), steps)


def left_in_eval_later(plan: Planning) -> None:
    model = plan(net())
    whole(model)
    whole(model.eval())


def in_parts(plan: Planning) -> None:
    model: Any = plan(net())
    train(lambda x: model.head(model.body(x)), model, 1)


def by_index(plan: Planning) -> None:
    model: Any = plan(sequence())
    train(model[0], model, 1)


def in_a_loop(plan: Planning) -> None:
    model: Any = plan(sequence())
    train(lambda x: functools.reduce(lambda value, layer: layer(value), model, x), model)


def by_the_class(plan: Planning) -> None:
    model: Any = plan(net())
    train(lambda x: Net.forward(model, x), model)


def by_training_step(plan: Planning, kind: type[Net] = Net) -> None:
    model: Any = plan(net(kind))
    train(model.training_step, model)


def replaced(plan: Planning, make: Callable[[Any], Any], steps: int = 0) -> None:
    model = plan(net())
    if steps:
        whole(model, steps)
    model.forward = make(model)
    whole(model)


def replaced_on_its_class(plan: Planning, steps: int = 0) -> None:
    model = plan(net())
    if steps:
        whole(model, steps)
    type(model).forward = doubled  # pyright: ignore
    whole(model)


def replaced_before(plan: Planning) -> None:
    model = net()
    model.forward = types.MethodType(doubled, model)
    whole(plan(model))


def replaced_on_the_original(plan: Planning) -> None:
    model = net()
    planned = plan(model)
    whole(planned)
    model.forward = functools.partial(doubled, model)
    whole(planned)


def replaced_on_the_users_class(plan: Planning) -> None:
    class Other(Net):
        """A class of its own."""

    planned = plan(net(Other))
    whole(planned)
    Other.forward = doubled
    whole(planned)


def planned_under(plan: Planning, mode: Callable[[], Any]) -> None:
    model = net()
    with mode():
        planned = plan(model)
    whole(planned)


def planned_twice(plan: Planning) -> None:
    model = net()
    again: Any = plan(plan(model))
    assert again.original_module is model
    whole(again)


def planned_otherwise_before(plan: Planning) -> None:
    model = net()
    for first in (cache, rematerialized):
        again: Any = plan(first(model))
        assert again.original_module is model
    whole(again)


def blocks_planned_twice(plan: Planning) -> None:
    def of_blocks(model: nn.Module) -> nn.Module:
        return remat.rematerialize(model, (rows(),), blocks="body.[02]", budget="100%")

    model = net()
    whole(of_blocks(of_blocks(model)))
    again: Any = plan(of_blocks(model))
    assert again.original_module is model
    whole(again)


def blocks_in_eval(_: Planning) -> None:
    whole(
        remat.rematerialize(net(), (rows(),), blocks="body.[02]", budget="100%", check=False).eval()
    )


def copied(plan: Planning, copy_of: Callable[[Any], Any]) -> None:
    model = plan(net())
    other = copy_of(model)
    assert type(other).__mro__[2] is type(model).__mro__[2]
    whole(other)
    assert all(parameter.grad is None for parameter in model.parameters())


def part_copied(plan: Planning) -> None:
    model = plan(net())
    part = copy.deepcopy(model.body)
    assert type(part) is nn.Sequential
    whole(part)
    whole(model)


def averaged(plan: Planning) -> None:
    model = plan(net())
    average = AveragedModel(model)
    whole(model)
    average.update_parameters(model)
    whole(average)


def with_a_planned_part(plan: Planning) -> None:
    whole(plan(nn.Sequential(plan(net()), nn.Linear(1, 1))))


def compiled_in_place(plan: Planning) -> None:
    model = net()
    model.compile(backend="eager")
    whole(plan(model))


def compiled_in_place_later(plan: Planning, of: str) -> None:
    model = net()
    planned = plan(model)
    whole(planned, 1)
    {"original": model, "planned": planned}[of].compile(backend=without_a_plan)
    whole(planned)


def without_a_plan(graph: Any, _: Any) -> Any:
    """A compiler that must not be asked."""
    raise AssertionError("the planned module was compiled")


def wrapped_part(plan: Planning) -> None:
    model = net()
    model.body = DistributedDataParallel(model.body)  # pyright: ignore
    whole(plan(model))


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def in_eval_within(plan: Planning, wrap: Callable[[nn.Module], nn.Module]) -> None:
    whole(wrap(plan(net())).eval())


USES: dict[str, tuple[Use, str]] = {
    "eval mode": (in_eval, WARNED),
    "left in eval mode later": (left_in_eval_later, WARNED),
    "pickled, in eval mode": (
        lambda plan: whole(pickle.loads(pickle.dumps(plan(net()))).eval()),
        WARNED,
    ),
    "blocks in eval mode": (blocks_in_eval, WARNED),
    "parts called directly": (in_parts, WARNED),
    "a part by its index": (by_index, WARNED),
    "a loop over its parts": (in_a_loop, WARNED),
    "the forward of its class": (by_the_class, WARNED),
    "another method": (by_training_step, WARNED),
    "Lightning": (functools.partial(by_training_step, kind=Lit), WARNED),
    "a method in place of forward": (
        lambda plan: replaced(plan, lambda model: types.MethodType(doubled, model)),
        WARNED,
    ),
    "a partial in place of forward": (
        lambda plan: replaced(plan, lambda model: functools.partial(doubled, model)),
        WARNED,
    ),
    "another forward after a step": (
        lambda plan: replaced(plan, lambda model: functools.partial(doubled, model), 1),
        WARNED,
    ),
    "another forward on its class": (replaced_on_its_class, WARNED),
    "another forward on its class after a step": (
        functools.partial(replaced_on_its_class, steps=1),
        WARNED,
    ),
    "a forward around the planned one": (
        lambda plan: replaced(plan, lambda model: functools.partial(model.forward)),
        PLAN,
    ),
    "the planned forward put back": (lambda plan: replaced(plan, lambda m: m.forward), PLAN),
    "another forward before": (replaced_before, PLAN),
    "under no_grad": (functools.partial(planned_under, mode=torch.no_grad), PLAN),
    "in inference mode": (functools.partial(planned_under, mode=torch.inference_mode), PLAN),
    "planned twice": (planned_twice, PLAN),
    "planned otherwise before": (planned_otherwise_before, PLAN),
    "blocks planned twice": (blocks_planned_twice, PLAN),
    "a part is planned": (with_a_planned_part, REFUSED),
    "deepcopy": (functools.partial(copied, copy_of=copy.deepcopy), PLAN),
    "pickle": (
        functools.partial(copied, copy_of=lambda model: pickle.loads(pickle.dumps(model))),
        PLAN,
    ),
    "deepcopy of a part": (part_copied, PLAN),
    "an average": (averaged, PLAN),
    "DataParallel inside": (lambda plan: whole(plan(nn.DataParallel(net()))), REFUSED),
    "DataParallel outside": (lambda plan: whole(nn.DataParallel(plan(net()))), PLAN),
    "torch.compile inside": (
        lambda plan: whole(plan(torch.compile(net(), backend="eager"))),  # type: ignore[arg-type]
        REFUSED,
    ),
    "compiled in place": (compiled_in_place, REFUSED),
    "the original compiled in place later": (
        functools.partial(compiled_in_place_later, of="original"),
        PLAN,
    ),
    "the planned module compiled in place": (
        functools.partial(compiled_in_place_later, of="planned"),
        PLAN,
    ),
    "torch.compile outside": (
        lambda plan: whole(torch.compile(plan(net()), backend="eager")),  # type: ignore[arg-type]
        PLAN,
    ),
    "DDP inside": (lambda plan: whole(plan(DistributedDataParallel(net()))), REFUSED),
    "DDP around a part": (wrapped_part, REFUSED),
    "DDP outside": (lambda plan: whole(DistributedDataParallel(plan(net()))), PLAN),
    "DDP outside, in eval mode": (
        functools.partial(in_eval_within, wrap=DistributedDataParallel),
        WARNED,
    ),
    "FSDP1 inside": (lambda plan: whole(plan(fsdp1(net()))), REFUSED),
    "FSDP1 outside": (lambda plan: whole(fsdp1(plan(net()))), REFUSED),
    "FSDP2 inside": (lambda plan: whole(plan(fully_shard(net()))), REFUSED),
    "FSDP2 outside, planned again": (
        lambda plan: whole(plan(fully_shard(plan(net())))),
        REFUSED,
    ),
}
EITHER = {
    "another forward on the original": replaced_on_the_original,
    "another forward on the user's class": replaced_on_the_users_class,
}
"""A cache plans anew, and one plan is refused."""


@pytest.mark.parametrize("planning", PLANNINGS)
@pytest.mark.parametrize("name", USES)
def test_nothing_trains_without_its_plan_and_without_a_word(name: str, planning: str) -> None:
    use, expected = USES[name]
    found, said = outcome(use, PLANNINGS[planning])
    assert found == expected
    assert len(said) == (expected == WARNED)


@pytest.mark.parametrize("name", EITHER)
def test_a_cache_follows_another_forward_of_the_original(name: str) -> None:
    assert outcome(EITHER[name], cache) == (PLAN, [])
    assert outcome(EITHER[name], rematerialized) == (REFUSED, [])


CAUSES = {
    "eval mode": r"^call train\(\) on Net before a training step: in eval mode",
    "Lightning": r"^plan the module that training_step calls, as in self\.model = remat\.",
    "parts called directly": r"^call the planned Net itself.*body was used",
    "a partial in place of forward": r"^replace the forward of Net before.*let doubled call",
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_warning_names_the_cause(name: str) -> None:
    with pytest.warns(UserWarning, match=CAUSES[name]):
        USES[name][0](cache)


TEXTS: dict[str, tuple[Planning, str]] = {
    "DDP": (
        DistributedDataParallel,
        r"^the model is wrapped by DistributedDataParallel: plan .*"
        r"DistributedDataParallel\(remat\.rematerialize\(model, \.\.\.\)\)",
    ),
    "FSDP1": (fsdp1, r"FullyShardedDataParallel: .*fully_shard"),
    "a planned part": (
        lambda model: nn.Sequential(cache(model)),
        r"^leave 0 as it is.*original_module.*already follows a plan",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TEXTS)
def test_a_cache_of_a_wrapped_model_is_refused_before_anything_runs(name: str) -> None:
    wrap, text = TEXTS[name]
    with pytest.raises(RematError, match=text):
        cache(wrap(net()))


def test_a_planned_module_with_another_forward_is_not_planned_again() -> None:
    model = cache(net())
    model.forward = functools.partial(doubled, model)
    with pytest.raises(RematError, match="before its forward is replaced"):
        cache(model)


def test_a_planned_module_is_not_copied_to_several_devices() -> None:
    model: Any = cache(net())
    with pytest.raises(RematError, match="use DistributedDataParallel"):
        model._replicate_for_data_parallel()


def test_what_is_watched_can_be_kept(tmp_path: Path) -> None:
    model: Any = cache(net())
    weight = next(model.head.parameters())
    assert weight._post_accumulate_grad_hooks
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.head, tmp_path / "head.pt")
    assert not copy.deepcopy(model.head).weight._post_accumulate_grad_hooks
    read: Any = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(read.head.weight, model.head.weight)
    assert isinstance(read._remat_unplanned, Unplanned)
