"""Numbers that forward reads from objects of torch's and Python's own classes."""

from __future__ import annotations

import configparser
import ctypes
import io
import multiprocessing
import optparse
import queue
import string
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

import remat
from remat.graph_capture.python_state.state_guards import PythonState
from tests.graph_capture.python_state.moments import OPTIONS, X
from tests.graph_capture.python_state.places import Asking

optim, distributions = torch.optim, torch.distributions
Held = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
"""Makes an object, reads a number of it, and changes that."""


def optimizer(**options: Any) -> Any:
    return optim.AdamW([nn.Parameter(torch.zeros(2))], lr=1.0, **options)


def normal() -> Any:
    return distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=False)


def stepped(scheduler: Any) -> None:
    scheduler.optimizer.step()
    scheduler.step()


class MyScheduler(optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        return [0.5**self.last_epoch]


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_double), ("second", ctypes.c_double))


def config() -> Any:
    made = configparser.ConfigParser()
    made.read_dict({"a": {"gain": "1.0"}})
    return made


def text(value: str) -> Any:
    made = io.StringIO()
    made.write(value)
    return made


def event() -> Any:
    made = threading.Event()
    made.set()
    return made


def line_of(items: Any) -> Any:
    made: queue.Queue[Any] = queue.Queue()
    for item in items:
        made.put(item)
    return made


CHANGED: dict[str, Held] = {
    "rate of a group": (
        optimizer,
        lambda it: it.param_groups[0]["lr"],
        lambda it: it.param_groups[0].update(lr=3.0),
    ),
    "default of an optimizer": (
        optimizer, lambda it: it.defaults["eps"], lambda it: it.defaults.update(eps=1.0),
    ),
    "last rate": (
        lambda: optim.lr_scheduler.ExponentialLR(optimizer(), 0.5),
        lambda it: it.get_last_lr()[0],
        stepped,
    ),
    "epoch of a scheduler": (
        lambda: optim.lr_scheduler.CosineAnnealingLR(optimizer(), 10),
        lambda it: 1.0 + it.last_epoch,
        stepped,
    ),
    "the user's own scheduler": (
        lambda: MyScheduler(optimizer()), lambda it: it.get_last_lr()[0], stepped,
    ),
    "gamma": (
        lambda: optim.lr_scheduler.StepLR(optimizer(), 1, gamma=0.5),
        lambda it: it.gamma,
        lambda it: setattr(it, "gamma", 0.1),
    ),
    "scale of a distribution": (
        normal, lambda it: it.stddev.sum(), lambda it: setattr(it, "scale", 2 * torch.ones(4)),
    ),
    "below another distribution": (
        lambda: distributions.Independent(normal(), 1, validate_args=False),
        lambda it: it.log_prob(torch.zeros(4)),
        lambda it: setattr(it.base_dist, "loc", torch.ones(4)),
    ),
    "epoch of a sampler": (
        lambda: DistributedSampler([1, 2], num_replicas=1, rank=0),
        lambda it: 1.0 + it.epoch,
        lambda it: it.set_epoch(2),
    ),
    "number of samples": (
        lambda: WeightedRandomSampler([1.0, 2.0], 2),
        lambda it: len(it) / 2,
        lambda it: setattr(it, "num_samples", 7),
    ),
    "flag of a sampler": (
        lambda: RandomSampler([1, 2]),
        lambda it: 2.0 if it.replacement else 1.0,
        lambda it: setattr(it, "replacement", True),
    ),
    "weights of a sampler": (
        lambda: WeightedRandomSampler([1.0, 2.0], 2),
        lambda it: it.weights.sum(),
        lambda it: setattr(it, "weights", torch.ones(3)),
    ),
    "length of a loader": (
        lambda: DataLoader([1, 2, 3, 4], batch_size=2),  # type: ignore[arg-type]
        lambda it: 1.0 + it.prefetch_factor if it.prefetch_factor else 1.0,
        lambda it: vars(it).update(prefetch_factor=3),
    ),
    "scale of gradients": (
        lambda: torch.amp.GradScaler("cpu", init_scale=2.0),
        lambda it: it.get_growth_factor(),
        lambda it: it.set_growth_factor(3.0),
    ),
    "shared number": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda it: it.value,
        lambda it: setattr(it, "value", 3.0),
    ),
    "shared number without a lock": (
        lambda: multiprocessing.Value("i", 1, lock=False),
        lambda it: float(it.value),
        lambda it: setattr(it, "value", 3),
    ),
    "shared array": (
        lambda: multiprocessing.Array("d", [1.0, 2.0]),
        lambda it: it[1],
        lambda it: it.__setitem__(1, 3.0),
    ),
    "number of C": (
        lambda: ctypes.c_float(1.0), lambda it: it.value, lambda it: setattr(it, "value", 2.0),
    ),
    "structure of C": (
        lambda: Pair(1.0, 2.0), lambda it: it.second, lambda it: setattr(it, "second", 3.0),
    ),
    "view of memory": (
        lambda: memoryview(bytearray(b"ab")),
        lambda it: float(it[0]),
        lambda it: it.__setitem__(0, 7),
    ),
    "event of processes": (
        lambda: multiprocessing.Event(),
        lambda it: 2.0 if it.is_set() else 1.0,
        lambda it: it.set(),
    ),
    "config by a method": (
        config, lambda it: it.getfloat("a", "gain"), lambda it: it.set("a", "gain", "2.0"),
    ),
    "config by items": (
        config, lambda it: float(it["a"]["gain"]), lambda it: it["a"].update(gain="2.0"),
    ),
    "parsed options": (
        lambda: optparse.Values({"gain": 1.0}),
        lambda it: it.gain,
        lambda it: setattr(it, "gain", 2.0),
    ),
    "text in memory": (
        lambda: text("ab"), lambda it: float(len(it.getvalue())), lambda it: it.write("c"),
    ),
    "template": (
        lambda: string.Template("1$x"),
        lambda it: float(it.substitute(x="2")),
        lambda it: setattr(it, "template", "3$x"),
    ),
    "event": (event, lambda it: 2.0 if it.is_set() else 1.0, lambda it: it.clear()),
    "queue": (
        lambda: line_of([1.0]), lambda it: 1.0 + it.qsize(), lambda it: it.put(2.0),
    ),
    "fraction in a list": (
        lambda: [Fraction(1, 2)],
        lambda it: float(it[0]),
        lambda it: it.__setitem__(0, Fraction(2)),
    ),
}  # fmt: skip


