"""A net under the guards: now and then the user's own forward runs beside the planned one.

At a few steps eager's forward and loss run on the same batch and state, and must give the plan's
bits. Eager comes first, so nothing of the planned step is in memory yet. Gradients are recorded,
since torch takes other kernels without them; what autograd would save is dropped at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn

from remat.formats import bytes_text
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.memory import is_out_of_memory
from remat.graph_capture.distributed.collectives import any_rank, collectives_in
from remat.graph_capture.eager_step import baseline_graph
from remat.graph_capture.errors import AuditError, NotComparedError
from remat.graph_capture.graph import Links, TrainingGraph
from remat.graph_capture.joint.nodes import is_custom, target_name
from remat.graph_capture.python_state.reachable_objects import is_users_module
from remat.graph_capture.torch_private.core import current_graph_task_id, dispatch_mode_stack
from remat.rewriter.checking.comparison import (
    DeterministicReductions,
    EagerVariation,
    Outcome,
    adds_nondeterministically,
    differing_beyond,
    differing_names,
    moved_by_rounding,
    tolerance_of,
)
from remat.rewriter.checking.outcomes import BeforeForward, ForwardOutcomes, device_of_model
from remat.rewriter.compiled import CompiledStep
from remat.rewriter.guards.forward import Guards
from remat.schedules.derived import graph_of_schedule, unchunked
from remat.schedules.kept_in_forward import end_of_forward, forward_alone
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate

_SMALL_BYTES = 16 * 1024  # smaller is not looked at: roundings and random states would decide


def why_no_room(
    graph: TrainingGraph, schedule: Schedule, links: Links | None, kept_bytes: int, *,
    is_block: bool, results_bytes: int = 0,
) -> str:  # fmt: skip
    """Why forward alone, beside what is kept and given, would raise a step's peak; else empty."""
    need_bytes = simulate(*forward_alone(baseline_graph(unchunked(graph)))).peak_bytes + kept_bytes
    planned = simulate(graph, schedule, links)
    most_bytes = max(planned.peak_bytes, schedule.budget_bytes)
    if planned.peak_bytes + results_bytes > most_bytes + _SMALL_BYTES:
        return f"its results take {bytes_text(results_bytes)} on top of the planned step"
    if is_block:  # others' memory lies beside it: only forward's own peak surely fits
        end = end_of_forward(graph_of_schedule(graph, schedule), schedule)
        most_bytes = max(planned.live_bytes[:end], default=0)
    if need_bytes <= most_bytes + _SMALL_BYTES:
        return ""
    need, most = bytes_text(need_bytes), bytes_text(most_bytes)
    return f"the model's own forward takes {need}, and there is room for {most}"


_FOR_OTHERS = "concurrent.futures"  # its threads run what they are given


def others_may_draw() -> bool:
    """Whether a thread of the user's is alive; those that libraries have do not draw."""
    here = threading.current_thread()
    return any(_is_users(one) for one in threading.enumerate() if one is not here)


def _is_users(thread: threading.Thread) -> bool:
    run: Any = getattr(thread, "_target", None) or type(thread).run
    module = getattr(run, "__module__", None) or ""
    if module.startswith(_FOR_OTHERS):
        return not _is_idle(thread, run)
    return is_users_module(module)


def _is_idle(thread: threading.Thread, run: Any) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_code is not getattr(run, "__code__", None):  # within what it runs
        return False
    # Only a running thread could give it work. Pools outlive their use: torch's compiler has some.
    queue = frame.f_locals.get("work_queue")
    return queue is not None and queue.empty()


Audits = Literal["none", "first", "step", "block"]
"""What is compared; "block" are forwards of a part of a model, which others run around."""


def of_steps(audit: bool) -> Audits:
    return "step" if audit else "none"


_EVERY = 1000  # beside the steps 2, 4, 8 and so on, every so many steps are audited
MOST_EAGER = 8  # runs of eager, before the plan's bits are called others
_pauses: list[None] = []  # one for each `audits_paused` that is under way
_LOG = logging.getLogger("remat")


@dataclass
class _Seen:
    """What eager's forward gave and wrote, and how far it repeats that; begins at `before`."""

    expected: EagerVariation
    leaves: list[Any]
    before: BeforeForward
    moved: dict[str, float] | None = None  # how far rounding alone moves each result


def is_audited(step: int) -> bool:
    return step > 1 and (step & (step - 1) == 0 or step % _EVERY == 0)


@contextlib.contextmanager
def audits_paused() -> Generator[None]:
    """No step counts, and none is compared: plans run for a check meanwhile."""
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()


