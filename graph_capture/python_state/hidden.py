"""State that is in no attribute and no container: how far an iterator or a generator has come.

Taking the next item, or the next number, changes nothing that a walk sees, and a step that follows
a plan would take the same one each time. Context variables and the environment are asked too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import pickle
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from remat.graph_capture.python_state.library_objects import memory_of
from remat.graph_capture.python_state.places import MISSING, is_same

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_SETTINGS = frozenset({
    "get_default_device", "get_deterministic_debug_mode", "get_float32_matmul_precision",
    "get_num_interop_threads", "get_num_threads", "is_anomaly_enabled", "is_warn_always_enabled",
})  # fmt: skip
"""Beside those that every plan compares."""
_OF_ALL = (random._inst, np.random.mtrand._rand)  # pyright: ignore
"""The streams behind `random` and `numpy.random`, which are watched while forward is traced."""


ENDLESS = -1
"""How much is left of an iterator that does not end, such as `itertools.repeat`."""


@dataclass(frozen=True)
class Hidden:
    """Something that is asked for its state, and what it said. It is not written to.

    Attributes
    ----------
    ask : from the owner to its state.
    """

    text: str
    owner: Any
    ask: Callable[[Any], Any]
    value: Any

    def now(self) -> Any:
        """Its state now."""
        return self.ask(self.owner)

    def put(self, value: Any) -> None:
        """Nothing: an iterator only goes on."""

    def term(self, name: Callable[[Any], str]) -> str:
        """An expression that is true while its state is the same."""
        return f"{name(is_same)}({name(self.ask)}({name(self.owner)}), {name(self.value)})"


def hidden(text: str, owner: Any) -> Hidden | None:
    """The place of an object that hides a state; None for any other."""
    if isinstance(owner, ContextVar):
        return Hidden(text, owner, _context, _context(owner))
    if (held := memory_of(owner)) is not None:
        return Hidden(text, owner, memory_of, held)
    if isinstance(owner, Iterator):
        return Hidden(text, owner, _progress, _progress(owner))
    return None


class SettingsBefore:
    """Environment variables and torch's settings, as they are when this is made."""

    def __init__(self) -> None:
        self._variables = dict(vars(os.environ)["_data"])
        self._said = {name: _said_by_torch(name, torch) for name in sorted(_SETTINGS)}

    def asked(
        self, global_names: Collection[str], names: Collection[str], texts: Collection[str]
    ) -> Iterator[Hidden]:
        """Those that code may ask for.

        Parameters
        ----------
        names : of attributes. texts : of variables, which are in capitals there, as in `names`.
        """
        for name in sorted(_SETTINGS.intersection(names)):
            ask = functools.partial(_said_by_torch, name)
            yield Hidden(f"torch.{name}()", torch, ask, self._said[name])
        if {"environ", "getenv"}.isdisjoint({*global_names, *names}):
            return
        capitals = sorted({name for name in (*names, *texts) if name.isupper()})
        keys = tuple(map(os.environ.encodekey, capitals))
        text = "one of the environment variables that the code names"
        before = tuple(map(self._variables.get, keys))
        yield Hidden(text, os.environ, functools.partial(_variables, keys), before)


@dataclass(frozen=True)
class Stream:
    """A user's own generator of random numbers, and where it was. It may move between steps."""

    text: str
    owner: Any
    state: Any

    def has_moved(self) -> bool:
        """Whether numbers were drawn from it, or it was seeded."""
        return pickle.dumps(_state_of(self.owner)) != self.state[0]

    def put_back(self) -> None:
        """Set it to where it was."""
        if self.has_moved():
            _set_state(self.owner, self.state[1])


def stream(text: str, owner: Any) -> Stream | None:
    """A generator of its own; None for the streams that all share, and where no state is."""
    if any(owner is one for one in (*_OF_ALL, torch.default_generator, *_of_cuda())):
        return None
    with contextlib.suppress(NotImplementedError):  # random.SystemRandom
        state = _state_of(owner)
        return Stream(text, owner, (pickle.dumps(state), state))
    return None


def _of_cuda() -> tuple[torch.Generator, ...]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def _state_of(owner: Any) -> Any:
    if isinstance(owner, random.Random):
        return owner.getstate()
    if isinstance(owner, torch.Generator):
        with _disable_current_modes():  # a trace's own would make a tensor without data
            return owner.get_state().numpy()
    return owner.get_state() if hasattr(owner, "get_state") else owner.bit_generator.state


def _set_state(owner: Any, state: Any) -> None:
    if isinstance(owner, random.Random):
        owner.setstate(state)
    elif isinstance(owner, torch.Generator):
        with _disable_current_modes():
            owner.set_state(torch.from_numpy(state))
    elif hasattr(owner, "get_state"):
        owner.set_state(state)
    else:
        owner.bit_generator.state = state


def _said_by_torch(name: str, module: Any) -> Any:
    return getattr(module, name)()


def _context(variable: ContextVar[Any]) -> Any:
    return variable.get(MISSING)


def _variables(keys: tuple[Any, ...], environ: Mapping[str, str]) -> Any:
    # Its own `get` encodes each name anew, which takes longer than all other guards.
    return tuple(map(vars(environ)["_data"].get, keys))


def _progress(iterator: Any) -> Any:
    """What differs as soon as an iterator has given an item; `MISSING` where nothing can be seen.

    Counters show their number, iterators over containers how much is left, generators their frame.
    Those that wrap others are taken apart.
    """
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if hasattr(iterator, "__length_hint__"):
        return operator.length_hint(iterator, ENDLESS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return _taken_apart(iterator.__reduce__())
    except TypeError:  # newer Pythons do not take some of them apart
        return MISSING


def _taken_apart(parts: Any) -> Any:
    if isinstance(parts, tuple):
        return tuple(map(_taken_apart, parts))
    return _progress(parts) if isinstance(parts, Iterator) else parts
