"""Globs over module paths: what they match, and what is shown where they match nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from remat.graph_capture.graph import CUSTOM, Op
from remat.schedules.schedule import Schedule

EXAMPLES = 5  # names that an error shows


def paths_above(module: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def names_module(glob: str, module: str) -> bool:
    """Whether `glob` matches the path or one above, as ``blocks.0`` does for ``blocks.0.attn``."""
    return any(fnmatchcase(path, glob) for path in paths_above(module))


def recompute_globs(schedule: Schedule) -> tuple[str, ...]:
    """The globs of `recompute` that a schedule was made with: an option, as one text."""
    # An option is a plain value, so globs are joined to one text.
    text = str(schedule.options.get("recompute", ""))
    return tuple(text.split(", ")) if text else ()


def may_run_twice(op: Op, globs: Iterable[str]) -> bool:
    """Whether `op` is a custom op that these globs of `recompute` allow to run twice."""
    return op.no_recompute.startswith(CUSTOM) and any(names_module(one, op.module) for one in globs)


def modules_text(modules: Sequence[str]) -> str:
    more = f" and {len(modules) - EXAMPLES} more" if len(modules) > EXAMPLES else ""
    return f"Modules are {', '.join(modules[:EXAMPLES])}{more}"
