"""Options in the texts of errors: Python's arguments, or flags where the command line asked."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

_FLAGS = {"time_limit_s": "--time-limit", "sharding": "--shard"}
"""Where a flag is not the name of the argument with dashes."""
_command_lines: list[str] = []
"""One for each command that runs in this process: of the process, as solves run in threads."""


@contextlib.contextmanager
def named_as_flags() -> Generator[None]:
    """Have errors name flags meanwhile, as a command line was given."""
    _command_lines.append("")
    try:
        yield
    finally:
        _command_lines.pop()


def option(name: str, value: object = None) -> str:
    """``budget='8GiB'`` for Python, and ``--budget 8GiB`` for the command line.

    Parameters
    ----------
    name : of Python's argument. value : None where it is up to the user; True for what is only on.
    """
    if not _command_lines:
        return f"{name}=" if value is None else f"{name}={value!r}"
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if value is None or value is True:
        return flag
    shown = f"'{value}'" if set(str(value)) & set("* ?<>") else str(value)
    return f"{flag} {shown}"
