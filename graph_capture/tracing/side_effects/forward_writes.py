"""What forward writes while it is traced: each run begins alike, and what it wrote is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.python_state.hidden import Hidden, Stream
from remat.graph_capture.python_state.memos import Memo, added_to_library
from remat.graph_capture.python_state.module_hooks import (
    BACKWARD_HOOKS,
    are_alike,
    holds_traced,
    hooked_modules,
    place_of_hooks,
)
from remat.graph_capture.python_state.places import MISSING, PLAIN, Entry, is_same
from remat.graph_capture.python_state.watch import Change, PythonState
from remat.graph_capture.python_state.writers import Writer, other_threads
from remat.graph_capture.refuse import hook_tables, registered_hook
from remat.graph_capture.tracing.side_effects.carried import Carried, Settled, short, storages_in
from remat.graph_capture.tracing.untouched import ModuleAttributes, Written

_HELD_BY_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
"""AOTAutograd has its own tensors in the place of these while forward runs."""


class ForwardWrites:
    """Follows the runs of forward in one trace: each begins alike, and what it wrote is kept.

    Attributes
    ----------
    carried, settled : what the last run has set. memos : what it has added to dictionaries of
        libraries. No step adds it.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, state: PythonState
    ) -> None:
        self._kind, self._state = type(model).__name__, state
        self._attributes = ModuleAttributes(model, but=_HELD_BY_TORCH)
        self._hooked = list(hooked_modules(model, loss_fn))
        self._hooks = [place_of_hooks(path, module) for path, module in self._hooked]
        self.carried: list[Carried] = []
        self.settled: list[Settled] = []
        self.memos: list[Memo] = []
        self._in_forward: set[str] = set()

    def begin(self) -> None:
        """Put back what an earlier run changed."""
        self._attributes.restore()
        self._state.restore()
        for place in self._hooks:
            place.put(place.value)

    def end(self) -> list[Tensor]:
        """The tensors that forward has set on attributes of modules.

        Raises
        ------
        CaptureError : it has changed something that no step could set again.
        """
        tensors: list[Tensor] = []
        earlier = self._plain_values()
        self.carried, self.settled, self.memos = [], [], []
        for written in self._attributes.written():
            leaves, spec = pytree.tree_flatten(written.value)
            is_read = self._state.reads(vars(written.module), written.name)
            if is_read and _is_first_value(written.before, written.value):
                self.settled.append(Settled(written.place, written.value))
                continue
            if not _can_be_set(leaves, is_read=is_read):
                raise self._refused(written)
            own = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            kept = [(isinstance(x, Tensor), None if isinstance(x, Tensor) else x) for x in leaves]
            before = storages_in(pytree.tree_leaves(written.held))
            self.carried.append(
                Carried(written.path, written.name, spec, tuple(kept), len(own), is_read, before)
            )
            tensors += own
        self._note_hooks()
        self._require_nothing_else()
        self._require_as_in(earlier)
        return tensors

    def _plain_values(self) -> dict[str, Any]:
        """What is not a tensor of all that the last run has set, by what it is."""
        values = {one.place.text: one.value for one in self.settled}
        for one in self.carried:
            items = enumerate(leaf for is_tensor, leaf in one.leaves if not is_tensor)
            values |= {f"item {i} of {one.text}" if i else one.text: leaf for i, leaf in items}
        return {text: value for text, value in values.items() if isinstance(value, PLAIN)}

    def _require_as_in(self, earlier: dict[str, Any]) -> None:
        """Refuse what is another value in each run of the same forward, as a clock's."""
        now = self._plain_values()
        for text in earlier.keys() & now.keys():
            if not is_same(now[text], earlier[text]):
                raise CaptureError(
                    f"forward of {self._kind} sets {text} to {short(now[text])}, and to "
                    f"{short(earlier[text])} when it is run again on the same batch: a step that "
                    "follows a plan would set one value each time. Set it outside forward"
                )

    def _note_hooks(self) -> None:
        """Hooks that forward itself has set on submodules, as a library may at its first call."""
        if registered := registered_hook(hook_tables(self._hooked, BACKWARD_HOOKS)):
            raise CaptureError(f"forward of {self._kind} sets a {registered}")
        for place in self._hooks:
            now = place.now()
            if are_alike(now, place.value):
                continue
            if any(holds_traced(hook.function) for hook in now):
                raise CaptureError(
                    f"forward of {self._kind} sets a {place.text} that keeps a tensor of its "
                    "batch: the next call would read it. Keep it on an attribute instead"
                )
            self.settled.append(Settled(place, now))

    def require_that_backward_writes_nothing(self) -> None:
        """Refuse a hook that forward has set on a tensor, and that changes something in backward.

        It runs while the step is traced, and never again.
        """
        texts = {carried.text for carried in self.carried}
        texts |= {settled.place.text for settled in self.settled}
        late = [one.text for one in self._attributes.written() if one.text not in texts]
        late += [
            one.text
            for one in self._state.changes()
            if one.text not in self._in_forward
            and self._state.writer(one.place, in_backward=True) is Writer.FORWARD
        ]
        if late:
            raise CaptureError(
                f"backward of {self._kind} changes {late[0]}, as by a hook that forward sets on a "
                "tensor: a step that follows a plan would not call it. Set the hook on a parameter "
                "outside forward, or return the tensor and set the hook on the result"
            )

    def _require_nothing_else(self) -> None:
        texts = [carried.text for carried in self.carried]
        texts += [settled.place.text for settled in self.settled]
        changes = self._state.changes()
        self._in_forward = {change.text for change in changes}
        for change in changes:
            if any(text in change.text for text in texts):
                continue
            if isinstance(change.place, (Hidden, Stream)):
                raise CaptureError(_taken_text(self._kind, change.text))
            if self._state.writer(change.place) is Writer.THREAD:
                raise CaptureError(_beside_text(self._kind, change))
            if _is_first_value(change.before, change.now) or _is_mode(change.place):
                self.settled.append(Settled(change.place, change.now))
            elif memo := added_to_library(change):
                self.memos.append(memo)
            else:
                raise self._changed(change)

    def _changed(self, change: Change) -> CaptureError:
        return CaptureError(
            f"forward of {self._kind} changes {change.text}: it was {short(change.before)} and is "
            f"{short(change.now)} after it, and a step that follows a plan would not change it. Do "
            "that outside forward, before each step; or, if only the first call does it, call the "
            "model once on a batch first; or leave the module that does it to eager, and plan the "
            "others, each by remat.rematerialize"
            f"{'; or remove the hook that does it' * any(p.value for p in self._hooks)}"
        )

    def _refused(self, written: Written) -> CaptureError:
        line = self._state.stores.get(written.name)
        return CaptureError(
            f"forward of {self._kind} sets attribute {written.text} to {short(written.value)}"
            f"{f' ({line})' if line else ''}, and a step that follows a plan would not. Keep a "
            "tensor there, which each step sets, or register a buffer, or set it outside forward"
        )


