"""Parameters and optimizer states of a step: each at its home between steps.

While some are below the device, the model and the optimizer have hooks that bring all of them back
before anything of the user's reads them: ``state_dict``, ``load_state_dict`` and the model's own
forward. The next step sends them down again.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from remat.graph_capture.errors import RewriteError, TierError
from remat.graph_capture.links import Tier
from remat.rewriter.whole_step.held import Folders, Held
from remat.rewriter.whole_step.uninterrupted import uninterrupted

COUNT = "step"
"""The key of an optimizer's state under which it counts steps: a number, which stays in memory."""


def moments(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """The tensors that an optimizer keeps of a parameter, beside the count of steps."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return [one for key, one in state.items() if key != COUNT and isinstance(one, Tensor)]


@dataclass
class Residents:
    """All that has a home, by its name in the graph of the step.

    Parameters
    ----------
    parameters : by name, with the path that the user knows. homes : of parameters and of states
        (``O:`` and the parameter's name), the tier between steps.
    """

    optimizer: Optimizer
    parameters: dict[str, tuple[str, nn.Parameter]]
    homes: Mapping[str, Tier]
    folders: Folders
    held: dict[str, Held] = field(default_factory=dict[str, Held])

    def __post_init__(self) -> None:
        for name, (path, parameter) in self.parameters.items():
            self.held[name] = Held(path, [parameter], self.folders)
            if f"O:{name}" in self.homes:
                kept = moments(self.optimizer, parameter)
                self.held[f"O:{name}"] = Held(f"the state of {path}", kept, self.folders)

    @property
    def are_all_here(self) -> bool:
        """Whether everything is in memory."""
        return all(one.is_in_memory for one in self.held.values())

    def attach(self) -> None:
        """Give the user's tensors their storages back, and take over what the user has replaced."""
        with uninterrupted():
            self._attach()

    def _attach(self) -> None:
        for name, one in self.held.items():
            if name.startswith("O:"):
                now = moments(self.optimizer, self.parameters[name[2:]][1])
                if [id(t) for t in now] != [id(t) for t in one.tensors]:
                    one.is_in_memory = True
                    one.adopt(now)
            elif one.was_replaced:
                tensors, one.tensors, one.is_in_memory = one.tensors, [], True
                one.adopt(tensors)
            one.attach()

    def send_down(self) -> None:
        """Send each to its home; nothing moves where all are there."""
        for name, tier in self.homes.items():
            one = self.held[name]
            if tier == "device" or not one.is_in_memory or not one.tensors:
                continue
            one.written()
            one.offload("host")
            if tier == "nvme":
                one.offload("nvme")
            one.leave()
            if tier == "nvme":
                one.forget_below("host")

    def rest(self) -> None:
        """Leave the user's tensors of what is below empty until the next step."""
        with uninterrupted():
            for one in self.held.values():
                one.rest()

    def bring_back(self) -> None:
        """Bring all into memory, and into the user's tensors; may be called again if it fails.

        Raises
        ------
        TierError : a file cannot be read. All others are back, and what is in that file is empty.
        """
        failed = list[tuple[str, TierError]]()
        with uninterrupted():
            for one in self.held.values():
                try:
                    one.restore()
                except TierError as error:
                    one.rest()
                    failed.append((one.name, error))
        if failed:
            names = ", ".join(name for name, _ in failed)
            raise TierError(
                f"{names} could not be brought back from below the device, and stay empty: call "
                "bring_back() again, or load them from a checkpoint"
            ) from failed[0][1]

    def close(self) -> None:
        """Let go of all files, once all is back."""
        for one in self.held.values():
            one.close()


class Watch:
    """The hooks of one model and its optimizer, while something is below.

    They hold `residents` and not the step, so what is below comes back even after the step itself
    is gone.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, residents: Residents) -> None:
        self.residents = residents
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Hear of reads from now on."""
        model, optimizer = self._model(), self._optimizer()
        if self._handles or model is None or optimizer is None:
            return
        hear = _BringBack(self.residents)
        self._handles += [
            model.register_state_dict_pre_hook(hear),
            model.register_load_state_dict_pre_hook(hear),
            model.register_forward_pre_hook(hear),
            optimizer.register_state_dict_pre_hook(hear),
            optimizer.register_load_state_dict_pre_hook(hear),
        ]

    def end(self) -> None:
        """Hear of none any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _BringBack:
    """The hook. A copy of a model has one that does nothing, as its tensors are its own."""

    def __init__(self, residents: Residents | None = None) -> None:
        self.residents = residents

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.residents is not None:
            self.residents.bring_back()

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies of tensors that are empty, which would be empty for good."""
        if self.residents is not None and not self.residents.are_all_here:
            raise RewriteError(
                "a model whose parameters are below the device is copied or pickled: call "
                "bring_back() of its step first, or save its state_dict()"
            )
        return _BringBack, ()