class Audit:
    """Compares steps of one plan with the model's own forward: the 2nd, 4th, 8th and so on."""

    def __init__(
        self, guards: Guards, step: CompiledStep, schedule: Schedule, costed: TrainingGraph | None,
        *, audits: Audits = "step",
    ) -> None:  # fmt: skip
        self._guards, self._step, self._audits = guards, step, audits
        self._schedule, self._costed = schedule, costed
        self._outcomes = ForwardOutcomes(guards, step)
        self.steps = self.audited = 0
        self.is_agreed = False  # all ranks with which forward exchanges something audit alike
        self._is_due, self._is_doubted = audits == "first", False
        self._gave_up, self._why_later, self._thread = "", "", threading.get_ident()

    def __repr__(self) -> str:
        done = f"{self.audited} of {self.steps} steps of {self._guards.kind} were compared"
        return f"Audit({done}; none can be: {self.why_not})" if self.why_not else f"Audit({done})"

    @property
    def why_not(self) -> str:
        """Why steps are not compared, or the next one later; empty where they are."""
        return self._gave_up or self._why_never or self._why_later

    def judge_room_by(self, schedule: Schedule, costed: TrainingGraph) -> None:
        """Of a plan for a range, which is compiled at one size: have the largest sizes tell whether
        there is room."""
        self._schedule, self._costed = schedule, costed

    def compare_next(self) -> None:
        self._is_due = True

    def begin(self, module: nn.Module, leaves: list[Any]) -> _Seen | None:
        """Run eager's forward on a batch if this step is to be compared; else None."""
        if _pauses:
            return None
        self.steps += 1
        self._is_due |= self._is_doubted or (self._audits != "first" and is_audited(self.steps))
        if not self._is_due or self._gave_up or self._why_never:
            return None
        self._why_later = "" if self._collectives else self._what_hinders()  # all ranks do alike
        if self._why_later:
            return None
        self._is_due = False
        try:
            with self._in_one_order():
                return self._seen(module, leaves)
        except NotComparedError as error:
            self._give_up(str(error))
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            self._give_up("memory ran out")
        return None

    def running(self, seen: _Seen | None) -> contextlib.AbstractContextManager[Any]:
        return self._in_one_order() if seen else contextlib.nullcontext()

    def differing(self, module: nn.Module, seen: _Seen, output: Any) -> tuple[str, ...]:
        """Names of what the planned forward, which has returned `output`, gave otherwise."""
        self.audited += 1
        found = self._outcomes.left(seen.before, seen.leaves, output, self._keeps_values(module))
        expected, allowed = seen.expected.expected, tolerance_of(module)
        if allowed:
            names = differing_beyond(expected, found, allowed, seen.moved)[0]
        else:
            names = differing_names(seen.expected, found)
        names = (*names, *(name for name in found if name not in expected))
        if self._collectives:
            is_any = any_rank(self._collectives, bool(names), self._device)  # all raise, or none
            names = names or ("result on another rank",) * is_any
        was_doubted, self._is_doubted = self._is_doubted, bool(names)
        # A first difference may be eager's own noise: the next step then tells.
        return names if was_doubted or not self._keeps_values(module) else ()

    def error(self, names: Sequence[str]) -> AuditError:
        recipe, more = self._guards.recipe, f" and {len(names) - 1} more" * (len(names) > 1)
        compiled = ". Or eager runs other ops, as the plan was traced as if compiled"
        return AuditError(
            f"call remat.rematerialize again, to plan {self._guards.kind} as it is now; a cache "
            "of plans has dropped this plan, and makes another at its next call\n"
            f"Its own forward gives another {names[0]}{more} than the plan: something that it "
            "reads has changed since then, and no guard watches it"
            f"{compiled if any(recipe.flags or ()) else ''}\n"
            f"This was step {self.steps} of the plan for {'; '.join(recipe.signature.lines())}"
        )

    def _seen(self, module: nn.Module, leaves: list[Any]) -> _Seen:
        values = self._keeps_values(module)

        def run() -> Outcome:
            return self._outcomes.of_eager(before, leaves, values)

        before = self._outcomes.before(leaves)
        seen = _Seen(EagerVariation(run()), leaves, before)
        if self._is_doubted and tolerance_of(module):  # the last difference may be noise
            seen.moved = moved_by_rounding(run, seen.expected.expected)
        elif self._is_doubted:
            for _ in range(1, MOST_EAGER):
                seen.expected.add(run())
        before.forget()
        return seen

    def _keeps_values(self, module: nn.Module) -> bool:
        # Where results may differ by a little, their bits are not enough to tell.
        return self._device != CPU or tolerance_of(module) > 0

    @functools.cached_property
    def _device(self) -> str:
        return device_of_model(self._guards.step)

    @functools.cached_property
    def _collectives(self) -> list[fx.Node]:
        return collectives_in(self._step.forward)

    def _in_one_order(self) -> contextlib.AbstractContextManager[Any]:
        has_no_order = self._device == CPU and adds_nondeterministically(self._step.forward)
        return DeterministicReductions() if has_no_order else contextlib.nullcontext()

    def _give_up(self, why: str) -> None:
        self._gave_up = why
        _LOG.info("steps of %s are not audited: %s", self._guards.kind, why)

    @functools.cached_property
    def _why_never(self) -> str:
        if why := self._why_unfit():
            _LOG.info("steps of %s are not audited: %s", self._guards.kind, why)
        return why

    def _why_unfit(self) -> str:
        custom = next((n for n in self._step.forward.graph.nodes if is_custom(n)), None)
        if custom is not None:
            return f"its forward runs {target_name(custom)}, which may count how often it runs"
        if self._collectives and not self.is_agreed:
            return "its forward has collectives, and ranks have not agreed on which steps"
        graph = self._step.graph
        made_for = self._schedule.graph_hash, self._schedule.captured_hash
        if self._costed is not None and self._costed.hash in made_for:  # not one of a whole rank
            graph = self._costed
        rounds_otherwise = self._step.by_inductor or not self._schedule.is_exact
        return why_no_room(
            graph, self._schedule, graph.links or self._step.links, self._outcomes.kept_bytes,
            is_block=self._audits == "block",
            results_bytes=self._outcomes.results_bytes * rounds_otherwise,
        )  # fmt: skip

    def _what_hinders(self) -> str:
        before, self._thread = self._thread, threading.get_ident()
        if before != self._thread:
            return "several threads run it"
        if current_graph_task_id() != -1:
            return "it runs within a backward"
        if dispatch_mode_stack():
            return "one of your dispatch modes would see its ops"
        draws = any(value.kind == "rng_state" for value in self._step.graph.values)
        if draws and others_may_draw():
            return "another thread may draw from the random stream that is restored"
        return ""