def as_it_is(place: str) -> tuple[PythonState, Any]:
    make, read, _ = CHANGED[place]
    held = make()
    return PythonState(Asking(held, read)), held


@pytest.mark.parametrize("place", CHANGED)
def test_a_change_is_noticed(place: str) -> None:
    state, held = as_it_is(place)
    assert state.first_change() is None
    CHANGED[place][2](held)
    assert state.first_change() is not None


def test_what_no_code_names_may_change() -> None:
    """Training changes an optimizer's state at each step, and a logger fills its cache."""
    held = optimizer()
    state = PythonState(Asking(held, lambda it: it.param_groups[0]["lr"]))
    held.param_groups[0]["params"][0].grad = torch.ones(2)
    held.step()
    assert state.first_change() is None


def test_a_change_of_what_a_manager_holds_is_noticed() -> None:
    with multiprocessing.Manager() as manager:
        number, names = manager.Value("d", 1.0), manager.dict(gain=1.0)
        for held, read, change in (
            (number, lambda it: it.value, lambda it: it.set(2.0)),
            (names, lambda it: it["gain"], lambda it: it.update(gain=2.0)),
        ):
            state = PythonState(Asking(held, read))
            assert state.first_change() is None
            change(held)
            assert state.first_change() is not None


@pytest.mark.parametrize("place", ["last rate", "scale of a distribution", "shared number"])
def test_a_cache_plans_for_the_new_value(place: str) -> None:
    make, read, change = CHANGED[place]
    held = make()
    torch.manual_seed(0)
    model = Asking(held, read)
    fast: Any = remat.rematerialize(model, **OPTIONS)
    for _ in range(2):
        assert torch.equal(fast(X), model(X))
        change(held)
        assert torch.equal(fast(X), model(X))
