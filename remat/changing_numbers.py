"""Numbers that change between steps, as a cache of plans meets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from remat.graph_capture.errors import FloatInputError


class ChangingNumbers:
    """Floats of Python's that have changed between steps: inputs of the plans that come.

    Parameters
    ----------
    is_compiled : whether plans are compiled. Their code has its numbers written into it.
    """

    def __init__(self, *, is_compiled: bool) -> None:
        self._names: set[str] = set()
        self._fixed: set[str] = set()
        self._is_compiled = is_compiled

    def planned(
        self, changed: set[str], make: Callable[[Sequence[str]], fx.GraphModule]
    ) -> fx.GraphModule:
        """A plan that reads the numbers at each step, or as many of them as can be inputs."""
        self._names |= changed - self._fixed
        names = set() if self._is_compiled else set(self._names)
        while names:
            try:
                return make(sorted(names))
            except FloatInputError as error:
                if error.unfit:  # for its value now
                    names -= set(error.unfit)
                    continue
                # Those that came last are at fault, since the others were inputs before.
                self._fixed |= changed & names or names
                names -= self._fixed
                self._names -= self._fixed
        return make(())
