"""Globs over module paths: what they match, which ops they pin, and what is said if nothing.

A glob that matches nothing is an error, which names the module paths that are like it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import CUSTOM, Op, TrainingGraph
from remat.schedules.schedule import Schedule

EXAMPLES = 5  # names that an error shows


def _paths_above(module: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def names_module(glob: str, module: str) -> bool:
    """Whether `glob` matches the path or one above, as ``blocks.0`` does for ``blocks.0.attn``."""
    return any(fnmatchcase(path, glob) for path in _paths_above(module))


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


Globs = str | Iterable[str]  # one glob over module paths, or several


@dataclass(frozen=True, slots=True)
class Pins:
    """Forward ops by name, each with the glob that pins it."""

    kept: dict[str, str]  # must not run twice
    again: dict[str, str]  # values must not be carried from forward into backward

    @classmethod
    def of(cls, graph: TrainingGraph, keep: Globs, recompute: Globs) -> Pins:
        """The ops that globs name; SolverError: one pins nothing, or an op is pinned twice."""
        kept = _matched(graph, "keep", as_globs(keep))
        asked = _matched(graph, "recompute", as_globs(recompute))
        for op in _forward_ops(graph):
            if op.name in kept and op.name in asked:
                raise SolverError(
                    f"narrow keep '{kept[op.name]}' or recompute '{asked[op.name]}': op {op.name} "
                    f"({op.module}) is pinned by both"
                )
        # Ops that must run once, or whose value the caller holds, are left out.
        return cls(kept, _that_may_run_again(graph, asked))


def as_globs(globs: Globs) -> tuple[str, ...]:
    """A text is one glob, not its letters, and an empty one is none."""
    if isinstance(globs, str):
        return (globs,) if globs else ()
    return tuple(globs)


def _forward_ops(graph: TrainingGraph) -> tuple[Op, ...]:
    return graph.ops[: graph.n_forward]


def _matched(graph: TrainingGraph, option: str, globs: tuple[str, ...]) -> dict[str, str]:
    modules = list(dict.fromkeys(op.module for op in _forward_ops(graph)))
    found: dict[str, str] = {}
    for glob in globs:
        if not (hit := {module for module in modules if names_module(glob, module)}):
            raise SolverError(_no_module_text(option, glob, modules))
        for op in _forward_ops(graph):
            if op.module in hit:
                found.setdefault(op.name, glob)
    return found


def _no_module_text(option: str, glob: str, modules: list[str]) -> str:
    if not (named := [module for module in modules if module]):
        return f"{option} '{glob}' matches nothing: no op of this graph names its module"
    near = _near(glob, named)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{option} '{glob}' matches no module of a forward op: {hint}{modules_text(named)}"


def _near(glob: str, modules: list[str]) -> list[str]:
    """Module paths like the glob, as a whole or in their last part."""
    plain = ".".join(part for part in glob.split(".") if part.strip("*?")).strip("*?")
    paths = list(dict.fromkeys(path for module in modules for path in _paths_above(module)))
    known: dict[str, str] = {}
    # Whole paths before last parts, which may be the same text.
    for path in paths:
        known.setdefault(path, path)
    for path in paths:
        known.setdefault(path.rpartition(".")[2], path)
    close = difflib.get_close_matches(plain, known, n=3)
    return list(dict.fromkeys(known[name] for name in close))


def _that_may_run_again(graph: TrainingGraph, asked: dict[str, str]) -> dict[str, str]:
    given = set(graph.outputs)
    reasons = {
        op.name: why_not_again(op, given) for op in _forward_ops(graph) if op.name in asked
    }  # fmt: skip
    for glob in dict.fromkeys(asked.values()):
        of_glob = [name for name, its_glob in asked.items() if its_glob == glob]
        if all(reasons[name] for name in of_glob):
            said = "; ".join(f"{name}: {reasons[name]}" for name in of_glob[:EXAMPLES])
            raise SolverError(
                f"choose other modules, or leave out recompute '{glob}': it matches only ops that "
                f"cannot be recomputed ({said})"
            )
    return {name: glob for name, glob in asked.items() if not reasons[name]}


def why_not_again(op: Op, given: set[str]) -> str:
    """Why the values of `op` cannot be made again in backward; empty if they can."""
    if op.no_recompute:
        return f"it must not run twice: {op.no_recompute}"
    held = [value for value in op.outputs if value in given]
    return f"the step returns its value {held[0]}" if held else ""
