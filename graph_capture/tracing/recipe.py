"""What a model is traced with, kept so that it can be traced again.

A trace can be compiled once, since AOTAutograd spends its metadata. So what is kept between capture
and rewriting is a `Recipe`, and rewriting traces again.

A recipe remembers the device, and rewriting traces the ops that run here. If these are not those of
the plan, the plan is refused. So a plan with attention dropout that was made for a GPU of the table
cannot be trained with on a CPU by mistake.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from remat.graph_capture.devices.device_table import CPU, is_in_table
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.gradients.hand_over import HandOver
from remat.graph_capture.graph import Resident
from remat.graph_capture.links import Links
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import LossFunction
from remat.graph_capture.tracing.trace_flags import Flags

Split = Literal["none", "exact", "tolerance"]
"""What may run in pieces: nothing; what gives eager's bits; also sums in another order.

Where a user names none, it is None: ``exact``, for heads that take a large part of a step's memory,
without a word of what stays whole.
"""


def require_split(given: object) -> None:
    """Raise `CaptureError` for what is no `Split`, which would be taken for one that is."""
    if given is not None and given not in get_args(Split):
        raise CaptureError(
            f"split={given!r} is unknown: give 'none', 'exact' (only what gives eager's bits) or "
            "'tolerance' (also sums in another order)"
        )


@dataclass(frozen=True)
class Recipe:
    """All that is needed to trace a model again; holds no tensor and no module.

    Attributes
    ----------
    name : the model's class. signature : of the batch. loss_fn : part of the step, or None.
    resident : bytes that no schedule changes. autocast : as of `autocast_state`.
    device : ``cpu`` or ``cuda:0``, whose own ops are traced; or a name of the table, for which the
        CPU's are.
    flags : what the model's code is told of compiling and exporting; None before a first trace.
    float_inputs : names of numbers that each step reads anew, with their values in the trace.
    split : what may run in pieces. pieces : of a plan: how many, and whether exactly, by region.
    hand_over : how gradients are handed over as they are made, if they are.
    links : the ways to memory below the device, if values may leave it.
    """

    name: str
    signature: Signature
    loss_fn: LossFunction | None
    resident: Resident
    autocast: tuple[Any, ...]
    device: str = CPU
    flags: Flags | None = None
    float_inputs: tuple[tuple[str, float], ...] = ()
    split: Split | None = "none"
    pieces: tuple[tuple[str, int, bool], ...] = ()
    hand_over: HandOver | None = None
    links: Links | None = None

    @property
    def title(self) -> str:
        """The model and its batch, for one line that tells a person."""
        return f"{self.name} on {self.signature.title}"

    @property
    def is_modelled(self) -> bool:
        """Whether the device is one of the table, whose ops do not run here."""
        return is_in_table(self.device)

    def facts(self) -> dict[str, Any]:
        """What goes into every graph built from this recipe."""
        return {
            "inputs": self.signature.lines(),
            "device": CPU if self.is_modelled else self.device,
            "versions": {"torch": str(torch.__version__)},
            "links": self.links,
        }


def autocast_state() -> tuple[Any, ...]:
    """Autocast as it stands: enabled and dtype, by device type."""
    kinds = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    )


_recipes: weakref.WeakKeyDictionary[nn.Module, dict[str, Recipe]] = weakref.WeakKeyDictionary()


def keep_recipe(model: nn.Module, graph_hash: str, recipe: Recipe) -> None:
    """Keep the recipe of a capture for `recipe_for`, as long as `model` lives."""
    _recipes.setdefault(model, {})[graph_hash] = recipe


def recipe_for(model: nn.Module, graph_hash: str) -> Recipe | None:
    """The recipe of a capture of this very model in this process, if there was one."""
    return _recipes.get(model, {}).get(graph_hash)


def keep_links(model: nn.Module, graph_hash: str, links: Links) -> None:
    """Note the links that a captured step was priced with, so that rewriting finds them."""
    recipe = _recipes[model][graph_hash]
    _recipes[model][graph_hash] = dataclasses.replace(recipe, links=links)
