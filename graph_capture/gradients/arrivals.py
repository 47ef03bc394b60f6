"""In which order eager's gradients arrive: autograd's engine decides it, and a trace runs that."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor


class Arrivals:
    """Notes the gradients of parameters as a backward makes them.

    Attributes
    ----------
    places : of the parameters among those that were watched last, as their gradients came.
    """

    def __init__(self) -> None:
        self.places: list[int] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Note the backward of these from now on."""
        self.places.clear()
        for place, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_hook(partial(self._note, place))

    def _note(self, place: int, gradient: Tensor) -> None:
        self.places.append(place)
