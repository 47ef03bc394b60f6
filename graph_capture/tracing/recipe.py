"""What a model is traced with, kept so that it can be traced again.

A trace can be compiled once, since AOTAutograd spends its metadata, so rewriting traces again. That
traces the ops that run here: a plan with other ones, as one for a GPU of the table, is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.autograd import Function

from remat.graph_capture.devices.known_devices import CPU, is_in_table
from remat.graph_capture.errors import CaptureError, RewriteError, option
from remat.graph_capture.graph import Links, Resident
from remat.graph_capture.joint.gradients import GradientRelease
from remat.graph_capture.torch_private.core import fake_tensor_log
from remat.graph_capture.tracing.left_out import Outputs
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import LossFunction

# Where torch says that it compiles or exports, transformers writes out causal masks and repeats
# keys, which changes the last bits. So a model is first traced as in eager.

_Flags = tuple[bool, bool]
FLAGS: tuple[_Flags, ...] = (False, False), (True, False), (True, True)
"""What the model's code is told of compiling and of exporting: tried in this order."""


@contextlib.contextmanager
def silenced_logs() -> Generator[None]:
    # Torch logs each op that it cannot trace: we raise that, or try another way.
    before, fake_tensor_log.disabled = fake_tensor_log.disabled, True
    try:
        yield
    finally:
        fake_tensor_log.disabled = before


# What may run in chunks: nothing; what gives eager's bits; also sums in another order. None, where
# a user names none, is ``exact`` for large heads; others stay whole, without a warning.
Split = Literal["none", "exact", "tolerance"]


def require_split(given: object) -> None:
    if given is not None and given not in get_args(Split):  # unknown words count as known, else
        raise CaptureError(
            "give split='none', 'exact' (only with eager's bits) or 'tolerance' (also sums in "
            f"another order): {given!r} is unknown"
        )


JointEdit = Callable[[fx.Graph], None]  # changes which ops a traced step runs


@dataclass(frozen=True)
class Recipe:
    """All that is needed to trace a model again; holds no tensor and no module."""

    name: str
    signature: Signature
    loss_fn: LossFunction | None
    resident: Resident  # bytes that no schedule changes
    autocast: tuple[Any, ...]
    device: str = CPU  # ``cpu`` or ``cuda:0``; or a name of the table, with the CPU's ops
    flags: _Flags | None = None  # of compiling and exporting; None before a first trace
    float_inputs: tuple[tuple[str, float], ...] = ()  # each step reads them anew; by name
    split: Split | None = "none"
    edits: tuple[JointEdit, ...] = ()  # what a plan changes in the joint graph, in order
    gradient_release: GradientRelease | None = None
    functions: frozenset[type[Function]] = frozenset()  # in which torch's own trace fails
    links: Links | None = None  # to memory below the device, where values may leave it
    outputs: Outputs | None = None  # of forward's results, those that training uses; None for all
    left_out: tuple[str, ...] = ()  # the others, once traced

    @property
    def title(self) -> str:
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.name} on {self.signature.title}{without}{self.inputs_text}"

    @property
    def inputs_text(self) -> str:
        """The numbers that each step reads anew, behind a title; "" without any."""
        names = ", ".join(name for name, _ in self.float_inputs)
        return f", with {names} read at each step" if names else ""

    @property
    def is_modelled(self) -> bool:
        """Whether the device is one of the table, whose ops do not run here."""
        return is_in_table(self.device)

    def facts(self) -> dict[str, Any]:
        return {
            "inputs": self.signature.lines(),
            "device": CPU if self.is_modelled else self.device,  # nothing runs on one of the table
            "versions": {"torch": str(torch.__version__)},
            "links": self.links,
            "runs_here": not self.is_modelled,
        }


def autocast_state() -> tuple[Any, ...]:
    """Autocast as it stands: enabled and dtype, by device type."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


_recipes: weakref.WeakKeyDictionary[nn.Module, dict[str, Recipe]] = weakref.WeakKeyDictionary()


def keep_recipe(model: nn.Module, graph_hash: str, recipe: Recipe) -> None:
    _recipes.setdefault(model, {})[graph_hash] = recipe


def recipe_for(model: nn.Module, graph_hash: str) -> Recipe | None:
    """Of a capture of this very model in this process, if there was one."""
    return _recipes.get(model, {}).get(graph_hash)


def keep_links(model: nn.Module, graph_hash: str, links: Links) -> None:
    recipe = _recipes[model][graph_hash]
    _recipes[model][graph_hash] = dataclasses.replace(recipe, links=links)


def check_arguments(args: Any, kwargs: Any, loss_fn: Any = None, target: Any = None) -> None:
    if isinstance(args, Mapping):
        raise CaptureError("give what forward takes by name as kwargs={...}: args is a dict")
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            "give args as a tuple of what forward takes, such as (x,): it is a "
            f"{type(args).__name__}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(
            f"give kwargs as a dict of what forward takes by name: it is a {type(kwargs).__name__}"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(
            "give loss_fn as a function of output and target, such as "
            f"torch.nn.functional.mse_loss: it is a {type(loss_fn).__name__}"
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise CaptureError(f"give {loss_fn.__name__}(): loss_fn is the class {loss_fn.__name__}")
    if loss_fn is None and target is not None:
        raise CaptureError(
            "give loss_fn too, or leave out target and apply the loss to what the module returns"
        )


def require_switches(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):  # a text such as "no" would count as True
            raise RewriteError(f"give True or False: {option(name, value)} is unknown")


def call_error(
    model: nn.Module, args: Any, kwargs: Any, loss_fn: LossFunction | None, target: Any
) -> str:
    """Why forward, or the loss, cannot be called with what is given; empty where it can be."""
    kind = type(model).__name__
    if why := _unbound(model.forward, args, kwargs):
        given = f"forward of {kind} does not take this batch ({len(args)} in args): {why}"
        if "too many positional" not in why:
            return f"{given}. Give what it takes in args, or by name in kwargs"
        if loss_fn is None:
            return (
                f"{given}. Leave the others out; give what the loss takes as target, with loss_fn"
            )
        if target is None:
            return (
                "give the loss's target as target, not in args: args=(x,), target=y, and model(x, "
                f"target=y) at each step. {given[0].upper()}{given[1:]}"
            )
        return f"{given}. Leave the others out"
    if loss_fn is None:
        return ""
    # `__call__` of a module takes anything.
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    why = _unbound(called, (None,) if target is None else (None, None), {})
    if not why:
        return ""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    takes = "only the output, as no target is given" if target is None else "output and target"
    way = "Give target" if target is None else "Give a function of both, or leave out target"
    return f"loss_fn {name} is called with {takes}: {why}. {way}"


def _unbound(called: Callable[..., Any], args: Any, kwargs: Any) -> str:
    with contextlib.suppress(ValueError):  # it has no signature that Python knows
        try:
            inspect.signature(called).bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
    return ""