def _beside_text(kind: str, change: Change) -> str:
    return (
        f"another thread ({other_threads()}) changes {change.text}, which forward of {kind} may "
        f"read: it was {short(change.before)} and is {short(change.now)} after it. A plan holds "
        "for one value: end that thread before you plan and train, or read the value outside "
        "forward"
    )


def _taken_text(kind: str, text: str) -> str:
    return (
        f"forward of {kind} takes the next item or number of {text}, or sets it, and a step that "
        "follows a plan would have the same one each time. Take it outside forward and pass it in "
        "as a tensor, or draw with torch"
    )


def _is_first_value(before: Any, now: Any) -> bool:
    """Whether a place was empty and has a plain value now, as a flag that is set once has."""
    is_plain = isinstance(now, PLAIN) and now is not None
    return is_plain and (before is MISSING or before is None or before is False)


def _is_mode(place: object) -> bool:
    """Whether it is the mode of a module beside the model, such as a teacher of the loss."""
    return isinstance(place, Entry) and place.key == "training" and "_modules" in place.space


def _can_be_set(leaves: list[Any], *, is_read: bool) -> bool:
    """Whether each step can set such a tree: tensors, or constants that forward never reads."""
    tensors = [isinstance(leaf, Tensor) for leaf in leaves]
    known = all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves)
    return known and (any(tensors) or not is_read)
