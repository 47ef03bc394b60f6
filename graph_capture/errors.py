"""Errors that a user can meet. Each says what was found, where, and what to do.

Their texts name options as the user gives them: Python's arguments, or flags where the command line
asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Self


class RematError(Exception):
    """Base of all errors that remat raises on purpose.

    Attributes
    ----------
    cause : where a trace failed, the error that ended it, with the frames of torch and of the
        model. A traceback leaves them out, as they are some hundred lines.
    """

    cause: Exception | None = None

    def caused_by(self, error: Exception) -> Self:
        """The same error, which keeps `error` as its cause and says so below its traceback."""
        self.cause = error.cause or error if isinstance(error, RematError) else error
        self.add_note("See this error's `cause` for the frames of torch and of the model.")
        return self


class GraphError(RematError):
    """The training graph is not well formed, or its file cannot be read."""


class CaptureError(RematError):
    """The model cannot be captured exactly as one static training graph.

    Attributes
    ----------
    read : names of the arguments at whose values code looked, where nothing else had a part.
    """

    read: tuple[str, ...] = ()


class FloatInputError(CaptureError):
    """A number of Python's cannot be an input of the step: each of its values needs a plan.

    Attributes
    ----------
    unfit : names of those that another value would make fit, as a dropout rate that is 0 now.
    """

    unfit: tuple[str, ...] = ()


class LeftOutError(CaptureError, AttributeError):
    """A result was read that the planned step leaves out, as ``outputs`` does not name it."""


class DeviceError(CaptureError):
    """The device is unknown, or is not one that can be planned for here."""


class ProfileError(RematError):
    """The profile cannot be read, or is not of the device or the ops it is wanted for."""


class FactoryError(CaptureError):
    """The file or factory that should build the model is missing or fails."""


class PlanError(RematError):
    """The plan cannot be read, kept or followed: it is broken, or made for something else."""


class ScheduleError(PlanError):
    """The schedule breaks a rule of the graph, or belongs to another graph."""


class LayoutError(PlanError):
    """Buffers or a layout of them break a rule, or the layout is of other buffers."""


class TierError(PlanError):
    """A value cannot be copied to memory below the device, or back."""


class ArenaError(PlanError):
    """The allocator of arenas cannot be built here, or a step has no arena."""


class BudgetError(RematError):
    """The budget cannot be read, or means nothing on this device."""


class TooLargeError(BudgetError):
    """At the largest sizes of a range nothing fits the budget.

    Attributes
    ----------
    largest : by symbol, the largest sizes for which a schedule was found; empty if none was.
    budget_bytes : within which.
    """

    def __init__(self, message: str, largest: Mapping[str, int], budget_bytes: int) -> None:
        super().__init__(message)
        self.largest, self.budget_bytes = dict(largest), budget_bytes


class SolverError(RematError):
    """The solver is unknown or was given options it cannot take."""


class RewriteError(PlanError):
    """The schedule cannot be turned into a module, or the module is misused."""


class CheckError(RewriteError):
    """A check found that a rewritten module gives other results than eager."""


class NotComparedError(RewriteError):
    """The unmodified step cannot be run within a plan's budget, to be compared with the plan."""


class StateChangedError(RewriteError):
    """The model, its loss or a setting is not as it was at capture; another plan would fit it.

    Attributes
    ----------
    numbers : names of what has changed, where all of it is floats. Empty elsewhere.
    """

    numbers: tuple[str, ...] = ()


class AuditError(RewriteError):
    """A step of a plan gave another result than the model's own forward gives now."""


class SignatureError(RewriteError):
    """A rewritten module is called with another batch than it was planned for."""


class RandomStreamError(RewriteError):
    """An op cannot draw again what it drew: another thread drew from the same stream meanwhile."""


class FileError(RematError, OSError):
    """A file cannot be read, or cannot be written where it is asked for."""


class TextError(RematError):
    """A text is not JSON, or is nested too deeply."""


class ShapeError(TextError):
    """A text is JSON, but not of the fields that are wanted."""


class ArchiveError(RematError):
    """An archive is not what `torch.export` writes, or not what it says."""


class GlobError(RematError):
    """A glob matches nothing of what it is to choose from."""


class AgreementError(RematError):
    """Ranks that are to follow one plan do not have the same step."""


_FLAGS = {"time_limit_s": "--time-limit"}  # where a flag is not the argument with dashes
_command_lines: list[str] = []  # of the process, not the thread: solves run in threads


@contextlib.contextmanager
def named_as_flags() -> Generator[None]:
    """Have errors name flags meanwhile, as a command line was given."""
    _command_lines.append("")
    try:
        yield
    finally:
        _command_lines.pop()


def for_caller(python: str, command_line: str) -> str:
    """Whichever of two texts the caller can type: in Python, or on the command line."""
    return command_line if _command_lines else python


def option(name: str, value: object = None) -> str:
    """``budget='8GiB'`` for Python, and ``--budget 8GiB`` for the command line. `value` is None
    where it is up to the user, and True for a flag that takes none."""
    if not _command_lines:
        return f"{name}=" if value is None else f"{name}={value!r}"
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if value is None or value is True:
        return flag
    # Quoted where a shell would take it apart.
    shown = f"'{value}'" if set(str(value)) & set("* ?<>") else str(value)
    return f"{flag} {shown}"
