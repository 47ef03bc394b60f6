"""Published systems as fixed settings of the same step, to compare a plan with.

Each decides by rule what the search decides by trial. All compute a layer's inside again in
backward, as they advise (gradient checkpointing a layer), and give the same bits. ZeRO-Offload's
delayed update is none of them: it steps with the gradients of the step before, which is another
training run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.links import Tier
from remat.graph_capture.optimizer_step.microbatch import Microbatch
from remat.solver.whole_step.setting import Pass, Setting

Rule = Callable[[Microbatch, int], Setting]


@dataclass(frozen=True)
class NamedSystem:
    """A system and what it would do.

    Attributes
    ----------
    title : its name. source : the paper. setting : from the layers and the number of microbatches.
    """

    title: str
    source: str
    setting: Rule


def full_recompute(microbatch: Microbatch) -> tuple[int, ...]:
    """The option of each layer that saves the least, the fastest of these."""
    return tuple(
        min(range(len(layer.options)), key=lambda i: (layer.options[i].saved_bytes, i))
        for layer in microbatch.layers
    )


def _zero_offload(microbatch: Microbatch, count: int) -> Setting:
    """Parameters stay; gradients go down as they are made and are added there."""
    passes = (Pass(1, full_recompute(microbatch)),) * count
    return Setting(passes, _on_host(microbatch), sums="host", keeping="stay")


def _zero_infinity(microbatch: Microbatch, count: int) -> Setting:
    """As ZeRO-Offload, with parameters brought for each layer, ahead of its use."""
    passes = (Pass(1, full_recompute(microbatch)),) * count
    return Setting(passes, _on_host(microbatch), sums="host", keeping="stream")


def _l2l(microbatch: Microbatch, count: int) -> Setting:
    """All microbatches through a layer before the next: its parameters come once a way."""
    passes = (Pass(count, full_recompute(microbatch)),)
    return Setting(passes, _on_host(microbatch), keeping="stream")


def _patrick_star(microbatch: Microbatch, count: int) -> Setting:
    """What a warm-up step saw used again soonest stays on the device."""
    passes = (Pass(1, full_recompute(microbatch)),) * count
    return Setting(passes, _on_host(microbatch), sums="host", keeping="near")


def _stronghold(microbatch: Microbatch, count: int) -> Setting:
    """At most a few layers on the device at once, in a window that moves."""
    passes = (Pass(1, full_recompute(microbatch)),) * count
    return Setting(passes, _on_host(microbatch), sums="host", keeping="stream", window=2)


def _on_host(microbatch: Microbatch) -> tuple[Tier, ...]:
    return ("host",) * len(microbatch.groups)


NAMED_SYSTEMS = {
    "zero-offload": NamedSystem(
        "ZeRO-Offload", "Ren et al. 2021, https://arxiv.org/abs/2101.06840", _zero_offload
    ),
    "l2l": NamedSystem("L2L", "Pudipeddi et al. 2020, https://arxiv.org/abs/2002.05645", _l2l),
    "zero-infinity": NamedSystem(
        "ZeRO-Infinity", "Rajbhandari et al. 2021, https://arxiv.org/abs/2104.07857", _zero_infinity
    ),
    "patrickstar": NamedSystem(
        "PatrickStar", "Fang et al. 2021, https://arxiv.org/abs/2108.05818", _patrick_star
    ),
    "stronghold": NamedSystem(
        "STRONGHOLD", "Sun et al. 2022, https://doi.org/10.1109/SC41404.2022.00076", _stronghold
    ),
}
"""By name. Elixir's choice of what stays is PatrickStar's here, and Mobius spreads a step over
several devices, which a graph of one has not."""
DELAYED = "zero-offload-delayed"


def named_system(name: str) -> NamedSystem:
    """The system of that name.

    Raises
    ------
    SolverError : there is none, or it trains another run than eager does.
    """
    if name == DELAYED:
        raise SolverError(
            "a delayed update steps with the gradients of the step before, so it trains another "
            "run than eager's, and is not planned: zero-offload updates without delay"
        )
    if name not in NAMED_SYSTEMS:
        raise SolverError(f"there is no system {name!r}: choose one of {', '.join(NAMED_SYSTEMS)}")
    return NAMED_SYSTEMS[name]
